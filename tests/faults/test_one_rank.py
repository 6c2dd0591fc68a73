"""Something goes wrong on one rank only: all ranks learn it before they act on it."""

import pytest

from tests.faults.runs import STEPS, checkpoints, losses

pytestmark = pytest.mark.tail  # see make test-all


def test_nan_on_one_rank_stops_all_before_the_update(start):
    job = start(faults="nan:loss@3@1")
    assert job.wait() == 1
    assert "step 3: the loss is nan" in job.printed
    assert [path.name for path in checkpoints(job)] == ["step-2"]
    assert max(losses(job)) == 2


def test_an_error_of_the_loader_on_one_rank_stops_the_job_and_names_rank_and_cause(start):
    job = start("--timeout_s=600", faults="raise:loader@3@1")
    assert job.wait(60) == 1
    assert "labs.train: rank 1: " in job.printed
    assert "raise:loader" in job.printed
    assert not job.ranks()


def test_uneven_data_gives_all_ranks_equally_many_steps(start, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 9)  # 349 training tokens: 10 rows of 32, and a bit
    job = start(f"--data={text}", "--dropout=0", ranks=4)
    assert job.wait() == 0, job.printed
    assert sorted(losses(job)) == list(range(STEPS))
