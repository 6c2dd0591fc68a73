"""A disk that is full, a folder that cannot be written: training goes on, loudly, and what was saved stays good."""

from tests.faults.runs import assert_same, checkpoints, losses, partial


def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(start, undisturbed):
    job = start("--async_save=true", faults="full:shard-write@4@1")
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
