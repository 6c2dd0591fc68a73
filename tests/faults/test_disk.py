"""A disk that is full, a folder that cannot be written: training goes on, loudly, and what was saved stays good."""

import pytest

from tests.faults.runs import assert_same, checkpoints, losses, partial
from tests.some import some


@pytest.mark.parametrize("saving", some(["--async_save=true", "--async_save=false"], first=1))
def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(start, undisturbed, saving):
    job = start(saving, faults="full:shard-write@4@1")
    assert job.wait() == 0, job.printed
    assert "the checkpoint of step 4 was not written" in job.printed
    assert "rank 1" in job.printed
    assert [path.name for path in checkpoints(job)] == ["step-2", "step-6"]
    assert_same(job, undisturbed)


def test_when_the_last_save_fails_the_status_says_so(start):
    job = start(faults="full:shard-write@6@0")
    assert job.wait() == 1
    assert "the checkpoint of step 6 was not written" in job.printed
    assert [path.name for path in checkpoints(job)] == ["step-2", "step-4"]
    assert len(losses(job)) == 6
    assert not partial(job)


def test_two_asynchronous_saves_at_once_wait_for_each_other(start, undisturbed):
    job = start("--async_save=true", "--save_every=1", faults="slow:before-shard-write@2@0")
    assert job.wait() == 0, job.printed
    assert losses(job) == losses(undisturbed)
    assert [path.name for path in checkpoints(job)] == ["step-5", "step-6"]
