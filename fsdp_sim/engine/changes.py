"""Which changes of memory a program makes, and of what size.

Which there are, in which order, follows from the program, and is the same whatever a micro-batch computes; so it is
found once. How many bytes the activations take is the workload's, and asked once for each kind of segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import NamedTuple

from fsdp_sim.cost import Workload
from fsdp_sim.engine.activations import (
    SEGMENT_OPS,
    ActivationChange,
    ActivationChanges,
    drops_logits,
    first_trained,
    for_a_moment,
    last_backward,
    staying,
)
from fsdp_sim.engine.kinds import Alike, kinds_of
from fsdp_sim.engine.record import Changed, EventRows
from fsdp_sim.schedule import Instruction, Kind, Program, policy_of
from fsdp_sim.timeline import MEMORY, Memory, Op

_ALLOC, _FREE, _OP = Kind.ALLOC, Kind.FREE, Kind.OP
LARGEST_FOLD = 4  # pieces of a program in a layer
Hill = tuple[int, int, int]  # of a piece `_hill`, and its slot
_ACTIVATION, _UNSHARDED_GRAD = Memory.ACTIVATION, Memory.UNSHARDED_GRAD  # Python 3.11 is slow to look them up


@dataclass(frozen=True, eq=False)
class Changes:
    """The changes of memory that a program makes, in order; not their sizes.

    Attributes:
        program: what was issued.
        number: of each change the instruction that makes it.
        category: what for.
        at_end: whether it comes at the end of its operation.
        grows: whether memory is allocated.
    """

    program: Program = field(repr=False)
    number: list[int]
    category: list[Memory]
    at_end: list[bool]
    grows: list[bool]

    @classmethod
    def of(
        cls, program: Program, pieces: Iterable[ChangesPiece], of_slots: Sequence[Sequence[ActivationChange]]
    ) -> Changes:
        """The changes of some pieces of a program, each followed by those of an operation."""
        columns: list[tuple[int, Memory, bool, bool]] = []
        for piece in pieces:
            for number, category, n_bytes in zip(piece.numbers, piece.categories, piece.sizes, strict=True):
                columns.append((number, category, False, n_bytes > 0))
            columns += [(piece.number, one.category, one.at_end, one.bytes > 0) for one in of_slots[piece.slot]]
        return cls(program, *([row[place] for row in columns] for place in range(4)))  # type: ignore[arg-type]

    @cached_property
    def unit(self) -> list[str]:
        """Of each change the unit that it is for."""
        instructions = self.program.instructions
        names = {segment: unit.name for unit in self.program.units for segment in unit.names_of_segments}
        by = [instructions[number] for number in self.number]
        return [names.get(i.unit, i.unit) if i.kind is _OP or _of_activations(i) else i.unit for i in by]

    @cached_property
    def what(self) -> list[tuple[Memory, str]]:
        """Of each change its category and its unit."""
        return list(zip(self.category, self.unit, strict=True))

    def rows(self, on_cpu: bool) -> EventRows:
        """The events of the program with these changes, beginning with what lives through all steps."""

        def rows() -> EventRows:
            ops = [Op.ALLOC if grows else Op.FREE for grows in self.grows]
            changed = Changed(self.number, ops, self.unit, self.category, [""] * len(ops), self.at_end)
            return EventRows(self.program, on_cpu, changed, list(self.program.state_bytes))

        return self.program.once(("rows", self, on_cpu), rows)


@dataclass(frozen=True, eq=False)
class SizedChanges:
    """The changes of memory of a program, and the bytes of each.

    Attributes:
        template: what follows of them from the program alone, which others share under the name ``shared``.
        of_slots: of each of its slots the changes of the operations.
        hills: of each of its slots `_hill`.
    """

    program: Program = field(repr=False)
    template: ChangesTemplate = field(repr=False)
    of_slots: Sequence[Sequence[ActivationChange]] = field(repr=False)
    hills: Sequence[tuple[int, int]] = field(repr=False)
    shared: tuple[object, ...] = field(repr=False)

    @cached_property
    def which(self) -> Changes:
        """The changes, a column for each thing there is to say of them."""
        signs = tuple([tuple([(one.category, one.at_end, one.bytes > 0) for one in some]) for some in self.of_slots])
        return self.program.once(
            ("changes", self.shared, signs), partial(Changes.of, self.program, self.template.pieces, self.of_slots)
        )

    @cached_property
    def bytes(self) -> list[int]:
        """(n,), the bytes of each: negative where memory is freed."""
        sizes = [[one.bytes for one in some] for some in self.of_slots]
        return list(
            chain.from_iterable([part for piece in self.template.pieces for part in (piece.sizes, sizes[piece.slot])])
        )

    def most(self, before: int) -> int:
        """The most bytes alive at one moment, of which some are there before."""
        of_slots, most, live = self.hills, before, before
        for hills, skipped in self.template.hills:
            began = live
            for total, top, slot in hills:
                if live + top > most:
                    most = live + top
                live += total
                total, top = of_slots[slot]
                if live + top > most:
                    most = live + top
                live += total
            live += skipped * (live - began)
        return most


def _hill(sizes: Iterable[int]) -> tuple[int, int]:
    """What some changes leave, and the most that is alive among them."""
    live = list(accumulate(sizes, initial=0))
    return live[-1], max(live)


def _folded(hills: Sequence[Hill]) -> list[tuple[Sequence[Hill], int]]:
    """The first and the last of layers that are alike, and after each so many that are skipped: of these none has more
    alive than both.
    """
    found: list[tuple[Sequence[Hill], int]] = []
    at = 0
    while at < len(hills):
        for period in range(1, LARGEST_FOLD + 1):
            some, times = hills[at : at + period], 1
            while hills[at + times * period : at + (times + 1) * period] == some:
                times += 1
            if times > 2:
                found += [(some, times - 2), (some, 0)]
                at += times * period
                break
        else:
            found.append((hills[at : at + 1], 0))
            at += 1
    return found


def changes_of(program: Program, workload: Workload | None, optimizer_bytes: int = 0) -> SizedChanges:
    """The changes of memory of a program.

    Args:
        workload: what the segments keep and need. Without it FSDP's own buffers alone.
        optimizer_bytes: what the optimizer needs while it runs.

    Raises:
        ValueError: the workload says nothing of a segment that the program computes.
    """
    alike = workload.alike if workload else None
    kinds = None if alike is None else kinds_of(program, alike)
    # of the plan, where the program is that of others too
    shared = kinds and kinds.shape, staying(program), drops_logits(program)
    template = program.once_for_all(("template", *shared), partial(_template, alike=alike))
    if program.resized is not None:
        template = program.once(("template", *shared), partial(_resized, program, template, alike))
    of_slots: list[Sequence[ActivationChange]] = [()] * len(template.slots)
    hills = [(0, 0)] * len(of_slots)
    if workload is not None:
        asked = "changes of slots", policy_of(program.plan), template.asked
        known = workload.once(asked, partial(_of_slots, program, workload, template.slots))
        of_slots, hills = known[0].copy(), known[1].copy()
    for number, slot in enumerate(template.slots):
        if slot.op is Op.OPTIM and optimizer_bytes:
            of_slots[number] = tuple(for_a_moment(Memory.TEMPORARY, optimizer_bytes))
            hills[number] = 0, optimizer_bytes
    return SizedChanges(program, template, of_slots, hills, shared)


def _of_slots(
    program: Program, workload: Workload, slots: Iterable[Slot]
) -> tuple[list[Sequence[ActivationChange]], list[tuple[int, int]]]:
    """The changes of the operations of some slots, and of each slot `_hill`."""
    activations = ActivationChanges(program, workload.work)
    changes: list[Sequence[ActivationChange]] = [
        activations.of(*slot)
        if slot.op in SEGMENT_OPS
        else activations.offloaded(slot.op, slot.unit)
        if slot.op in MEMORY
        else ()
        for slot in slots
    ]
    return changes, [_hill([one.bytes for one in some]) for some in changes]


def _of_activations(i: Instruction) -> bool:
    """Whether activations are freed because they were offloaded, or room is made for them to come back."""
    return i.category is _ACTIVATION


class Slot(NamedTuple):
    """Operations that change memory alike.

    Attributes:
        made: bytes of whole gradients that it makes.
    """

    op: Op
    unit: str
    made: int


class ChangesPiece(NamedTuple):
    """Changes whose sizes the program says, up to an operation whose changes it does not.

    Attributes:
        numbers, categories, sizes: of the changes.
        number: of the operation; ``slot``: its place in `ChangesTemplate.slots`.
    """

    numbers: list[int]
    categories: list[Memory]
    sizes: list[int]
    number: int
    slot: int


class ChangesTemplate(NamedTuple):
    """The changes of memory of a program as far as they follow from it alone.

    Attributes:
        asked: all that, beyond a workload and what checkpointing keeps, decides what the slots change.
        grads: the instructions that allocate whole gradients.
    """

    pieces: list[ChangesPiece]
    slots: list[Slot]
    asked: tuple[object, ...]
    grads: list[int]
    hills: list[tuple[Sequence[Hill], int]]  # `_folded`


def _template(program: Program, alike: Alike | None) -> ChangesTemplate:
    """Go through a program once. Without ``alike`` its segments change nothing."""
    again, back = program.segments_of(Op.RECOMPUTE), program.segments_of(Op.BWD)
    edge, stays = (*first_trained(program), last_backward(program), drops_logits(program)), staying(program)
    pieces: list[ChangesPiece] = []
    places: dict[object, int] = {}
    slots: list[Slot] = []
    numbers: list[int] = []
    categories: list[Memory] = []
    sizes: list[int] = []
    all_grads: list[int] = []
    grads: list[tuple[int, int]] = []  # allocated whole gradients that the next operation, if a backward, makes

    def close(number: int, slot: Slot, what: object) -> None:
        nonlocal numbers, categories, sizes
        if what not in places:
            places[what] = len(slots)
            slots.append(slot)
        pieces.append(ChangesPiece(numbers, categories, sizes, number, places[what]))
        numbers, categories, sizes = [], [], []

    for number, i in enumerate(program.instructions):
        kind = i.kind
        if kind is not _OP and kind is not _ALLOC and kind is not _FREE:
            continue
        if kind is _ALLOC and i.category is _UNSHARDED_GRAD and alike is not None:
            grads.append((number, i.bytes))
            all_grads.append(number)
            continue
        made = 0
        if grads:
            if kind is _OP and i.op is Op.BWD:
                made = sum([n_bytes for _, n_bytes in grads])
            else:
                numbers += [n for n, _ in grads]
                categories += [Memory.UNSHARDED_GRAD] * len(grads)
                sizes += [n_bytes for _, n_bytes in grads]
            grads.clear()
        if i.category is _ACTIVATION:
            if alike is not None:
                close(number, Slot(i.op, i.unit, 0), (i.op, alike.get(i.unit, i.unit), i.unit in again))
        elif kind is not _OP:
            numbers.append(number)
            categories.append(i.category)
            sizes.append(i.bytes if kind is _ALLOC else -i.bytes)
        elif i.op is Op.OPTIM or (i.op in SEGMENT_OPS and alike is not None):
            kind_of = (i.op, alike and alike.get(i.unit, i.unit), i.unit in again, i.unit in back)
            what = (*kind_of, i.unit in edge, stays.of(i.unit), made)
            close(number, Slot(i.op, i.unit, made), what)
    close(len(program), Slot(Op.OTHER, "", 0), None)
    asked = *edge, stays, *places, *slots
    return ChangesTemplate(pieces, slots, asked, all_grads, _hills_of(pieces))


def _hills_of(pieces: Iterable[ChangesPiece]) -> list[tuple[Sequence[Hill], int]]:
    return _folded([(*_hill(piece.sizes), piece.slot) for piece in pieces])


def _resized(program: Program, template: ChangesTemplate, alike: Alike | None) -> ChangesTemplate:
    """The template of a program, that of its shape being known."""
    assert program.resized is not None
    shape, keys, sizes = program.resized
    own = [n_bytes for n_bytes, *_ in sizes]
    if any(own[keys[number]] != shape.instructions[number].bytes for number in template.grads):
        return _template(program, alike)  # of the slots' sizes, too
    pieces = [
        piece._replace(
            sizes=[
                own[keys[number]] if n_bytes > 0 else -own[keys[number]]
                for number, n_bytes in zip(piece.numbers, piece.sizes, strict=True)
            ]
        )
        for piece in template.pieces
    ]
    return template._replace(pieces=pieces, hills=_hills_of(pieces))
