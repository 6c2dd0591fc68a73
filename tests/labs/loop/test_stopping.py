"""How a stop_request to stop is heard, also by a process whose main thread is stuck, and how long it is waited for."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from labs.loop.stopping import INTERRUPTED, PREEMPTED, StopRequest, stopping
from tests.some import tail


def wait_for(condition):
    give_up_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


class TestInThisProcess:
    def test_sigterm_wins_over_ctrl_c(self):
        with stopping() as stop_request:
            assert (stop_request.status, stop_request.why) == (0, "")
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda: stop_request.status == INTERRUPTED)
            assert stop_request.why == "Ctrl-C"
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: stop_request.status == PREEMPTED)
            assert stop_request.why == "SIGTERM"
            stop_request.ask(INTERRUPTED, "late")
            assert (stop_request.status, stop_request.why) == (PREEMPTED, "SIGTERM")

    def test_the_third_ctrl_c_interrupts(self):
        with stopping() as stop_request:
            for _ in range(2):  # torchrun may pass on what the terminal has sent already
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)
            wait_for(lambda: stop_request.status == INTERRUPTED)
            with pytest.raises(KeyboardInterrupt):
                press_and_wait()

    def test_what_comes_at_once_is_one_ctrl_c(self):
        with stopping() as stop_request:
            for _ in range(20):
                os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda: stop_request.status == INTERRUPTED)

    def test_afterwards_all_is_as_before(self):
        def state():
            return (
                [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
                set(threading.enumerate()),
                psutil.Process().num_fds(),
            )

        before = state()
        with stopping(os.getppid()):
            assert state() != before
        assert state() == before
        assert signal.set_wakeup_fd(-1) == -1

    def test_who_was_not_asked_itself_stops_for_another_rank(self):
        stop_request = StopRequest()
        assert stop_request.reason(0) == ""
        assert stop_request.reason(PREEMPTED) == "SIGTERM to another rank"
        stop_request.ask(INTERRUPTED, "Ctrl-C")
        assert stop_request.reason(INTERRUPTED) == "Ctrl-C"
        assert stop_request.reason(PREEMPTED) == "SIGTERM to another rank"
        stop_request.ask(PREEMPTED, "the end of its launcher")
        assert stop_request.reason(PREEMPTED) == "the end of its launcher"


def press_and_wait():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)


RANK = """
import ctypes, os, sys, time
import labs.loop.stopping
labs.loop.stopping.PATIENCE_S, labs.loop.stopping.GRACE_S = 0.5, 6.0
from labs.loop.stopping import stopping
sleep = ctypes.CDLL(None).sleep  # in C; a signal ends one sleep, the next begins before Python's handlers could ask
launcher = os.getppid() if LAUNCHED else None
BUILD
with stopping(launcher) as stop_request:
    stop_request.step_took(0.0)
    print("ready", flush=True)
    WORK
print(stop_request.status, stop_request.why, flush=True)
"""
STUCK = """while True: sleep(60)"""
SAVES = """with stop_request.longer_than_a_step():
        while not stop_request.status: time.sleep(0.01)
        time.sleep(1.5)  # longer than a step may take, shorter than the grace"""
SAVES_FOREVER = """with stop_request.longer_than_a_step():
        while True: sleep(60)"""
SAVES_THEN_IS_STUCK = """with stop_request.longer_than_a_step():
        while not stop_request.status: time.sleep(0.01)
    while True: sleep(60)"""
SAVES_THEN_STEPS = """with stop_request.longer_than_a_step():
        while not stop_request.status: time.sleep(0.01)
        time.sleep(2.0)
    stop_request.step_took(1.2)  # so the next may take 3.6 s
    time.sleep(2.4)"""
STEPS = """while not stop_request.status: time.sleep(0.01)"""


def rank(work, launched=False, build=""):
    return RANK.replace("LAUNCHED", str(launched)).replace("WORK", work).replace("BUILD", build)


def start(program):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


class TestTime:
    """From SIGTERM on: a step has seconds, for it may wait for the dead; a save has all the time there is."""

    @pytest.mark.parametrize(
        ("work", "what"),
        [
            (STUCK, "the step did not end"),
            tail(pytest.param(SAVES_FOREVER, "what takes longer than a step did not end")),
            tail(pytest.param(SAVES_THEN_IS_STUCK, "the step did not end")),
        ],
    )
    def test_who_does_not_get_ready_leaves_by_itself(self, work, what):
        process = start(rank(work))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert process.returncode == PREEMPTED
        assert f"asked to stop by SIGTERM, and {what}" in err

    @pytest.mark.parametrize("work", [SAVES, SAVES_THEN_STEPS])
    def test_a_save_may_take_longer_than_a_step_and_the_step_after_it_has_its_own_time(self, work):
        process = start(rank(work))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, f"{PREEMPTED} SIGTERM\n", "")

    def test_ctrl_c_gives_a_step_all_the_time_it_takes(self):
        process = start(rank("while not stop_request.status: time.sleep(0.01)\n    time.sleep(1.5)"))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, f"{INTERRUPTED} Ctrl-C\n", "")


LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
rank.wait()
"""


class TestLauncher:
    """A process that starts the rank and is killed: the rank is nobody's child then, and has to notice it."""

    def killed(self, work, launched, build=""):
        """The rank, its launcher dead, and where both print."""
        command = [sys.executable, "-c", LAUNCHER, rank(work, launched, build)]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert launcher.stdout.readline() == "ready\n"
        (orphan,) = psutil.Process(launcher.pid).children()
        launcher.kill()
        return orphan, launcher

    def test_it_may_end_before_anyone_looks(self):
        build = 'print("ready", flush=True)\nwhile os.getppid() == launcher: time.sleep(0.01)'
        _, pipes = self.killed(STEPS, launched=True, build=build)
        out, _ = pipes.communicate(timeout=20)
        assert out.endswith(f"{PREEMPTED} the end of its launcher\n")

    def test_a_rank_that_is_stuck_leaves_too(self):
        orphan, pipes = self.killed(STUCK, launched=True)
        _, err = pipes.communicate(timeout=20)
        assert "asked to stop by the end of its launcher, and the step did not end" in err
        psutil.wait_procs([orphan], timeout=20)
        assert not orphan.is_running()

    def test_who_was_started_by_hand_goes_on_when_the_terminal_closes(self):
        orphan, pipes = self.killed(STEPS, launched=False)
        wait_for(lambda: orphan.ppid() != pipes.pid)
        time.sleep(1.2)  # two looks
        assert orphan.is_running()
        orphan.terminate()
        out, _ = pipes.communicate(timeout=20)
        assert out == f"{PREEMPTED} SIGTERM\n"
