"""`replay`: when each operation of a program runs, by one exact pass in issue order.

Streams and communicators are FIFO and nothing contends for anything else, so an operation starts at the latest of
a few earlier times and ends a duration later: a recurrence in (max, +) that one pass in issue order solves (Baccelli,
Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992). A rank is a column of each array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline

Times = NDArray[np.float64]  # (ranks,)
Frontier = dict[Lane, int]  # the last operation of each lane that a time comes from; earlier ones are implied
COPIES = frozenset({Op.AG_COPY_IN, Op.AG_COPY_OUT, Op.RS_COPY_IN})


def replay(
    program: Program,
    durations: Mapping[tuple[Op, str], ArrayLike],
    *,
    device: Literal["gpu", "cpu"] = "gpu",
    ranks: int | None = None,
    issue_s: float = 0.0,
    copies_s: float | None = None,
) -> Timeline:
    """Say when each operation of a program runs on each rank.

    Rules: a stream runs its operations in issue order; waits are free; the collectives of one communicator run in
    issue order whatever stream they are on; a collective starts when the last rank is ready and ends for all
    ranks after the longest duration any rank names.

    Args:
        program: what the CPU issues.
        durations: seconds of each (operation, unit), a number or an array of shape (ranks,). The unit of FWD and
            BWD is the segment; that of OPTIM is ``""``.
        device: ``gpu`` issues and runs ahead. On ``cpu`` the thread that issues also computes and copies:
            everything but a collective occupies it, and so does a wait of the compute stream. Then an all-gather
            overlaps only compute issued after it.
        ranks: how many ranks to play, at most the world size. By default the length of the longest array in
            ``durations``, or one rank that stands for all.
        issue_s: seconds the CPU takes to issue one operation.
        copies_s: seconds of every copy-in and copy-out that ``durations`` does not name.

    Returns:
        A timeline of operations, allocations and frees. An allocation has the CPU's time as ``issue_s`` and, as
        ``start_s`` and ``end_s``, the time its stream gets there.

    Raises:
        KeyError: durations lack an operation; names operation and unit.
        ValueError: a duration is negative, not finite, or not one number per rank; ranks or device is wrong.

    Example:
        >>> from collections import defaultdict
        >>> from fsdp_sim.schedule import build, toy
        >>> from fsdp_sim.spec import Plan
        >>> program = build(toy(layers=2), Plan(), world_size=4)
        >>> replay(program, defaultdict(lambda: 1.0), copies_s=0.0).span_s
        11.0
    """
    if device not in ("gpu", "cpu"):
        raise ValueError(f"device is {device!r}; it must be 'gpu' or 'cpu'")
    if not (np.isfinite(issue_s) and issue_s >= 0):
        raise ValueError(f"issue_s is {issue_s!r}; it must be a number of seconds >= 0")
    columns, seconds = _seconds(program, durations, ranks, copies_s)
    events = _Pass(columns, seconds, on_cpu=device == "cpu", issue_s=issue_s).run(program)
    return Timeline(Header(producer="schedule", clock="simulated", world_size=program.world_size), events)


def _seconds(
    program: Program, durations: Mapping[tuple[Op, str], ArrayLike], ranks: int | None, copies_s: float | None
) -> tuple[int, dict[tuple[Op, str], Times]]:
    """The number of ranks, and the duration of each operation as an array of shape (ranks,)."""
    keys = list(dict.fromkeys((i.op, i.unit) for i in program.ops))
    given: dict[tuple[Op, str], Times] = {}
    for key in keys:
        op, unit = key
        if copies_s is not None and op in COPIES and key not in durations:
            value: ArrayLike = copies_s
        else:
            try:
                value = durations[key]
            except KeyError:
                raise KeyError(
                    f"durations have no entry for {op} of unit {unit!r}; the program needs one for each of its "
                    f"{len(keys)} (operation, unit) pairs (copies_s=0.0 makes the copies free)"
                ) from None
        given[key] = np.asarray(value, dtype=float)
    if ranks is None:
        ranks = max((v.shape[0] for v in given.values() if v.ndim), default=1)
    if type(ranks) is not int or not 1 <= ranks <= program.world_size:
        raise ValueError(f"ranks is {ranks!r}; it must be a whole number from 1 to the world size {program.world_size}")
    for (op, unit), value in given.items():
        if value.shape not in ((), (ranks,)):
            raise ValueError(
                f"the duration of {op} of unit {unit!r} has shape {value.shape}; it must be one number, or one per "
                f"rank as shape ({ranks},)"
            )
        if not (np.isfinite(value).all() and (value >= 0).all()):
            raise ValueError(f"the duration of {op} of unit {unit!r} is {value}; it must be a number of seconds >= 0")
    return ranks, {key: np.broadcast_to(value, (ranks,)) for key, value in given.items()}


class _Pass:
    """The recurrence. Every time is an array of shape (ranks,).

    Beside each tail (of a stream, a communicator, the CPU) it keeps a frontier: the operations that tail comes
    from. They become the next operation's ``waits_on``.
    """

    def __init__(self, ranks: int, seconds: dict[tuple[Op, str], Times], *, on_cpu: bool, issue_s: float) -> None:
        self.ranks = ranks
        self.seconds = seconds
        self.on_cpu = on_cpu
        self.issue_s = issue_s
        self.cpu = np.zeros(ranks)
        self.cpu_frontier: Frontier = {}
        self.tails: dict[Lane, Times] = defaultdict(lambda: np.zeros(ranks))
        self.frontiers: dict[Lane, Frontier] = defaultdict(dict)
        self.recorded: dict[int, tuple[Times, Frontier]] = {}
        self.communicators: dict[str, tuple[Times, Frontier]] = defaultdict(lambda: (np.zeros(ranks), {}))
        self.seq = 0
        self.events: list[Event] = []

    def run(self, program: Program) -> list[Event]:
        for i in program:
            if i.kind is Kind.OP:
                self.op(i)
            elif i.kind in (Kind.ALLOC, Kind.FREE):
                self.memory(i)
            elif i.kind is Kind.RECORD:
                self.recorded[i.event] = (self.tails[_lane(i)], self.frontiers[_lane(i)])
            elif i.kind is Kind.WAIT:
                self.wait(_lane(i), *self.recorded[i.event])
            elif i.kind is Kind.WAIT_STREAM:
                assert i.other is not None
                self.wait(_lane(i), self.tails[i.other], self.frontiers[i.other])
            elif i.kind is Kind.CPU_SYNC:
                self.block_cpu(*self.recorded[i.event])
        return self.events

    def wait(self, lane: Lane, until: Times, ops: Frontier) -> None:
        self.tails[lane] = np.maximum(self.tails[lane], until)
        self.frontiers[lane] = _merge(self.frontiers[lane], ops)
        if self.on_cpu and lane is Lane.COMPUTE:
            self.block_cpu(self.tails[lane], ops)

    def block_cpu(self, until: Times, ops: Frontier) -> None:
        self.cpu = np.maximum(self.cpu, until)
        self.cpu_frontier = _merge(self.cpu_frontier, ops)

    def op(self, i: Instruction) -> None:
        lane, duration = _lane(i), self.seconds[i.op, i.unit]
        issued = self.cpu = self.cpu + self.issue_s
        start = np.maximum(issued, self.tails[lane])
        waits_on = _merge(self.frontiers[lane], self.cpu_frontier)
        if i.communicator:
            free_at, previous = self.communicators[i.communicator]
            start = np.full(self.ranks, np.maximum(start, free_at).max())  # a rendezvous: the last rank ready
            duration = np.full(self.ranks, duration.max())
            waits_on = _merge(waits_on, previous)
        end, this = start + duration, {lane: self.seq}
        if i.communicator:
            self.communicators[i.communicator] = (end, this)
        elif self.on_cpu:
            self.cpu, self.cpu_frontier = end, this
        waits_on.pop(lane, None)  # a lane is FIFO: that it follows its own last operation goes without saying
        self.emit(i, issued, start, end, waits_on)
        self.tails[lane], self.frontiers[lane] = end, this
        self.seq += 1

    def memory(self, i: Instruction) -> None:
        reached = np.maximum(self.cpu, self.tails[_lane(i)])
        self.emit(i, self.cpu, reached, reached, {})
        self.seq += 1

    def emit(self, i: Instruction, issued: Times, start: Times, end: Times, waits_on: Frontier) -> None:
        after = tuple(sorted(waits_on.values()))
        self.events += [
            Event(
                seq=self.seq, rank=rank, op=i.op, lane=_lane(i), unit=i.unit, step=i.step, micro_batch=i.micro_batch,
                phase=i.phase, bytes=i.bytes, group_size=i.group_size, dtype=i.dtype, category=i.category,
                issue_s=float(issued[rank]), start_s=float(start[rank]), end_s=float(end[rank]), waits_on=after,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip


def _merge(one: Frontier, other: Frontier) -> Frontier:
    return one | {lane: max(seq, one.get(lane, -1)) for lane, seq in other.items()}


def _lane(i: Instruction) -> Lane:
    if i.lane is None:
        raise ValueError(f"the instruction {i.kind} {i.what} has no stream")
    return i.lane
