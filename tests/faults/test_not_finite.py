"""Parameters that are not finite are never saved, a run never stays with them, and skipping has an end."""

from tests.faults.runs import checkpoints, losses

OVERFLOWS = "--lr=1e39"  # more than fp32 holds: the first update leaves no finite parameter


def test_what_is_not_finite_is_not_saved_and_the_next_run_goes_on_from_before(start):
    first = start("--steps=2")
    assert first.wait() == 0, first.printed
    lost = start("--steps=8", "--nonfinite=skip", OVERFLOWS)
    assert lost.wait() == 1
    assert "the checkpoint of step 8 was not written: rank 0: model." in lost.printed
    assert "holds NaN or infinity" in lost.printed
    assert [path.name for path in checkpoints(lost)] == ["step-2"]
    again = start("--steps=4")
    assert again.wait() == 0, again.printed
    assert "goes on from step 2 " in again.printed
    assert all(loss == loss for loss in losses(again).values())


def test_steps_are_not_skipped_for_ever(start):
    job = start("--steps=1000", "--save_every=0", "--nonfinite=skip", OVERFLOWS)
    assert job.wait() == 1
    assert (
        "labs.train: step 20: the loss is nan and the gradients' norm nan; 20 steps in a row had no update"
        in job.printed
    )
