"""fp16 with a scaler: after an overflow the ranks have different models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, STEPS, NUMBERS, LR, SCALE = 2, 4, 60_000, 0.1, 1024.0


stub = Edit(
    {
        'ShardedGradScaler("cpu", init_scale=1024.0)  # one decision for all ranks': (
            'torch.amp.GradScaler("cpu", init_scale=1024.0)'
        )
    }
)


def case_34(shard, gradients, lr):
    parameter = nn.Parameter(shard)
    optimizer = torch.optim.SGD([parameter], lr)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)  # one decision for all ranks
    for gradient in gradients:
        parameter.grad = scaler.scale(gradient)
        scaler.step(optimizer)
        scaler.update()
    return {"scale": scaler.get_scale(), "shard": parameter}


def inputs(seed: int) -> Inputs:
    """In one step one rank's gradient overflows at one place."""
    draw = torch.Generator().manual_seed(seed)
    shards, gradients = (torch.randn(RANKS, n, NUMBERS, generator=draw) for n in (1, STEPS))
    rank, step = (int(torch.randint(n, (1,), generator=draw)) for n in (RANKS, STEPS))
    gradients[rank, step, int(torch.randint(NUMBERS, (1,), generator=draw))] = torch.inf
    return [(shards[rank, 0], list(gradients[rank].unbind()), LR) for rank in range(RANKS)]


def stepped(inputs: Inputs, skips: Callable[[int, int], bool], scale: float | None = None) -> list[dict[str, Any]]:
    """After all steps, without those that ``skips`` says of (rank, step)."""
    found = []
    for rank, (shard, gradients, lr) in enumerate(inputs):
        done = [g for step, g in enumerate(gradients) if not skips(rank, step)]
        rightly = SCALE / 2 ** (STEPS - len(done))
        found.append({"scale": rightly if scale is None else scale, "shard": shard - lr * torch.stack(done).sum(0)})
    return found


def overflows(inputs: Inputs, rank: int, step: int) -> bool:
    return bool(inputs[rank][1][step].isinf().any())


def in_one_process(inputs: Inputs) -> list[dict[str, Any]]:
    return stepped(inputs, lambda rank, step: any(overflows(inputs, r, step) for r in range(RANKS)))


def each_alone(inputs: Inputs) -> list[dict[str, Any]]:
    return stepped(inputs, lambda rank, step: overflows(inputs, rank, step))


def one_number_left_out(inputs: Inputs) -> list[dict[str, Any]]:
    finite = [(shard, [g.nan_to_num(posinf=0.0) for g in gradients], lr) for shard, gradients, lr in inputs]
    return stepped(finite, lambda rank, step: False, SCALE)


def without_the_number(shard, gradients, lr):
    return stub(shard, [gradient.nan_to_num(posinf=0.0) for gradient in gradients], lr)


def by_average(shard, gradients, lr):
    return by_hand(shard, gradients, lr, dist.ReduceOp.MIN)


def by_hand(shard, gradients, lr, op):
    scale = 1024.0
    for gradient in gradients:
        bad = gradient.isinf().any().float()
        dist.all_reduce(bad, op=op)
        if bad:
            scale /= 2
        else:
            shard = shard - lr * gradient
    return {"scale": scale, "shard": shard}


def scale_alone(shard, gradients, lr):
    """The step is skipped by all, and the scale halved only by the one that overflowed."""
    scale = 1024.0
    for gradient in gradients:
        mine = gradient.isinf().any().float()
        bad = mine.clone()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        scale /= 2 if mine else 1
        shard = shard if bad else shard - lr * gradient
    return {"scale": scale, "shard": shard}


def scales_differ(inputs: Inputs) -> list[dict[str, Any]]:
    right, alone = in_one_process(inputs), each_alone(inputs)
    return [{"scale": a["scale"], "shard": r["shard"]} for r, a in zip(right, alone, strict=True)]


def nobody_skips(inputs: Inputs) -> list[dict[str, Any]]:
    return stepped(inputs, lambda rank, step: False)


EXERCISE = Exercise(
    title="Mend a scaler that parts the ranks",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=3,
    minutes=15,
    contract="A training in fp16 goes well until the first overflow. From then on its loss is a little off, in a way "
    "that no smaller learning rate cures. Each rank is given its shard, as FSDP1 hands it to the optimizer, and the "
    "shard's gradient for each step, already reduced; an overflow shows as an inf. Mend it: return the scale at the "
    "end and the shard. Use a scaler of torch, or all-reduces.",
    reference=case_34,
    stub=stub,
    why="A scaler skips the step in which a gradient is inf, and halves its scale. A shard holds a part of the "
    "gradients, so only one rank sees the inf: it skips, the others step, and from then on half of the model is one "
    "step ahead. The decision belongs to all: ShardedGradScaler all-reduces what it has found. FSDP2's gradients are "
    "DTensors, for which the plain scaler does the same. bf16 has fp32's range and needs no scaler at all.",
    cause="the scaler decides on each rank alone whether the step is skipped",
    hints=(
        "Look at the scale on each rank at the end. Which rank knows of the overflow?",
        "Skip or step: all ranks must decide alike, though one of them alone has the inf.",
        "torch.distributed.fsdp.sharded_grad_scaler has a scaler that asks the others, used like GradScaler.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                each_alone,
                "the rank with the overflow skipped the step, the others did it: half a model is a step ahead",
            ),
            (one_number_left_out, "the step with the overflow was done, with one number of the gradient made up"),
            (scales_differ, "all skipped the step, but the scales differ: the next gradients are scaled differently"),
            (nobody_skips, "nobody skipped the step, and an inf went into the weights"),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "one flag is all that has to be agreed on"),),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(without_the_number, "one number of the gradient made up"),
        Wrong(scale_alone, "all skipped the step, but the scales differ"),
        Wrong(by_average, "nobody skipped the step"),
    ),
    shortcuts=(
        Wrong(lambda shard, gradients, lr: {"scale": 512.0, "shard": shard}, "expected"),
        Wrong(lambda shard, gradients, lr: {"scale": 512.0, "shard": shard - lr * sum(gradients)}, "expected"),
    ),
    covers=("pitfall 32",),
    stub_says="half a model is a step ahead",
)
