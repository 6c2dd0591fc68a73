"""Signals, a rank that hangs, a launcher that dies: the ranks leave in time, with a checkpoint if there can be one."""

import signal
import time

import psutil
import pytest

from labs.loop.stopping import PREEMPTED
from tests.faults.runs import STEPS, assert_same, checkpoints, losses

LONG = ("--steps=100000", "--save_every=0")


def step_reached(job):
    return max(losses(job))


def test_sigterm_to_one_rank_saves_and_leaves_within_30_s(start):
    job = start(*LONG)
    job.until("step   3")
    sent_s = time.monotonic()
    job.ranks()[1].send_signal(signal.SIGTERM)
    assert job.wait(30) == 1  # torchrun's own status, whatever the ranks' is
    assert time.monotonic() - sent_s < 30
    assert (job.out / "PREEMPTED").exists()
    (only,) = checkpoints(job)
    assert only.name == f"step-{step_reached(job) + 1}"
    assert not job.ranks()


def test_what_was_preempted_goes_on_bit_for_bit(start, undisturbed):
    job = start(faults="slow:step@3@0")
    job.until("step   2")
    job.agent.send_signal(signal.SIGTERM)
    assert job.wait(30) == 1
    (mark,) = [job.out / "PREEMPTED"]
    assert mark.exists()
    again = start()
    assert again.wait() == 0, again.printed
    assert not mark.exists()
    assert_same(again, undisturbed)


def test_ctrl_c_saves_and_leaves(start):
    job = start(*LONG)
    job.until("step   3")
    for process in [job.agent, *job.ranks()]:  # a terminal sends it to all of them
        process.send_signal(signal.SIGINT)
    job.wait(30)
    assert "stopped by Ctrl-C after " in job.printed
    assert "Traceback" not in job.printed
    (only,) = checkpoints(job)
    assert only.name == f"step-{step_reached(job) + 1}"
    assert not job.ranks()


@pytest.mark.tail
def test_a_rank_that_hangs_is_given_up_after_the_timeout(start, undisturbed):
    job = start("--timeout_s=3", max_restarts=1, faults="hang:step@3@1")
    assert job.wait() == 0, job.printed
    assert "goes on from step 2 " in job.printed
    assert_same(job, undisturbed)


def test_when_the_launcher_is_killed_its_ranks_save_and_leave(start):
    job = start(*LONG)
    job.until("step   3")
    ranks = job.ranks()
    assert len(ranks) == 2
    job.agent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert [path.name for path in checkpoints(job)] == [f"step-{step_reached(job) + 1}"], job.printed


def test_a_rank_left_alone_with_the_dead_does_not_wait_for_them(start):
    job = start(*LONG, "--timeout_s=600", faults="hang:step@3@1")
    job.until("step   2")
    time.sleep(1)
    job.agent.send_signal(signal.SIGTERM)
    assert job.wait(30) == 1
    assert not job.ranks()
    assert "left without it" in job.printed


def test_all_steps_done_is_status_0_and_no_mark(undisturbed):
    assert not (undisturbed.out / "PREEMPTED").exists()
    assert step_reached(undisturbed) == STEPS - 1
    assert PREEMPTED not in (0, 1, 2)
