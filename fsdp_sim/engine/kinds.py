"""The kinds of a program's operations: a step of thousands has few of them, for the layers of a model are alike.

What is asked of a cost model is asked once for each kind, and layers of one kind need not be played one by one: see
`fsdp_sim.engine.repetition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import itemgetter
from typing import TypeVar

from fsdp_sim.engine.dependencies import dependencies
from fsdp_sim.engine.repetition import Stretch, marks_of, stretches
from fsdp_sim.schedule import Instruction, Program

Alike = Mapping[str, object]
"""What units and segments compute, by name: those of the same value cost the same. A name that is left out is unlike
all others."""

_UNIT, _SIZE = (
    itemgetter(*map(Instruction._fields.index, fields))
    for fields in (("unit",), ("op", "bytes", "dtype", "group_size", "communicator", "lane", "detail"))
)
_T = TypeVar("_T")
Numbered = tuple[list[int], list[Instruction]]
"""Of each of some operations the number of its kind, and of each kind the first operation."""


def picker(places: Sequence[int]) -> Callable[[Sequence[_T]], Iterable[_T]]:
    """What picks the entries of a column at some places, faster than a loop."""
    return itemgetter(*places) if len(places) > 1 else partial(_picked, places)


def _picked(places: Sequence[int], column: Sequence[_T]) -> list[_T]:
    return [column[place] for place in places]


def numbered(ops: Sequence[Instruction], *fields: str) -> Numbered:
    """The kinds of operations where those that are equal in some fields are of one kind."""
    return _numbered(ops, map(itemgetter(*map(Instruction._fields.index, fields)), ops))


def _numbered(ops: Sequence[Instruction], keys: Iterable[object]) -> Numbered:
    numbers: dict[object, int] = {}
    of = [numbers.setdefault(key, len(numbers)) for key in keys]
    first: dict[int, Instruction] = {}
    for kind, i in zip(of, ops, strict=True):
        first.setdefault(kind, i)
    return of, list(first.values())


class OpKinds:
    """Operations of one kind cost the same, and slow each other down in the same way.

    Attributes:
        of: of each operation, in issue order, the number of its kind.
        first: of each kind the first operation.
        shape: the kinds of `Program.shape`.
    """

    def __init__(self, ops: Sequence[Instruction], keys: Iterable[object]) -> None:
        self.of, self.first = _numbered(ops, keys)
        self.shape = self
        self._pick = picker(self.of)
        self._by: dict[tuple[str, ...], Numbered] = {}

    def resized(self, first: list[Instruction]) -> OpKinds:
        """The same kinds where the first operation of each has other sizes."""
        other = copy(self)
        other.first, other._by = first, {}
        return other

    def spread(self, values: Sequence[_T]) -> list[_T]:
        """Of one value for each kind one for each operation."""
        return list(self._pick(values))

    def by(self, *fields: str) -> Numbered:
        """The operations `numbered` by some fields, without the unit: those of one kind have the same number."""
        if fields not in self._by:
            of, first = numbered(self.first, *fields)
            self._by[fields] = self.spread(of), first
        return self._by[fields]


def stretches_of(program: Program, kinds: OpKinds) -> list[Stretch]:
    """Where operations of the same kinds, with the same dependencies, come again and again."""
    order = dependencies(program, on_cpu=False)
    return program.once_for_all(("stretches", kinds.shape), lambda _: stretches(kinds.of, order))


def marks_in(program: Program, kinds: OpKinds) -> dict[int, Stretch]:
    """An operation of each period of the stretches."""
    order = dependencies(program, on_cpu=False)
    return program.once_for_all(("marks", kinds.shape), lambda program: marks_of(stretches_of(program, kinds), order))


def kinds_of(program: Program, alike: Alike) -> OpKinds:
    """The kinds of a program's operations.

    Args:
        alike: operations of units that are alike are of one kind if they are the same operation of the same size in
            groups of the same size.
    """
    what = "kinds", tuple(alike), tuple(alike.values())
    known = program.once_for_all(what, partial(_kinds, alike=alike))
    return known if program.resized is None else program.once(what, partial(_resized, program, known, alike))


def _kinds(program: Program, alike: Alike) -> OpKinds:
    return OpKinds(program.ops, _keys(program.ops, alike))


def _keys(ops: Sequence[Instruction], alike: Alike) -> Iterable[object]:
    units = list(map(_UNIT, ops))
    return zip(map(_SIZE, ops), map(alike.get, units, units), strict=True)


def _resized(program: Program, known: OpKinds, alike: Alike) -> OpKinds:
    """The kinds of a program, those of its shape being known: the same, unless sizes that were equal no longer are, or
    became so.
    """
    assert program.resized is not None
    keys = program.resized.keys
    place: dict[int, int] = {}
    for kind, number in zip(known.of, program.numbers, strict=True):
        if keys[place.setdefault(kind, number)] != keys[number]:
            return _kinds(program, alike)
    first = list(map(program.instruction, place.values()))
    return known.resized(first) if len(set(_keys(first, alike))) == len(first) else _kinds(program, alike)


def kinds_of_each(program: Program) -> OpKinds:
    """Each operation is of a kind of its own."""
    return program.once("kinds of each", lambda: OpKinds(program.ops, range(len(program.ops))))
