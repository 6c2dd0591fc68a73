"""Something goes wrong on one rank only: all ranks learn it before they act on it."""

import pytest

from tests.faults.runs import STEPS, assert_same, checkpoints, losses

pytestmark = pytest.mark.tail  # see make test-all


def test_nan_on_one_rank_stops_all_before_the_update(start):
    job = start(faults="nan:loss@3@1")
    assert job.wait() == 1
    assert "step 3: the loss is nan" in job.printed
    assert [path.name for path in checkpoints(job)] == ["step-2"]
    assert max(losses(job)) == 2


def test_nan_can_be_skipped(start):
    job = start("--nonfinite=skip", faults="nan:loss@3@1")
    assert job.wait() == 0, job.printed
    assert "step 3: the loss is nan" in job.printed
    assert all(loss == loss for step, loss in losses(job).items() if step != 3)
    assert len(losses(job)) == STEPS


def test_an_error_of_the_loader_on_one_rank_stops_the_job_and_names_rank_and_cause(start):
    job = start("--timeout_s=600", faults="raise:loader@3@1")
    assert job.wait(60) == 1
    assert "labs.train: rank 1: " in job.printed
    assert "raise:loader" in job.printed
    assert not job.ranks()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_uneven_data_gives_all_ranks_equally_many_steps(start, tmp_path, ranks):
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 9)  # 349 training tokens: 10 rows of 32, and a bit
    job = start(f"--data={text}", "--dropout=0", ranks=ranks)
    assert job.wait() == 0, job.printed
    assert sorted(losses(job)) == list(range(STEPS))


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 2), (4, 3), (1, 4)])
def test_another_number_of_ranks_sees_the_same_rows_and_has_the_same_losses(start, before, after):
    setting = ("--dropout=0", "--global_batch=12", "--save_every=3")
    whole = start(*setting, ranks=before, into="whole")
    assert whole.wait() == 0, whole.printed
    first = start(*setting, ranks=before, faults="kill:step@3@0")
    assert first.wait() == 1
    second = start(*setting, ranks=after)
    assert second.wait() == 0, second.printed
    assert f"written by {before} rank" in second.printed
    assert losses(second) == pytest.approx(losses(whole), rel=1e-5)


def test_asking_for_the_same_again_changes_nothing(start, undisturbed):
    first = start()
    assert first.wait() == 0
    again = start()
    assert again.wait() == 0, again.printed
    assert "all 6 steps are done" in again.printed
    assert_same(again, undisturbed)
