"""One layer at a time? What is whole at the peak of forward, and of backward."""

from __future__ import annotations

import functools
import random

from fsdp_sim import simulate
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Memory, Timeline

WHOLE = (Memory.UNSHARDED, Memory.AG_OUTPUT, Memory.UNSHARDED_GRAD, Memory.RS_INPUT)


def stands_at_the_peak(timeline, phase):
    live: dict[str, int] = {}
    most, found = -1, []
    for event in timeline.events:
        name = f"{event.category} {event.unit}"
        live[name] = live.get(name, 0) + (event.bytes if event.op == "alloc" else -event.bytes)
        if event.phase == phase and sum(live.values()) > most:
            most = sum(live.values())
            found = [name for name, size in live.items() if size]
    whole = ("unsharded", "ag_output", "unsharded_grad", "rs_input")
    return sorted(name for name in found if name.split()[0] in whole)


def alive(timeline: Timeline, phase: str) -> list[str]:
    """As the figures find it."""
    from fsdp_sim.viz.charts.alive import alive_at  # not in the learner's process, where its imports would take longest

    parts = alive_at(timeline, "the timeline", phase, None).parts
    return sorted(f"{part.category} {part.unit}" for part in parts if part.category in WHOLE)


@functools.cache
def simulated(layers: int, reshard: bool, prefetch: int | None) -> Timeline:
    """The layers are nearly all there is: few words, short rows."""
    model = Model("gpt", n_layer=layers, d_model=1024, n_head=8, d_ffn=4096, vocab=64)
    plan = Plan(reshard_after_forward=reshard, forward_prefetch=prefetch, seq_len=16)
    return simulate(model, Cluster("A100-SXM-80GB", gpus=64), plan).timeline.select(lambda e: e.is_memory)


def cases(draw: random.Random) -> list[tuple[Timeline, str]]:
    layers = draw.sample((4, 5, 6), 2)
    plans = [(True, None), (draw.choice((True, False)), draw.choice((1, 2)))]
    return [
        (simulated(n, *plan), phase) for n, plan in zip(layers, plans, strict=True) for phase in ("forward", "backward")
    ]


EXERCISE = Exercise(
    title="Name what is whole at the peak",
    kind=ExerciseKind.TRACE,
    difficulty=3,
    importance=4,
    minutes=25,
    contract="Given the memory events of one rank's step, in issue order (op 'alloc' or 'free', category, unit, "
    "bytes, phase), and a phase ('forward' or 'backward'), find the first moment in that phase at which most is "
    "alive. Return, sorted, what is as large as a whole unit then, as 'category unit' ('unsharded layers.1'): of the "
    "categories unsharded, ag_output, unsharded_grad and rs_input.",
    reference=stands_at_the_peak,
    why='"One layer at a time" is true of computing only. In forward a unit stands beside the flat buffer it is '
    "copied out of and the buffer of the one before it, which is let go one unit later: three units' worth. In "
    "backward a unit, its gradient, the next gather's buffer and what the last reduce-scatter still reads: four. "
    "Explicit prefetch of depth k makes it k + 2 in forward, and without resharding every unit of forward stays "
    "until its backward.",
    hints=(
        "What is alive is everything allocated before that moment and not yet freed, of all phases.",
        "Keep a dict of live bytes by category and unit; compare its sum after each event of the phase with the most.",
        "When the sum is a new maximum, remember the names whose bytes are not 0; at the end keep the four categories.",
    ),
    judge=Numbers(truth=alive, source="found in the simulated step", cases=cases, where="at the peak of {phase}"),
    wrong=(
        mutant(
            {'("unsharded", "ag_output", "unsharded_grad", "rs_input")': '("unsharded",)'},
            "gradients and the buffers of collectives are as large as a unit too",
        ),
        mutant(
            {'("unsharded", "ag_output", "unsharded_grad", "rs_input")': '("unsharded", "unsharded_grad")'},
            "the flat buffers of all-gather and reduce-scatter are as large as a unit too",
        ),
        mutant(
            {"event.phase == phase and ": ""},
            "that is the peak of the whole step; each phase has a peak of its own",
            name="of the step",
        ),
        mutant(
            {" and sum(live.values()) > most": ""},
            "that is what is alive at the end of the phase, not at its peak",
            name="at the end",
        ),
    ),
    shortcuts=(Wrong(lambda timeline, phase: ["unsharded layers.1"], "expected"),),
    covers=("coverage 004.37", "coverage 002.23"),
)
