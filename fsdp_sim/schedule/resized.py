"""The program for another number of ranks: mostly the same instructions with other sizes.

Which sizes become which is read off a model of a few of the layers, which is built for both numbers of ranks: layers
that share their parameters' descriptions have the same sizes. Where the two differ in more than sizes, or the program
has one that they lack, nothing is known, and the program is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.schedule.program import OF_SIZE, Program, Resized, Sizes, but_sizes, sizes_of
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import Plan

LAYERS = 2  # of those that share their parameters' descriptions, in the small model
SIZED = frozenset({Kind.OP, Kind.ALLOC, Kind.FREE})
_PLACE = ("step", "micro_batch", "phase", "unit", "event")
_what = itemgetter(*[n for n, name in enumerate(Instruction._fields) if name not in (*OF_SIZE, *_PLACE)])
Key = tuple[object, ...]
Builder = Callable[[Sequence[Unit], Plan, int, int], Program]


def resized(program: Program, plan: Plan, world_size: int, steps: int, build: Builder) -> Program | None:
    """The program for another number of ranks, if nothing but its sizes differs from one that is there.

    Args:
        program: for some number of ranks, under a plan that issues the same.
        build: builds programs; once somebody wants the instructions, also this one.
    """
    few = program.once("few units", lambda: _few(program))
    if not few:
        return None
    numbers, keys = program.once("keys of sizes", lambda: _keys(program))
    try:
        before = program.once("of few units", lambda: build(few, plan, program.world_size, steps).instructions)
        after = build(few, plan, world_size, steps).instructions
    except ValueError:
        return None  # and building it says what is wrong
    if len(before) != len(after):
        return None
    classes = _classes(few)
    known: dict[Key, Sizes] = {}
    for one, other in zip(before, after, strict=True):
        if one.kind not in SIZED:
            if one != other:
                return None
        elif (
            but_sizes(one) != but_sizes(other)
            or bool(one.bytes) != bool(other.bytes)
            or known.setdefault(_key(one, classes), sizes_of(other)) != sizes_of(other)
        ):
            return None
    if any(key not in known for key in keys):
        return None
    units = program.units
    return program.with_sizes(
        plan, world_size, Resized(program, numbers, [known[key] for key in keys]),
        lambda: build(units, plan, world_size, steps).instructions,
    )  # fmt: skip


def _few(program: Program) -> tuple[Unit, ...]:
    """The units without most of the layers that share their parameters' descriptions; none where that is no model."""
    units = program.units
    if (
        program.plan.api != "fsdp2"
        or program.runs
        or any(u.exchange or (u.is_root and u is not units[0]) for u in units)
    ):
        return ()
    found: list[Unit] = []
    for unit in units:
        if sum([other.params is unit.params for other in found]) < LAYERS:
            found.append(unit)
    return tuple(found) if 2 * len(found) < len(units) else ()


def _classes(units: Sequence[Unit]) -> dict[str, int]:
    """By name of a unit what it shares with those that have the same sizes."""
    return {unit.name: id(unit.params) for unit in units}


def _key(i: Instruction, classes: dict[str, int]) -> Key:
    """Instructions of the same key have the same sizes."""
    return (classes.get(i.unit, i.unit), *_what(i), *sizes_of(i))


def _keys(program: Program) -> tuple[list[int], list[Key]]:
    """Of each instruction the number of its key, -1 where it has no sizes; the keys."""
    classes, known = _classes(program.units), dict[Key, int]()
    numbers = [known.setdefault(_key(i, classes), len(known)) if i.kind in SIZED else -1 for i in program.instructions]
    return numbers, list(known)
