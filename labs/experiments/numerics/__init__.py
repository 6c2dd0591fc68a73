"""Precision, accumulation, clipping: what changes the numbers of a training, and by how much.

Everything is predicted from a formula first, then done with torch's own FSDP2 and FSDP1 on real ranks:

    small_training the GPT that all of them share
    reduction      gradients of many ranks added up in bf16: each addition rounds, so the error grows with their number
    scaling        gradients too small for fp16, and the scaler that lifts them
    accumulation   reduce in each micro-batch, or in the last one only: the same numbers, bytes sent for bytes kept
    clipping       the norm of all ranks' gradients, and what becomes of it when a rank clips by its own shards
    tokens         ranks with unequally many tokens: a mean of means is not the mean
    losses         the trainer in fp32 and in bf16 (on GPUs, where it can, in fp16 too)

All but the last is done on CPU cores also where there are GPUs: a format rounds in the same way everywhere.
As a command: ``python -m labs.experiments.numerics --help``.
"""

from __future__ import annotations

from labs.cluster.process_group import n_ranks, ranks_on
from labs.experiments.numerics.accumulation import accumulation
from labs.experiments.numerics.clipping import clipping
from labs.experiments.numerics.losses import compare_losses, dtypes, losses
from labs.experiments.numerics.reduction import (
    BF16_RMS,
    BF16_UNIT,
    add_in_bf16,
    predict_reduction,
    reduce_in_bf16,
    reduction,
    reduction_picture,
)
from labs.experiments.numerics.scaling import SCALE, fp16, predict_vanished, vanished
from labs.experiments.numerics.small_training import MODEL, SEQ_LEN, gradients_of
from labs.experiments.numerics.tokens import tokens
from labs.experiments.result import LabResult, this_machine

__all__ = [
    "BF16_RMS", "BF16_UNIT", "MODEL", "SCALE", "SEQ_LEN", "accumulation", "add_in_bf16", "clipping", "compare_losses",
    "fp16", "gradients_of", "losses", "predict_reduction", "predict_vanished", "reduce_in_bf16", "reduction",
    "reduction_picture", "run", "tokens", "vanished",
]  # fmt: skip


def run(ranks: int = 4, steps: int = 10, device: str = "cpu") -> LabResult:
    """All of it.

    Args:
        ranks: of the experiments on accumulation and clipping, at least 2 and dividing 128.
        steps: of the trainings.
        device: ``cpu``; with ``cuda`` the trainer runs on two GPUs, or on the one that there is.

    Raises:
        ValueError: a number that cannot be; no GPU. FailedError, RanksError: a training failed.
    """
    if ranks < 2 or 128 % ranks or steps < 1:
        raise ValueError(f"ranks={ranks}, steps={steps}: ranks is 2, 4, 8, ... up to 64, and steps at least 1")
    trained_on = min(2, ranks_on(device))
    curves = losses(trained_on, steps, device)
    rows = [*reduction(), *fp16(), *accumulation(ranks), *clipping(ranks), *tokens(), *compare_losses(curves)]
    notes = (
        f"The losses are those of the trainer on {device} ({', '.join(dtypes(device))}; fp16 is for GPUs). All "
        f"else was measured on {n_ranks(ranks)}, or as many as it says, on CPU cores with gloo.",
    )
    return LabResult("numerics", "measured", tuple(rows), this_machine(device, trained_on), notes=notes)
