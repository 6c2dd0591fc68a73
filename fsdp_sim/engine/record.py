"""The record of a run: which events a program leaves in a timeline, and when each of them is.

Which events there are follows from the program, when they are from a run of it. Both are worked out when somebody reads
the column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

from fsdp_sim.engine.dependencies import shown_lane, waits_on
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import FIELDS, Columns, Lane, Memory, Op, Phase

_OP, _ALLOC, _FREE = Kind.OP, Kind.ALLOC, Kind.FREE
_ABOUT_MEMORY = (_ALLOC, _FREE, Kind.RECORD_STREAM)


class Change(NamedTuple):
    """A change of what is alive.

    Attributes:
        number: of the instruction that makes it.
        op: ``ALLOC`` or ``FREE``.
        at_end: whether it comes at the end of its operation.
    """

    number: int
    op: Op
    unit: str
    category: Memory
    bytes: int
    dtype: str = ""
    at_end: bool = False


class RankTimes(NamedTuple):
    """The times of one rank of a run.

    Attributes:
        issues: when the CPU issues each operation, then when it comes to each instruction that is about memory, then 0.
        moments: when each operation starts, then when each ends, then when the device comes to each instruction that is
            about memory, then 0.
    """

    issues: Sequence[float]
    moments: Sequence[float]


class _Row(NamedTuple):
    """An event; ``issue``, ``start`` and ``end`` are places in `RankTimes`."""

    op: Op
    lane: Lane
    unit: str
    step: int
    micro_batch: int
    phase: Phase
    bytes: int
    group_size: int
    dtype: str
    category: Memory
    issue: int
    start: int
    end: int


class Rows:
    """The events of a program in the order of a timeline, without their times.

    Args:
        changes: makes those of memory; by default the program's own allocations and frees.
        states: bytes that live through all steps, by (category, unit): they are allocated first.
        length: how many events there are, if the caller knows it.
    """

    def __init__(
        self,
        program: Program,
        on_cpu: bool,
        changes: Callable[[], Iterable[Change]] | None = None,
        states: Mapping[tuple[Memory, str], int] | None = None,
        length: int | None = None,
    ) -> None:
        self.program, self.on_cpu = program, on_cpu
        self._changes, self._states = changes or partial(_own_changes, program), states or {}
        self._length = length

    def __len__(self) -> int:
        return len(self._table[0]) if self._length is None else self._length

    def columns(self, rank: int, times: Callable[[], RankTimes]) -> Columns:
        """The columns of a rank, of which a run says the times."""
        times = cache(times)
        alike = [name for name in _Row._fields if name in FIELDS]
        return Columns(len(self), {
            "seq": range(len(self)),
            "rank": [rank] * len(self),
            **{name: partial(self._column, name) for name in alike},
            "waits_on": lambda: self._waits_on,
            "issue_s": lambda: _picked(times().issues, self._column("issue")),
            "start_s": lambda: _picked(times().moments, self._column("start")),
            "end_s": lambda: _picked(times().moments, self._column("end")),
        })  # fmt: skip

    def _column(self, name: str) -> Sequence[Any]:
        return self._columns[_Row._fields.index(name)]

    @cached_property
    def _columns(self) -> list[Sequence[Any]]:
        return list(zip(*self._table[0], strict=True)) or [()] * len(_Row._fields)

    @cached_property
    def _waits_on(self) -> list[tuple[int, ...]]:
        """Of each event the ``seq`` of those that it comes after."""
        found: list[tuple[int, ...]] = [()] * len(self)
        row_of = self._table[1]
        for row, before in zip(row_of, waits_on(self.program, self.on_cpu), strict=True):
            found[row] = tuple([row_of[op] for op in before])
        return found

    @cached_property
    def _table(self) -> tuple[list[_Row], list[int]]:
        """The rows, and of each operation which one is its own."""
        instructions = self.program.instructions
        operations = sum(i.kind is _OP for i in instructions)
        by_number: dict[int, list[Change]] = defaultdict(list)
        for change in self._changes():
            by_number[change.number].append(change)
        buffers = sum(i.kind in _ABOUT_MEMORY for i in instructions)
        never, first = operations + buffers, 2 * operations + buffers  # where the zeros at the end of `RankTimes` stand
        rows = [
            _Row(Op.ALLOC, Lane.COMPUTE, unit, 0, 0, Phase.NONE, n_bytes, 1, "", category, never, first, first)
            for (category, unit), n_bytes in self._states.items()
        ]
        row_of: list[int] = []
        k = m = 0  # operations, and instructions about memory, so far
        for number, i in enumerate(instructions):
            if i.kind is _OP:
                changes = by_number.get(number, ())
                rows += [_changed(i, Lane.COMPUTE, change, k, k) for change in changes if not change.at_end]
                row_of.append(len(rows))
                rows.append(_Row(
                    i.op, shown_lane(i), i.unit, i.step, i.micro_batch, i.phase, i.bytes, i.group_size, i.dtype,
                    i.category, k, k, operations + k,
                ))  # fmt: skip
                rows += [_changed(i, Lane.COMPUTE, change, k, operations + k) for change in changes if change.at_end]
                k += 1
            elif i.kind in _ABOUT_MEMORY:
                for change in by_number.get(number, ()):
                    assert i.lane is not None
                    rows.append(_changed(i, i.lane, change, operations + m, 2 * operations + m))
                m += 1
        return rows, row_of


def _changed(i: Instruction, lane: Lane, change: Change, issue: int, moment: int) -> _Row:
    return _Row(
        change.op, lane, change.unit, i.step, i.micro_batch, i.phase, change.bytes, 1, change.dtype, change.category,
        issue, moment, moment,
    )  # fmt: skip


def _own_changes(program: Program) -> Iterable[Change]:
    for number, i in enumerate(program.instructions):
        if i.kind is _ALLOC or i.kind is _FREE:
            yield Change(number, i.op, i.unit, i.category, i.bytes, i.dtype)


def _picked(values: Sequence[float], places: Sequence[int]) -> Sequence[float]:
    return itemgetter(*places)(values) if len(places) > 1 else [values[place] for place in places]
