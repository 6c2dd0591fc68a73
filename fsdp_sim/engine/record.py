"""The record of a run: which events a program leaves in a timeline, and when each of them is.

Which events there are follows from the program, when they are from a run of it. Both are worked out when somebody reads
the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from fsdp_sim.engine.dependencies import shown_lane, waits_on
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Columns, Lane, Memory, Op, Phase

_OP, _ALLOC, _FREE = Kind.OP, Kind.ALLOC, Kind.FREE
_ABOUT_MEMORY = (_ALLOC, _FREE, Kind.RECORD_STREAM)
_OF_NO_STEP = {"step": 0, "micro_batch": 0, "phase": Phase.NONE}
_FIELDS = ("op", "lane", "unit", "group_size", "dtype", "category", *_OF_NO_STEP)


T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """A function that makes something at its first call. Unlike `functools.cache`'s it can be sent to a rank."""
    made: list[T] = []

    def get() -> T:
        if not made:
            made.append(make())
        return made[0]

    return get


class Changed(NamedTuple):
    """Changes of what is alive, a column for each thing there is to say of them but their sizes.

    Attributes:
        number: of the instruction that makes it.
        op: ``ALLOC`` or ``FREE``.
        at_end: whether it comes at the end of its operation.
    """

    number: Sequence[int]
    op: Sequence[Op]
    unit: Sequence[str]
    category: Sequence[Memory]
    dtype: Sequence[str]
    at_end: Sequence[bool]


class RankTimes(NamedTuple):
    """The times of one rank of a run.

    Attributes:
        issue_s, start_s, end_s: of each operation.
        unlaunched_s: of each operation, see `fsdp_sim.timeline.Event`.
        about_memory: when the CPU and when the device comes to each instruction that is about memory.
    """

    issue_s: Sequence[float]
    start_s: Sequence[float]
    end_s: Sequence[float]
    unlaunched_s: Callable[[], Sequence[float]]
    about_memory: Callable[[], tuple[Sequence[float], Sequence[float]]]

    def issues(self) -> Sequence[float]:
        """When the CPU issues each operation, when it comes to each instruction that is about memory, and 0."""
        return [*self.issue_s, *self.about_memory()[0], 0.0]

    def moments(self) -> Sequence[float]:
        """When each operation starts, when each ends, when the device comes to what is about memory, and 0."""
        return [*self.start_s, *self.end_s, *self.about_memory()[1], 0.0]


class EventRows:
    """The events of a program in the order of a timeline, without their times and without the sizes of changes.

    Args:
        changed: the changes of memory; by default the program's own allocations and frees.
        states: what lives through all steps, as (category, unit): it is allocated first.
    """

    def __init__(
        self,
        program: Program,
        on_cpu: bool,
        changed: Changed | None = None,
        states: Sequence[tuple[Memory, str]] = (),
    ) -> None:
        self.program, self.on_cpu = program, on_cpu
        self._changed, self._states = changed or _own_changes(program), states
        self._columns: dict[str, Sequence[Any]] = {}

    def __len__(self) -> int:
        return len(self._states) + len(self._ops) + len(self._changed.number)

    def columns(self, rank: int, times: Callable[[], RankTimes], sizes: Callable[[], Sequence[int]]) -> Columns:
        """The columns of a rank.

        Args:
            times: what a run says of them.
            sizes: bytes of what lives through all steps, and of each change.
        """
        times = once(times)
        return Columns(len(self), {
            "seq": range(len(self)),
            "rank": [rank] * len(self),
            **{name: partial(self._column, name) for name in _FIELDS},
            "bytes": lambda: self._bytes(sizes()),
            "waits_on": lambda: self._waits_on,
            "issue_s": lambda: _picked(times().issues(), self._moments[0]),
            "start_s": lambda: _picked(times().moments(), self._moments[1]),
            "end_s": lambda: _picked(times().moments(), self._moments[2]),
            "unlaunched_s": lambda: self._unlaunched_s(times().unlaunched_s()),
        }, partial(self._operations, rank, times))  # fmt: skip

    def _operations(self, rank: int, times: Callable[[], RankTimes]) -> Columns:
        """The columns of the operations alone."""
        return Columns(len(self._ops), {
            "seq": self._rows_of_ops,
            "rank": [rank] * len(self._ops),
            **{name: partial(self._of_ops, name) for name in (*_FIELDS, "bytes")},
            "waits_on": partial(self._of_ops, "waits_on"),
            "issue_s": lambda: times().issue_s,
            "start_s": lambda: times().start_s,
            "end_s": lambda: times().end_s,
            "unlaunched_s": lambda: times().unlaunched_s(),
        })  # fmt: skip

    # An event is of a state that lives through all steps, of an operation, or of a change of memory. Below, what there
    # is of each kind is listed kind by kind, and then put in order.

    @property
    def _ops(self) -> tuple[Instruction, ...]:
        return self.program.ops

    @cached_property
    def _made_by(self) -> list[Instruction]:
        """Of each change of memory the instruction that makes it."""
        instructions = self.program.instructions
        return [instructions[number] for number in self._changed.number]

    @cached_property
    def _order(self) -> list[int]:
        """Of each event its place in the list of all, kind by kind."""
        keys = [-1] * len(self._states)
        keys += [3 * number + 1 for number in self.program.numbers]
        keys += [3 * n + 2 * at_end for n, at_end in zip(self._changed.number, self._changed.at_end, strict=True)]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _bytes(self, sizes: Sequence[int]) -> Sequence[int]:
        states = len(self._states)
        return _picked([*sizes[:states], *self._of_ops("bytes"), *sizes[states:]], self._order)

    def _unlaunched_s(self, of_ops: Sequence[float]) -> Sequence[float]:
        return _picked([*[0.0] * len(self._states), *of_ops, *[0.0] * len(self._changed.number)], self._order)

    @cached_property
    def _rows_of_ops(self) -> list[int]:
        """Of each operation its place among the events."""
        begin, end = len(self._states), len(self._states) + len(self._ops)
        return [row for row, place in enumerate(self._order) if begin <= place < end]

    def _of_ops(self, name: str) -> Sequence[Any]:
        key = f"{name} of operations"
        if key not in self._columns:
            if name == "bytes":
                self._columns[key] = [i.bytes for i in self._ops]
            else:
                self._columns[key] = _picked(
                    self._waits_on if name == "waits_on" else self._column(name), self._rows_of_ops
                )
        return self._columns[key]

    def _column(self, name: str) -> Sequence[Any]:
        if name not in self._columns:
            self._columns[name] = self._made_column(name)
        return self._columns[name]

    def _made_column(self, name: str) -> Sequence[Any]:
        find = attrgetter(name)
        of_ops: Iterable[Any] = map(find, self._ops)
        of_changes: Iterable[Any]
        if name in Changed._fields:
            of_states, of_changes = self._of_states[name], getattr(self._changed, name)
        elif name == "lane":
            of_states, of_ops = [Lane.COMPUTE] * len(self._states), [shown_lane(i, self.on_cpu) for i in self._ops]
            of_changes = [Lane.COMPUTE if i.kind is _OP else i.lane for i in self._made_by]
        elif name == "group_size":
            of_states, of_changes = [1] * len(self._states), [1] * len(self._changed.number)
        else:
            of_states, of_changes = [_OF_NO_STEP[name]] * len(self._states), map(find, self._made_by)
        return _picked([*of_states, *of_ops, *of_changes], self._order)

    @cached_property
    def _of_states(self) -> dict[str, Sequence[Any]]:
        n = len(self._states)
        categories, units = zip(*self._states, strict=True) if n else ((), ())
        return {"op": [Op.ALLOC] * n, "unit": units, "category": categories, "dtype": [""] * n}

    @cached_property
    def _moments(self) -> tuple[Sequence[int], ...]:
        """Of each event the place of its ``issue_s``, ``start_s`` and ``end_s`` in `RankTimes`."""
        about_memory = [n for n, i in enumerate(self.program.instructions) if i.kind in _ABOUT_MEMORY]
        operations, buffers = len(self._ops), len(about_memory)
        begin = dict(zip(self.program.numbers, range(operations), strict=True))
        end = dict(zip(self.program.numbers, range(operations, 2 * operations), strict=True))
        issue = begin | dict(zip(about_memory, range(operations, operations + buffers), strict=True))
        begin |= dict(zip(about_memory, range(2 * operations, 2 * operations + buffers), strict=True))
        numbers, at_end = self._changed.number, self._changed.at_end
        issues = [issue[number] for number in numbers]
        moments = [(end if late else begin)[number] for number, late in zip(numbers, at_end, strict=True)]
        never, first = [operations + buffers] * len(self._states), [2 * operations + buffers] * len(self._states)
        begun, ended = range(operations), range(operations, 2 * operations)
        listed = ([*never, *begun, *issues], [*first, *begun, *moments], [*first, *ended, *moments])
        return tuple(_picked(places, self._order) for places in listed)

    @cached_property
    def _waits_on(self) -> list[tuple[int, ...]]:
        """Of each event the ``seq`` of those that it comes after."""
        found: list[tuple[int, ...]] = [()] * len(self)
        row_of = self._rows_of_ops
        for row, before in zip(row_of, waits_on(self.program, self.on_cpu), strict=True):
            found[row] = tuple([row_of[op] for op in before])
        return found


def own_changes(program: Program) -> list[Instruction]:
    """A program's own allocations and frees."""
    return program.once("own changes", lambda: [i for i in program.instructions if i.kind is _ALLOC or i.kind is _FREE])


def _own_changes(program: Program) -> Changed:
    made_by = own_changes(program)
    return Changed(
        [number for number, i in enumerate(program.instructions) if i.kind is _ALLOC or i.kind is _FREE],
        [i.op for i in made_by],
        [i.unit for i in made_by],
        [i.category for i in made_by],
        [i.dtype for i in made_by],
        [False] * len(made_by),
    )


def _picked(values: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    return itemgetter(*places)(values) if len(places) > 1 else [values[place] for place in places]
