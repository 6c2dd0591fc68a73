"""`explain`: why a step takes as long as it does, in numbers and in sentences.

Numbers first: where compute stood idle and what it waited for, the critical path, what bound each unit, and what faster
hardware would gain, found by playing the program again. `fsdp_sim.engine.sentences` puts them into words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from fsdp_sim.engine.critical_path import Cause, Causes, Piece, critical_path
from fsdp_sim.engine.exposure import Exposure, Gap, exposure
from fsdp_sim.engine.run import Run, at_rank
from fsdp_sim.schedule import Instruction, Kind
from fsdp_sim.timeline import COLLECTIVES, Lane, Op, Phase

Bound = Literal["compute", "network", "copies", "CPU"]
Reason = Literal[
    "all-gather",  # the gather started as soon as it could, and takes longer than what could hide it
    "first all-gather",  # nothing had been computed that could hide it
    "head of line",  # the gather stood behind a reduction on their communicator
    "slower rank",  # the collective could start only when another rank came to it
    "rate limiter",  # the limiter held the CPU back
    "computing thread",  # on a CPU: the thread that computes issued the gather only when it was needed
    "reduce-scatter buffer",  # gradients wait for the input buffer of an earlier reduce-scatter
    "asynchronous all-gather",  # issued on the compute stream, it started only after what was computed before
    "reduction",  # compute goes on only after a reduction of earlier gradients
    "last reductions",  # the optimizer needs what nothing is left to hide
    "last all-gathers",  # ZeRO: the updated parameters are gathered when nothing is left to compute
    "CPU issue",  # the CPU had not issued it
    "other",
]
FASTER = 1.1  # what "10% faster" means: a part does 1.1 times as much in the same time


class Wait(NamedTuple):
    """A time in which the compute lane stands idle, and what for.

    Attributes:
        gap: when, and before which operation.
        reason: the pattern it is a case of.
        waiting: the operation that waits.
        on: the operation it waits for, if any.
        behind: the operation which that one had to wait for, if any.
        rank: the rank that was last to be ready for the operation it waits for.
    """

    gap: Gap
    reason: Reason
    waiting: Instruction | None
    on: Instruction | None
    behind: Instruction | None
    rank: int

    @property
    def seconds(self) -> float:
        return self.gap.seconds


@dataclass(frozen=True)
class Explanation:
    """Why a step takes as long as it does.

    Attributes:
        run, step, rank: what is explained; the rank is the one on which the step ends.
        exposure: communication and idle times.
        waits: each idle time of the compute lane, and what for.
        critical_path: see `critical_path`.
        critical_s: seconds of the critical path by what they are spent on.
        bound: for each unit, in order of issue, what most of its part of the critical path is spent on.
        between_steps_s: what a training loop takes between two steps, which is not replayed.
        gains: seconds that the step would be shorter if ``compute``, ``network`` or ``cpu`` were 10% faster, by
            playing it again.
    """

    run: Run = field(repr=False)
    step: int
    rank: int
    exposure: Exposure = field(repr=False)
    waits: tuple[Wait, ...] = field(repr=False)
    critical_path: tuple[Piece, ...] = field(repr=False)
    critical_s: dict[Bound, float]
    bound: dict[str, Bound]
    gains: dict[str, float]
    between_steps_s: float = 0.0

    @property
    def step_time_s(self) -> float:
        return self.exposure.step_s

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed communication of each unit, largest first."""
        units: dict[str, float] = {}
        for (_, unit), seconds in self.exposure.by_unit.items():
            units[unit] = units.get(unit, 0.0) + seconds
        return dict(sorted(units.items(), key=lambda one: -one[1]))

    @property
    def sentences(self) -> list[str]:
        """The same in words, the most important first."""
        from fsdp_sim.engine.sentences import sentences

        return sentences(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def explain(run: Run, *, step: int = -1, faster: Mapping[str, Callable[[], Run]] | None = None) -> Explanation:
    """Say why a step (the last by default) takes as long as it does.

    Args:
        run: what was played.
        step: which step.
        faster: for ``compute``, ``network`` and ``cpu`` a function that plays the program on hardware of which this is
            10% faster. By default the durations of the run are divided by 1.1: of everything but collectives, of
            collectives, or of issuing (which on a CPU cluster is not the same thing as computing).

    Raises:
        ValueError: the program has no such step.

    Example:
        >>> from fsdp_sim.engine import run
        >>> from fsdp_sim.schedule import Param, Unit, build
        >>> from fsdp_sim.spec import Plan
        >>> layers = [Unit(f"layers.{i}", (Param("w", (8, 4)),)) for i in range(3)]
        >>> program = build([Unit("root", segments=(...,)), *layers], Plan(), world_size=8)
        >>> seconds = {Op.FWD: 0.025, Op.BWD: 0.05, Op.ALL_GATHER: 0.01, Op.REDUCE_SCATTER: 0.01}
        >>> for sentence in explain(run(program, lambda i: seconds.get(i.op, 0.0))).sentences[:3]:
        ...     print(sentence)
        The step takes 245 ms. Compute is busy for 225 ms of it (92%) and waits for 20.0 ms (8.2%).
        Communication is in flight for 90.0 ms; 20.0 ms of that (22%) are exposed: compute waits meanwhile.
        The first all-gather of the step (layers.0) costs 10.0 ms: forward has nothing to compute before it arrives.
    """
    run.step_time_s(step)  # or an error
    step %= len(run.step_ends_s)
    causes = Causes(run)
    path = critical_path(run, step, causes)
    rank = path[-1].rank if path else 0
    found = exposure(run, step, rank)
    last = path[-1].op if path and not path[-1].cpu else None
    waits = [_wait(gap, causes, rank, last) for gap in found.gaps if gap.lane is Lane.COMPUTE and gap.seconds > 0]
    replays: dict[str, Callable[[], Run]] = {
        name: partial(run.scaled, **{name: 1 / FASTER}) for name in ("compute", "network", "cpu")
    }
    replays |= faster or {}
    now = run.step_time_s(step)
    gains = {name: now - play().step_time_s(step) for name, play in replays.items()}
    critical_s: dict[Bound, float] = {"compute": 0.0, "network": 0.0, "copies": 0.0, "CPU": 0.0}
    of_unit: dict[str, dict[Bound, float]] = {}
    owner = {segment: unit.name for unit in run.program.units for segment in unit.names_of_segments}
    for piece in path:
        kind = bound_of(piece)
        critical_s[kind] += piece.seconds
        for i, seconds in _issued(run, piece) if piece.cpu else [(piece.op, piece.seconds)]:
            unit = of_unit.setdefault(owner.get(i.unit, i.unit), {})
            unit[kind] = unit.get(kind, 0.0) + seconds
    bound = {unit: max(kinds, key=lambda kind: kinds[kind]) for unit, kinds in of_unit.items() if unit}
    return Explanation(run, step, rank, found, tuple(waits), tuple(path), critical_s, bound, gains)


def bound_of(piece: Piece) -> Bound:
    """What a piece of the critical path is spent on."""
    if piece.cpu:
        return "CPU"
    op = piece.op.op
    if op in COLLECTIVES:
        return "network"
    return "compute" if op in (Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM) else "copies"


def _issued(run: Run, piece: Piece) -> list[tuple[Instruction, float]]:
    """What the CPU issues in a piece of the critical path, and how long it takes for each."""
    issue_s, found = run.of_rank(run.columns.issue_s, piece.rank), []
    until = piece.end_s
    for k in range(piece.k, -1, -1):
        since = max(issue_s[k - 1] if k else 0.0, piece.start_s)
        found.append((run.ops[k], until - since))
        until = since
        if since <= piece.start_s:
            break
    return found


def _wait(gap: Gap, causes: Causes, rank: int, last: Instruction | None) -> Wait:
    """What the compute lane waits for before the operation that ends a gap."""
    run = causes.run
    if gap.k < 0:  # after the last computation of the step
        gathers = last is not None and last.op is Op.ALL_GATHER
        return Wait(gap, "last all-gathers" if gathers else _last(causes.run), None, last, None, rank)
    i = run.ops[gap.k]
    cause = causes.of(gap.k, rank)
    if cause.why == "CPU issue":
        reason: Reason = "rate limiter" if _limited(causes, gap.k, cause.rank) else "CPU issue"
        return Wait(gap, reason, i, None, None, rank)
    if cause.op < 0:
        return Wait(gap, "other", i, None, None, rank)
    on = run.ops[cause.op]
    earlier = causes.of(cause.op, rank)
    behind = run.ops[earlier.op] if earlier.op >= 0 else None
    if earlier.rank != rank and causes.met_late_s(cause.op, rank) >= gap.seconds / 2:
        return Wait(gap, "slower rank", i, on, behind, earlier.rank)
    return Wait(gap, _reason(causes, gap, i, behind, cause.op, earlier), i, on, behind, earlier.rank)


def _reason(causes: Causes, gap: Gap, i: Instruction, behind: Instruction | None, k: int, earlier: Cause) -> Reason:
    """Which pattern it is that ``i`` waits for operation ``k``, which itself started for the cause ``earlier``."""
    run, on = causes.run, causes.run.ops[k]
    if i.op is Op.RS_COPY_IN and on.op is not Op.ALL_GATHER:
        return "reduce-scatter buffer"
    if i.op is Op.OPTIM:
        return _last(run)
    if on.op is not Op.ALL_GATHER:
        return "reduction" if on.op in COLLECTIVES else "other"
    if on.async_op and behind is not None and behind.op not in COLLECTIVES:
        return "asynchronous all-gather"
    if run.on_cpu and at_rank(run.columns.issue_s[k], earlier.rank) == causes.start_s(k, earlier.rank):
        return "computing thread"
    if earlier.why == "CPU issue" and causes.issued_late_s(k, earlier.rank) >= gap.seconds / 2:
        return "rate limiter" if _limited(causes, k, earlier.rank) else "CPU issue"
    if earlier.why == "communicator" and behind is not None and behind.op is not Op.ALL_GATHER:
        return "head of line"
    computed = causes.first_compute.get((on.step, on.micro_batch), k) < k
    return "all-gather" if computed or on.phase is not Phase.FORWARD else "first all-gather"


def _last(run: Run) -> Reason:
    """What the end of a step waits for: on one rank there are casts and copies, but nothing is reduced."""
    return "last reductions" if any(i.op in COLLECTIVES and i.group_size > 1 for i in run.ops) else "other"


def _limited(causes: Causes, k: int, rank: int) -> bool:
    """Whether the CPU, before it issued this, was held up by the rate limiter for longer than by its own work since."""
    went_on, at, _ = causes.stop(causes.numbers[k], rank)
    if at < 0 or causes.run.program.instructions[at].kind is not Kind.CPU_BLOCK:
        return False
    columns = causes.run.columns
    held_s = went_on - causes.run.of_rank([columns.blocks[at][0]], rank)[0]
    return held_s >= causes.run.of_rank([columns.issue_s[k]], rank)[0] - went_on
