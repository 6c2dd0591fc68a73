"""With fp16 some ranks skip a step and others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, STEPS, NUMBERS, LR, SCALE = 4, 5, 20_000, 0.1, 2.0**13
LARGEST = 65_504.0  # of fp16


def stub(weights, backward, steps, scale, lr):
    for step in range(steps):
        gradient = backward(step, scale).float()
        if gradient.isfinite().all():
            weights = weights - lr * gradient / scale
        else:  # too large for fp16: leave this step out, and scale less from now on
            scale = scale / 2
    return {"weights": weights, "scale": scale}


def case_12(weights, backward, steps, scale, lr):
    for step in range(steps):
        gradient = backward(step, scale).float()
        bad = torch.tensor(float(not gradient.isfinite().all()))
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # the decision is everyone's
        if bad:
            scale = scale / 2
        else:
            weights = weights - lr * gradient / scale
    return {"weights": weights, "scale": scale}


def backward_of(gradients: torch.Tensor) -> Callable[[int, float], torch.Tensor]:
    """This rank's shard of the reduced gradient, times the scale, in fp16."""

    def backward(step: int, scale: float) -> torch.Tensor:
        return (gradients[step] * scale).half()

    return backward


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.randn(RANKS, STEPS, NUMBERS, generator=draw)
    odd = int(torch.randint(1, RANKS, (1,), generator=draw))
    gradients[odd, 1, 7] = 1.5 * LARGEST / SCALE  # of one shard only, and not of rank 0's
    gradients[odd, 3, 7] = 3 * LARGEST / SCALE
    weights = torch.randn(RANKS, NUMBERS, generator=draw)
    return [(weights[rank], backward_of(gradients[rank]), STEPS, SCALE, LR) for rank in range(RANKS)]


def zeroed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.nan_to_num(0, 0, 0)


def trained(
    inputs: Inputs,
    decide: Callable[[list[bool], int], bool],
    divide: float = 2.0,
    step_with: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> list[dict[str, Any]]:
    """All ranks' steps in one process; ``decide`` says of a rank whether it skips, from whose shards are bad."""
    weights, scales = [weights for weights, *_ in inputs], [SCALE] * RANKS
    for step in range(STEPS):
        shards = [backward(step, scale).float() for (_, backward, *_), scale in zip(inputs, scales, strict=True)]
        bad = [not bool(shard.isfinite().all()) for shard in shards]
        for rank, shard in enumerate(shards):
            if decide(bad, rank):
                scales[rank] /= divide
            else:
                weights[rank] = weights[rank] - LR * step_with(shard) / scales[rank]
    return [{"weights": w, "scale": s} for w, s in zip(weights, scales, strict=True)]


EXERCISE = Exercise(
    title="Mend a scaler with which some ranks skip a step",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="fp16 training with a loss scale. backward(step, scale) returns this rank's shard of the reduced "
    "gradient, times the scale, in fp16: too large a number becomes inf. Symptom: after some hundred steps the ranks' "
    "scales differ (512 on rank 0, 1024 on rank 1) and the loss rises. Mend it: when any rank's shard is not finite, "
    "all leave the step out and halve the scale. Return {'weights': this rank's, 'scale': ...}.",
    reference=case_12,
    stub=stub,
    why="The gradient is sharded, so an inf is in one rank's shard and the others do not see it: they step, and from "
    "then on the shards belong to different histories. The flag must be everyone's, its maximum over the ranks. That "
    "is what ShardedGradScaler does for FSDP1; with FSDP2 the gradients are DTensors, and the plain GradScaler's "
    "check already sees all of them. bf16 has the range of fp32 and needs no scaler.",
    cause="each rank looks for inf in its own shard and decides by itself",
    hints=(
        "Whose gradient is it that overflows, and who gets to know?",
        "A decision that changes what all ranks do must be the same on all ranks, so it takes a collective.",
        "A tensor with 1.0 where this rank's shard is not finite; all_reduce it with MAX; branch on the result.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=lambda inputs: trained(inputs, lambda bad, rank: any(bad)),
        causes=(
            (
                lambda inputs: trained(inputs, lambda bad, rank: bad[rank]),
                "each rank looks at its own shard only: one skips the step, the others take it",
            ),
            (
                lambda inputs: trained(inputs, lambda bad, rank: any(bad), divide=1.0),
                "the step was left out, but the scale stays: it will overflow again",
            ),
            (
                lambda inputs: trained(inputs, lambda bad, rank: False, step_with=zeroed),
                "the step was taken with its infinite numbers set to zero: another gradient, without a word",
            ),
            (
                lambda inputs: trained(inputs, lambda bad, rank: bad[0]),
                "rank 0 decides for all, and the inf is in another rank's shard",
            ),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "a maximum of flags is all it takes"),),
    ),
    wrong=(
        Wrong(stub, "each rank looks at its own shard only"),
        mutant({"dist.all_reduce(bad, op=dist.ReduceOp.MAX)": "dist.broadcast(bad, src=0)"}, "rank 0 decides for all"),
        mutant({"scale = scale / 2": "pass"}, "the scale stays"),
        mutant(
            {"float(not gradient.isfinite().all())": "0.0", "lr * gradient": "lr * gradient.nan_to_num(0, 0, 0)"},
            "set to zero",
        ),
    ),
    shortcuts=(
        Wrong(lambda weights, backward, steps, scale, lr: {"weights": weights, "scale": scale / 8}, "expected"),
        Wrong(lambda weights, backward, steps, scale, lr: {"weights": weights * 0, "scale": 1024.0}, "expected"),
    ),
    covers=("pitfall 32", "coverage 004.51", "coverage 002.7", "coverage 000.27"),
    stub_says="each rank looks at its own shard only",
)
