"""The columns of a timeline: one sequence for each field of an event, made when somebody reads it.

A simulated step has thousands of events and most readers look at two or three fields, so no object is made per event
and no column before it is asked for. Columns are plain Python sequences; `Columns.array` is numpy's view of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import MEMORY

if TYPE_CHECKING:
    import numpy as np

FIELDS = Event.__struct_fields__
_DEFAULTS = dict(zip(FIELDS[-len(Event.__struct_defaults__) :], Event.__struct_defaults__, strict=True))

Column = Sequence[Any]


class Columns:
    """The fields of some events, in their order.

    Args:
        length: how many events there are.
        given: by field its column, or a function without arguments that makes it when it is first read. A field that
            is left out has its default in every event.
        operations: makes `operations`, where there is a quicker way than to choose rows.

    Raises:
        TypeError: an event has no field of that name, or needs one that is not given.

    Example:
        >>> columns = Columns(2, dict(seq=[0, 1], rank=[0, 0], op=["FWD", "BWD"], lane=lambda: ["compute"] * 2))
        >>> columns["lane"], columns["bytes"]
        (['compute', 'compute'], [0, 0])
    """

    __slots__ = ("_given", "_operations", "length")

    def __init__(
        self,
        length: int,
        given: Mapping[str, Column | Callable[[], Column]],
        operations: Callable[[], Columns] | None = None,
    ) -> None:
        if unknown := [name for name in given if name not in FIELDS]:
            raise TypeError(f"an event has no field {unknown[0]!r}; its fields are {', '.join(FIELDS)}")
        if absent := [name for name in FIELDS if name not in given and name not in _DEFAULTS]:
            raise TypeError(f"an event needs the field {absent[0]!r}")
        self.length = length
        self._given = dict(given)
        self._operations: Columns | Callable[[], Columns] | None = operations

    @classmethod
    def of(cls, events: Sequence[Event]) -> Columns:
        """The columns of events that are there already."""
        return cls(len(events), {name: _reading(events, name) for name in FIELDS})

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """Some columns below each other, in the order given."""
        if len(parts) == 1:
            return parts[0]
        length = sum(part.length for part in parts)
        return cls(length, {name: _joining(parts, name) for name in FIELDS}, partial(_operations_of, parts))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, name: str) -> Column:
        """The column of a field.

        Raises:
            KeyError: an event has no such field.
        """
        column = self._given.get(name)
        if column is None:
            column = self._given[name] = [_DEFAULTS[name]] * self.length
        elif callable(column):
            column = self._given[name] = column()
        return column

    def array(self, name: str) -> np.ndarray:
        """A column of numbers as a numpy array of shape (events,)."""
        import numpy as np

        return np.asarray(self[name])

    @property
    def operations(self) -> Columns:
        """The events that take time: all but ``alloc`` and ``free``."""
        if self._operations is None:
            self._operations = self.take([row for row, op in enumerate(self["op"]) if op not in MEMORY])
        elif not isinstance(self._operations, Columns):
            self._operations = self._operations()
        return self._operations

    def take(self, rows: Sequence[int]) -> Columns:
        """The events at these places, in this order."""
        return Columns(len(rows), {name: _taking(self, name, rows) for name in FIELDS})

    def rows(self, *names: str) -> Iterable[tuple[Any, ...]]:
        """Some fields of every event, as tuples."""
        return zip(*(self[name] for name in names), strict=True)

    def events(self) -> list[Event]:
        """Every event as an object."""
        return list(map(Event, *[self[name] for name in FIELDS]))


def _operations_of(parts: Sequence[Columns]) -> Columns:
    return Columns.joined([part.operations for part in parts])


def _reading(events: Sequence[Event], name: str) -> Callable[[], Column]:
    return lambda: list(map(attrgetter(name), events))


def _joining(parts: Sequence[Columns], name: str) -> Callable[[], Column]:
    return lambda: [value for part in parts for value in part[name]]


def _taking(columns: Columns, name: str, rows: Sequence[int]) -> Callable[[], Column]:
    def taken() -> Column:
        column = columns[name]
        return itemgetter(*rows)(column) if len(rows) > 1 else [column[row] for row in rows]

    return taken
