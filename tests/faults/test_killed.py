"""A rank is killed with SIGKILL: torchrun starts all anew, and they end with the bits of a run that was left alone."""

import pytest

from tests.faults.runs import assert_same, checkpoints, partial


@pytest.mark.parametrize(
    ("where", "rank", "goes_on"), [("before-shard-write", 1, 2), ("before-rename", 0, 2), ("before-latest", 0, 4)]
)
def test_in_the_middle_of_a_save(start, undisturbed, where, rank, goes_on):
    job = start(max_restarts=1, faults=f"kill:{where}@4@{rank}")
    assert job.wait() == 0, job.printed
    assert f"goes on from step {goes_on} " in job.printed
    assert_same(job, undisturbed)


def test_outside_a_save(start, undisturbed):
    job = start(max_restarts=1, faults="kill:step@3@0")
    assert job.wait() == 0, job.printed
    assert "goes on from step 2 " in job.printed
    assert_same(job, undisturbed)


def test_before_the_first_save_it_begins_again(start, undisturbed):
    job = start(max_restarts=1, faults="kill:step@1@1")
    assert job.wait() == 0, job.printed
    assert "goes on" not in job.printed
    assert_same(job, undisturbed)


def test_in_the_middle_of_an_asynchronous_save(start, undisturbed):
    job = start("--async_save=true", max_restarts=1, faults="kill:after-shard-write@4@1")
    assert job.wait() == 0, job.printed
    assert_same(job, undisturbed)


def test_without_restarts_the_next_run_goes_on(start, undisturbed):
    killed = start(faults="kill:before-rename@4@0")
    assert killed.wait() == 1
    assert [path.name for path in checkpoints(killed)] == ["step-2"]
    assert partial(killed)
    again = start()
    assert again.wait() == 0, again.printed
    assert "goes on from step 2 " in again.printed
    assert "removed" in again.printed  # what the dead run left half written
    assert_same(again, undisturbed)
