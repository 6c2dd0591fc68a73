"""`explain`: why a step takes as long as it does.

What compute waited for is what `diagnose` finds in the run's timeline. What only a program that can be played again
tells comes on top: the critical path, what bound each unit, and what faster hardware would gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fsdp_sim.diagnose.causes import PathPiece
from fsdp_sim.diagnose.critical_path import RunCauses, critical_path_of_run
from fsdp_sim.diagnose.explanation import FASTER, Bound, Explanation
from fsdp_sim.diagnose.look import look
from fsdp_sim.engine import Run, exposure
from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import COLLECTIVES, Lane, Op

_CPU = Lane.CPU
_BOUND: dict[Op, Bound] = {
    **dict.fromkeys(COLLECTIVES, "network"),
    **dict.fromkeys((Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM), "compute"),
}
FEW_RANKS = 64  # of more only those on the critical path are looked at, which are the ones that others wait for


def explain(run: Run, *, step: int = -1, faster: Mapping[str, Callable[[], Run]] | None = None) -> Explanation:
    """Say why a step (the last by default) takes as long as it does.

    Args:
        run: what was played.
        step: which step.
        faster: for ``compute``, ``network`` and ``cpu`` a function that plays the program on hardware of which this is
            10% faster. By default the durations of the run are divided by 1.1: of what the device computes, of
            collectives, or of issuing and what the CPU computes (which on a CPU cluster is not all that is computed).

    Raises:
        ValueError: the program has no such step, or no operations.

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
        Forward cannot begin before ALL_GATHER(layers.0) arrives, and has nothing to compute meanwhile: 10.0 ms.
    """
    run.step_time_s(step)  # or an error
    step %= len(run.step_ends_s)
    causes = RunCauses(run)
    path = critical_path_of_run(run, step, causes)
    rank = causes.last(step)[0] if path else 0
    found = exposure(run, step, rank)
    others = range(run.ranks) if run.ranks <= FEW_RANKS else {piece.rank for piece in path}
    observed = look(run.timeline({rank, *others}), step=step, rank=rank)
    replays: dict[str, Callable[[], Run]] = {
        name: partial(run.scaled, **{name: 1 / FASTER}) for name in ("compute", "network", "cpu")
    }
    replays |= faster or {}
    critical_s: dict[Bound, float] = {"compute": 0.0, "network": 0.0, "copies": 0.0, "CPU": 0.0}
    on_path: dict[tuple[str, Bound], float] = {}
    issue_s = {rank: run.of_rank(run.columns.issue_s, rank) for rank in {piece.rank for piece in path if piece.cpu}}
    owner = {segment: unit.name for unit in run.program.units for segment in unit.names_of_segments}
    ops = run.ops
    for piece in path:
        (rank_of_piece, k), cpu, start_s, end_s = piece
        op = ops[k]
        kind = bound_of(op, cpu)
        critical_s[kind] += end_s - start_s
        for i, seconds in _issued(run, piece, issue_s[rank_of_piece]) if cpu else ((op, end_s - start_s),):
            what = owner.get(i.unit, i.unit), kind
            on_path[what] = on_path.get(what, 0.0) + seconds
    bound: dict[str, Bound] = {}
    for (unit, kind), seconds in on_path.items():
        if unit and (unit not in bound or seconds > on_path[unit, bound[unit]]):
            bound[unit] = kind
    bound_s: dict[Bound, float] = {}
    for (unit, _), seconds in on_path.items():
        if unit:
            bound_s[bound[unit]] = bound_s.get(bound[unit], 0.0) + seconds
    return Explanation(run, step, rank, found, observed, tuple(path), critical_s, bound, bound_s, replays)


def bound_of(op: Instruction, cpu: bool) -> Bound:
    """What a piece of the critical path is spent on."""
    return "CPU" if cpu or op.lane is _CPU else _BOUND.get(op.op, "copies")


def _issued(run: Run, piece: PathPiece, issue_s: Sequence[float]) -> list[tuple[Instruction, float]]:
    """What the CPU issues in a piece of the critical path, and how long it takes for each."""
    found = []
    ops, start_s, until = run.ops, piece.start_s, piece.end_s
    for k in range(piece.key[1], -1, -1):
        since = max(issue_s[k - 1] if k else 0.0, start_s)
        found.append((ops[k], until - since))
        until = since
        if since <= start_s:
            break
    return found
