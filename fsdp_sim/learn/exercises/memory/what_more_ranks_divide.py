"""Peak = model / N? What of a peak more ranks make smaller, and what not."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Iterable
from typing import Any

from fsdp_sim import simulate
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Memory, Timeline

SHARDS = (Memory.SHARDED, Memory.OPTIMIZER, Memory.RS_OUTPUT)


def what_more_ranks_divide(timeline):
    live = {"divided": 0, "whole": 0}
    peak = dict(live)
    for event in timeline.events:
        part = "divided" if event.category in ("sharded", "optimizer", "rs_output") else "whole"
        live[part] += {"alloc": event.bytes, "free": -event.bytes}.get(event.op, 0)
        if sum(live.values()) > sum(peak.values()):
            peak = dict(live)
    return peak


def alive(timeline: Timeline) -> dict[str, int]:
    """As the figures count it."""
    from fsdp_sim.viz.charts.alive import alive_at  # not in the learner's process, where its imports would take longest

    return split(alive_at(timeline, "the timeline", "peak", None).parts, SHARDS)


def split(parts: Iterable[Any], shards: Collection[Memory]) -> dict[str, int]:
    """The bytes of some categories, and of the others."""
    sizes = [(part.category in shards, part.bytes) for part in parts]
    return {"divided": sum(n for shard, n in sizes if shard), "whole": sum(n for shard, n in sizes if not shard)}


@functools.cache
def simulated(layers: int, ranks: int, rows: int, reshard: bool) -> Timeline:
    model = Model("gpt", n_layer=layers, d_model=768, n_head=12, d_ffn=3072, vocab=50257)
    plan = Plan(micro_batch=rows, seq_len=256, reshard_after_forward=reshard)
    return simulate(model, Cluster("A100-SXM-80GB", gpus=ranks), plan).timeline.select(lambda e: e.is_memory)


def cases(draw: random.Random) -> list[tuple[Timeline]]:
    some = [(4, draw.choice((2, 4)), 1, False), (3, draw.choice((8, 16)), draw.choice((2, 8)), True)]
    return [(simulated(*one),) for one in some]


EXERCISE = Exercise(
    title="Read off what more ranks divide",
    kind=ExerciseKind.TRACE,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="Given the memory events of one step of one rank, in issue order (op 'alloc' or 'free', bytes, category), "
    "find the moment at which most is alive and return a dict of the bytes alive then: 'divided', which is kept as "
    "shards (categories 'sharded', 'optimizer' and 'rs_output', the gradient shards), and 'whole', all the rest.",
    reference=what_more_ranks_divide,
    why='"Peak = model / N" counts what is kept as shards, and a peak is more: whole units, their gradients and '
    "buffers, activations, logits. More ranks leave these as they are, so eight times the ranks do not train a model "
    "eight times as large: its units and activations grow too.",
    hints=(
        "Which bytes would be fewer on this rank if there were twice as many ranks? Only those that are shards.",
        "Add up what is allocated and take away what is freed, one event after the other; remember the largest sum.",
        "Keep two running sums. Whenever their total is a new maximum, copy both.",
    ),
    judge=Numbers(truth=alive, source="counted at the peak of the timeline", cases=cases, unit="bytes"),
    wrong=(
        mutant(
            {'"divided" if event.category in ("sharded", "optimizer", "rs_output") else "whole"': '"divided"'},
            "activations, logits and whole units are not divided by ranks",
            name="everything",
        ),
        mutant(
            {
                "if sum(live.values()) > sum(peak.values()):\npeak = dict(live)": (
                    "peak = {part: max(peak[part], live[part]) for part in live}"
                )
            },
            "these two maxima are at different moments; a peak is one moment",
            name="peak of each",
        ),
        mutant(
            {'("sharded", "optimizer", "rs_output")': '("sharded",)'},
            "optimizer state and gradient shards are divided too",
        ),
        mutant(
            {'"rs_output"': '"rs_output", "unsharded", "ag_output"'}, "a unit that was gathered is there as a whole"
        ),
        mutant({"return peak": "return live"}, "that is what is left at the end, not the peak", name="at the end"),
    ),
    shortcuts=(Wrong(lambda timeline: {"divided": 1.49e9, "whole": 2.0e9}, "expected"),),
    covers=("misconception 17", "coverage 003.14", "coverage 002.23", "coverage 004.22", "coverage 000.11"),
)
