"""Steps of training with each culprit in them, and the culprits that the engine's own explanation knows."""

from collections import Counter

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.look import Found, look
from fsdp_sim.engine import Explanation, explain, run
from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Timeline
from tests.engine.programs import durations, layers_only

# What `explain`, which sees the program, calls it, and what `diagnose`, which sees the timeline, calls it.
SAME: dict[str, set[Culprit]] = {
    "all-gather": {Culprit.NETWORK, Culprit.SMALL, Culprit.COPIES},
    "first all-gather": {Culprit.FIRST_ALL_GATHER},
    "head of line": {Culprit.HEAD_OF_LINE},
    "slower rank": {Culprit.SLOW_RANK},
    "rate limiter": {Culprit.RATE_LIMITER},
    "computing thread": {Culprit.COMPUTING_THREAD},
    "reduce-scatter buffer": {Culprit.RS_BUFFER},
    "asynchronous all-gather": {Culprit.ASYNCHRONOUS},
    "reduction": {Culprit.REDUCTION},
    "last reductions": {Culprit.LAST_REDUCTIONS, Culprit.COPIES},  # casts after them
    "last all-gathers": {Culprit.LAST_ALL_GATHERS},
    "CPU issue": {Culprit.CPU_LATE, Culprit.HOST},
    "other": {Culprit.UNKNOWN, Culprit.COPIES},
}


def played(plan=None, layers=3, device="gpu", issue_s=0.0, units=None, steps=1, world_size=8, **seconds) -> Run:
    """A small model's step; durations are those of `tests.engine.programs.durations`."""
    program = build(units or layers_only(layers), plan or Plan(), world_size, steps=steps)
    return run(program, durations(**seconds), device=device, issue_s=issue_s)


def idle_by_culprit(timeline: Timeline, **which) -> dict[Culprit, float]:
    """Seconds in which compute stands idle, by culprit; those of next to no length left out."""
    totals: Counter[Culprit] = Counter()
    for wait in look(timeline, **which).idle:
        totals[wait.culprit] += wait.seconds
    return {culprit: seconds for culprit, seconds in totals.items() if seconds > 1e-12}


def compare(told: Explanation, timeline: Timeline) -> tuple[Found, list[tuple[float, str, Culprit | None]]]:
    """What the diagnosis saw, and for each gap that the engine explains its seconds, its reason, and the culprit.

    Where a gap is cut in two (waiting for a collective, then for the CPU), the engine tells why it ends: the last part.
    """
    found = look(timeline, step=told.step, rank=told.rank)
    pairs = []
    for wait in told.waits:
        if wait.gap.end_s <= found.window[0]:
            continue  # before the first operation, when the CPU issues it
        mine = [w.culprit for w in found.idle if abs(w.end_s - wait.gap.end_s) < 1e-12 + 1e-9 * wait.gap.end_s]
        pairs.append((wait.seconds, wait.reason, mine[-1] if mine else None))
    return found, pairs


def agree(reason: str, culprit: Culprit | None, on_cpu: bool) -> bool:
    """Whether a reason and a culprit are the same. On a CPU a copy keeps the CPU from issuing, which is both."""
    return culprit in SAME[reason] or (on_cpu and reason == "CPU issue" and culprit is Culprit.COPIES)


def explained(found: Run, step: int = -1) -> Explanation:
    return explain(found, step=step)
