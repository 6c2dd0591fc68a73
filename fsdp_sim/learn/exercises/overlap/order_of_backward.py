"""Put FSDP2's backward in order."""

from __future__ import annotations

import random

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import OperationOrder
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Op, Phase

SHOWN = (Op.ALL_GATHER, Op.BWD, Op.REDUCE_SCATTER)


def order_of_backward(layers):
    order = [f"ALL_GATHER(layers.{layers - 1})", "BWD head"]
    for i in reversed(range(layers)):
        if i > 0:
            order.append(f"ALL_GATHER(layers.{i - 1})")
        order += [f"BWD layers.{i}", f"REDUCE_SCATTER(layers.{i})"]
    return [*order, "BWD embed", "REDUCE_SCATTER(root)"]


def issued(layers: int) -> list[str]:
    """By torch's CPU thread, from the built program."""
    backward = [i for i in toy_program(layers, world_size=4).ops if i.phase is Phase.BACKWARD and i.op in SHOWN]
    return [f"{i.op} {i.unit}" if i.op is Op.BWD else f"{i.op}({i.unit})" for i in backward]


def cases(draw: random.Random) -> list[tuple[int]]:
    return [(layers,) for layers in sorted(draw.sample(range(2, 9), 2))]


def prefetch_late(layers: int) -> list[str]:
    order = [f"ALL_GATHER(layers.{layers - 1})", "BWD head"]
    for i in reversed(range(layers)):
        order += [f"BWD layers.{i}", *([f"ALL_GATHER(layers.{i - 1})"] if i else []), f"REDUCE_SCATTER(layers.{i})"]
    return [*order, "BWD embed", "REDUCE_SCATTER(root)"]


def reduce_at_the_end(layers: int) -> list[str]:
    order = order_of_backward(layers)
    reduces = [label for label in order if label.startswith("REDUCE")]
    return [label for label in order if label not in reduces] + reduces


EXERCISE = Exercise(
    title="Put FSDP2's backward in order",
    kind=ExerciseKind.ORDER,
    difficulty=3,
    importance=5,
    minutes=15,
    contract="Given the number of blocks, return the labels of the all-gathers, backward computations and "
    "reduce-scatters of one backward in the order in which torch's CPU thread issues them, with fully_shard's "
    "defaults. Blocks are layers.0, layers.1, ...; the root computes 'BWD head' first and 'BWD embed' last. Labels are "
    "such as 'ALL_GATHER(layers.1)', 'BWD layers.1', 'REDUCE_SCATTER(layers.1)'.",
    reference=order_of_backward,
    why="Before a unit's backward computes, FSDP2 has already asked for the unit that comes after it in backward, so "
    "the wire works while the GPU computes. Its reduce-scatter is issued as soon as its gradients are there. The root "
    "was not freed after forward, so it is not gathered; but its backward begins (head) and ends (embed) the pass, and "
    "so its reduce-scatter is the last.",
    hints=(
        "Backward visits the units in the reverse of the forward's order; the root is both ends of it.",
        "FSDP2 prefetches: the next unit's all-gather is issued before this unit's backward computes, its "
        "reduce-scatter after.",
        "It begins with the last block's all-gather, then BWD head. Of block i: the gather of i - 1, BWD, reduce.",
    ),
    judge=OperationOrder(
        truth=issued,
        source="so torch issues them",
        cases=cases,
        where="with {layers} blocks",
        because={
            r"ALL_GATHER\(root": "the root was not freed after forward",
            r"ALL_GATHER": "the next unit is asked for before this one's backward computes: backward prefetch",
            r"BWD": "backward runs the units in the reverse of forward's order, the head first",
            r"REDUCE_SCATTER\(root": "the root's last gradients, those of the embedding, come at the very end",
            r"REDUCE_SCATTER": "a unit's gradients are reduced as soon as its backward has computed them",
        },
    ),
    wrong=(
        mutant(
            {
                'f"ALL_GATHER(layers.{layers - 1})", "BWD head"': '"BWD head"',
                'if i > 0:\norder.append(f"ALL_GATHER(layers.{i - 1})")\norder += [': (
                    'order += [f"ALL_GATHER(layers.{i})", '
                ),
            },
            "this is a backward without prefetch: every all-gather waits until it is needed",
            name="without prefetch",
        ),
        Wrong(
            prefetch_late, "this is BACKWARD_POST of FSDP1: the next all-gather comes after the backward, not before"
        ),
        Wrong(reduce_at_the_end, "gradients are reduced unit by unit, under the next backward, not all at the end"),
        mutant(
            {"[*order": '["ALL_GATHER(root)", *order'},
            "by default the root keeps its parameters after forward",
            name="root gathered again",
        ),
    ),
    shortcuts=(Wrong(lambda layers: sorted(order_of_backward(layers)), "expected"),),
    covers=("coverage 000.20", "coverage 002.15", "coverage 002.19", "misconception 3"),
)
