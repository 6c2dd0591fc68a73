"""The record of a run: which events a program leaves in a timeline, and when each of them is.

Which events there are follows from the program, when they are from a run of it. Both are worked out when somebody reads
the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from fsdp_sim.engine.dependencies import shown_lane, waits_on
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Columns, Lane, Memory, Op, Phase

_OP, _ALLOC, _FREE = Kind.OP, Kind.ALLOC, Kind.FREE
_ABOUT_MEMORY = (_ALLOC, _FREE, Kind.RECORD_STREAM)
_OF_NO_STEP = {"step": 0, "micro_batch": 0, "phase": Phase.NONE}
_FIELDS = ("op", "lane", "unit", "bytes", "group_size", "dtype", "category", *_OF_NO_STEP)


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
        return len(self._order) if self._length is None else self._length

    def columns(self, rank: int, times: Callable[[], RankTimes]) -> Columns:
        """The columns of a rank, of which a run says the times."""
        times = cache(times)
        return Columns(len(self), {
            "seq": range(len(self)),
            "rank": [rank] * len(self),
            **{name: partial(self._column, name) for name in _FIELDS},
            "waits_on": lambda: self._waits_on,
            "issue_s": lambda: _picked(times().issues, self._moments[0]),
            "start_s": lambda: _picked(times().moments, self._moments[1]),
            "end_s": lambda: _picked(times().moments, self._moments[2]),
        })  # fmt: skip

    # An event is of a state that lives through all steps, of an operation, or of a change of memory. Below, what there
    # is of each kind is listed kind by kind, and then put in order.

    @cached_property
    def _numbers(self) -> list[int]:
        """Of each operation its number among the instructions."""
        return [number for number, i in enumerate(self.program.instructions) if i.kind is _OP]

    @cached_property
    def _ops(self) -> list[Instruction]:
        return [i for i in self.program.instructions if i.kind is _OP]

    @cached_property
    def _changed(self) -> list[Change]:
        return list(self._changes())

    @cached_property
    def _order(self) -> list[int]:
        """Of each event its place in the list of all, kind by kind."""
        keys = [-1] * len(self._states)
        keys += [3 * number + 1 for number in self._numbers]
        keys += [3 * change.number + 2 * change.at_end for change in self._changed]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _column(self, name: str) -> Sequence[Any]:
        find, changes = attrgetter(name), self._changed
        instructions = self.program.instructions
        of_states: Iterable[Any]
        of_ops: Iterable[Any] = map(find, self._ops)
        if name in Change._fields:
            of_states = [find(Change(-1, Op.ALLOC, *key[::-1], n_bytes)) for key, n_bytes in self._states.items()]
            of_changes = list(map(find, changes))
        elif name == "lane":
            of_states, of_ops = [Lane.COMPUTE] * len(self._states), map(shown_lane, self._ops)
            made_by = [instructions[change.number] for change in changes]
            of_changes = [Lane.COMPUTE if i.kind is _OP else i.lane for i in made_by]
        elif name == "group_size":
            of_states, of_changes = [1] * len(self._states), [1] * len(changes)
        else:
            of_states = [_OF_NO_STEP[name]] * len(self._states)
            of_changes = [find(instructions[change.number]) for change in changes]
        return _picked([*of_states, *of_ops, *of_changes], self._order)

    @cached_property
    def _moments(self) -> tuple[Sequence[int], ...]:
        """Of each event the place of its ``issue_s``, ``start_s`` and ``end_s`` in `RankTimes`."""
        about_memory = [n for n, i in enumerate(self.program.instructions) if i.kind in _ABOUT_MEMORY]
        operations, buffers = len(self._ops), len(about_memory)
        begin = dict(zip(self._numbers, range(operations), strict=True))
        end = dict(zip(self._numbers, range(operations, 2 * operations), strict=True))
        issue = begin | dict(zip(about_memory, range(operations, operations + buffers), strict=True))
        begin |= dict(zip(about_memory, range(2 * operations, 2 * operations + buffers), strict=True))
        issues = [issue[change.number] for change in self._changed]
        moments = [(end if change.at_end else begin)[change.number] for change in self._changed]
        never, first = [operations + buffers] * len(self._states), [2 * operations + buffers] * len(self._states)
        begun, ended = range(operations), range(operations, 2 * operations)
        listed = ([*never, *begun, *issues], [*first, *begun, *moments], [*first, *ended, *moments])
        return tuple(_picked(places, self._order) for places in listed)

    @cached_property
    def _waits_on(self) -> list[tuple[int, ...]]:
        """Of each event the ``seq`` of those that it comes after."""
        found: list[tuple[int, ...]] = [()] * len(self)
        begin, end = len(self._states), len(self._states) + len(self._ops)
        row_of = [row for row, place in enumerate(self._order) if begin <= place < end]
        for row, before in zip(row_of, waits_on(self.program, self.on_cpu), strict=True):
            found[row] = tuple([row_of[op] for op in before])
        return found


def _own_changes(program: Program) -> Iterable[Change]:
    for number, i in enumerate(program.instructions):
        if i.kind is _ALLOC or i.kind is _FREE:
            yield Change(number, i.op, i.unit, i.category, i.bytes, i.dtype)


def _picked(values: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    return itemgetter(*places)(values) if len(places) > 1 else [values[place] for place in places]
