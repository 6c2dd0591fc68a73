"""What becomes of a run when the loss or the gradients are NaN or infinite."""

from __future__ import annotations

from labs.loop.metrics import Metrics
from labs.loop.run_state import RunState
from labs.loop.saving import report_failed_saves
from labs.loop.step import StepOutcome

MOST_SKIPPED = 20
"""Steps in a row without an update. fp16's scaler needs 16 to come down from where it starts (2**16) to 1."""


class NotFiniteError(ArithmeticError):
    """Loss or gradients are NaN or infinite."""


def check_update(outcome: StepOutcome, training: RunState, metrics: Metrics) -> None:
    """Note a step that left out its update, or stop there.

    Raises:
        NotFiniteError: something was not finite, and ``nonfinite`` is stop; or too many steps in a row had no update.
    """
    training.skipped_in_a_row = 0 if outcome.updated else training.skipped_in_a_row + 1
    give_up = training.skipped_in_a_row == MOST_SKIPPED
    if outcome.finite and not give_up:
        if not outcome.updated:
            metrics.event("overflowed", step=training.step)  # the scaler has lowered its scale
        return
    what = f"step {training.step}: the loss is {outcome.loss:g} and the gradients' norm {outcome.grad_norm:g}"
    if give_up or training.run.config.nonfinite == "stop":
        report_failed_saves(training, metrics, wait=True)  # the next run begins with the one that is being written
        raise NotFiniteError(
            f"{what}; {MOST_SKIPPED} steps in a row had no update, so it is the parameters, and leaving out more "
            "changes nothing; start it again to go on from the newest checkpoint, with a lower lr or with clip"
            if give_up
            else f"{what}; stopped before the update (nonfinite=skip would leave it out and go on)"
        )
    metrics.say(f"{what}: no update")
    metrics.event("skipped", step=training.step)
