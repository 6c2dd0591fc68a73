"""What several micro-batches and several copies add."""

from __future__ import annotations

import random
from typing import Any

from fsdp_sim.learn.drill.draws import a_model
from fsdp_sim.learn.drill.question import Mistake, Number
from fsdp_sim.learn.drill.questions.schedule.common import BLOCKS, FSDP2, SMALL, counted
from fsdp_sim.learn.drill.template import template
from fsdp_sim.timeline import Op


def accumulated(op: Op, layers: int, micro_batches: int, **settings: Any) -> int:
    """The same where gradients are accumulated: that of two micro-batches, and what the third adds."""
    two, three = (counted(op, layers, grad_accum=n, **settings) for n in (2, 3))
    return two + (micro_batches - 2) * (three - two)


ACCUMULATE: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "set_requires_gradient_sync(False) in all micro-batches but the last": {"requires_gradient_sync": "last"},
    "reshard_after_forward=False on every unit, and no other setting": {"reshard_after_forward": False},
    "reshard_after_forward=False on every unit, and set_reshard_after_backward(False) and "
    "set_requires_gradient_sync(False) in all micro-batches but the last": {
        "reshard_after_forward": False, "reshard_after_backward": "last", "requires_gradient_sync": "last",
    },
}  # fmt: skip


@template(
    level=2,
    seconds=90,
    section="08.4",
    rule="M micro-batches, gradient sync in the last alone: reduce-scatters / M; all-gathers are not reduced by it.",
    source=f"{FSDP2}.post_backward; torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
)
def collectives_of_accumulation(draw: random.Random) -> Number:
    name, model = a_model(draw, *SMALL)
    layers, micro_batches = model.n_layer, draw.choice((2, 4, 8, 16))
    mode, op = draw.choice(tuple(ACCUMULATE)), draw.choice((Op.ALL_GATHER, Op.REDUCE_SCATTER))
    one, answer = (
        counted(op, layers, **ACCUMULATE[mode]),
        accumulated(op, layers, micro_batches, **ACCUMULATE[mode]),
    )
    what = "all-gathers" if op is Op.ALL_GATHER else "reduce-scatters"
    whole, twice = layers + 1, 2 * layers + 1
    if op is Op.ALL_GATHER:
        mistakes = [
            Mistake(twice * micro_batches, "that gathers again in every backward, as where forward frees the blocks"),
            Mistake(whole * micro_batches, "that is a gather per unit and micro-batch, without those of backward"),
            Mistake(twice, "to skip reductions does not skip gathers: every micro-batch has them"),
            Mistake(whole, "that takes parameters that stay whole after backward too"),
        ]
    else:
        mistakes = [
            Mistake(whole * micro_batches, "set_requires_gradient_sync(False) leaves the reduction to the last one"),
            Mistake(whole, "without set_requires_gradient_sync(False) every micro-batch reduces its gradients"),
            Mistake(twice, "a unit may be gathered twice, but its gradients are reduced once per backward"),
        ]
    mistakes += [Mistake(n * layers, "the root is a unit as well") for n in (1, micro_batches)]
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. A step accumulates {micro_batches} micro-batches with {mode}. How many "
        f"{what} does a rank issue per step?",
        answer=answer,
        unit=what,
        rel=0,
        given={"layers": layers, "micro_batches": micro_batches, "mode": mode, "what": str(op)},
        mistakes=tuple(mistakes),
        why=f"Each micro-batch that issues them issues {one}; here "
        + (f"all {micro_batches} do." if answer == micro_batches * one else "only one does."),
    )


@template(
    level=3,
    seconds=90,
    section="10.2",
    rule="HSDP all-reduces each unit's shard every micro-batch; with set_requires_all_reduce(is_last) once a step.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_all_reduce; _fsdp_collectives.py, foreach_reduce",
)
def all_reduces_of_hsdp(draw: random.Random) -> Number:
    name, model = a_model(draw, *SMALL)
    layers, micro_batches, copies = model.n_layer, draw.choice((2, 4, 8)), draw.choice((2, 4, 16))
    last = draw.choice((True, False))
    settings: dict[str, Any] = {"shard_size": 4, "requires_all_reduce": "last" if last else True}
    answer = accumulated(Op.ALL_REDUCE, layers, micro_batches, **settings)
    mode = "set_requires_all_reduce(is_last_micro_batch)" if last else "torch's defaults"
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. It runs as HSDP with {copies} copies of 8 shards, {micro_batches} "
        f"micro-batches per step and {mode}. How many all-reduces does a rank issue per step?",
        answer=answer,
        unit="all-reduces",
        rel=0,
        given={"layers": layers, "micro_batches": micro_batches, "last": last},
        mistakes=(
            Mistake(
                micro_batches * (layers + 1), "reduce-scatters run in every micro-batch, all-reduces only in the last"
            ),
            Mistake(layers + 1, "without a setting every micro-batch all-reduces"),
            Mistake(layers, "the root has gradients too"),
            Mistake(micro_batches * layers, "the root has gradients too"),
            Mistake(answer * copies, "that counts the copies; each rank takes part in one group"),
            Mistake(1, "every unit's gradients are reduced by themselves, as soon as they are there"),
        ),
        why=f"One for each of the {layers + 1} units "
        + ("in the last micro-batch alone." if last else f"in each of {micro_batches} micro-batches."),
    )
