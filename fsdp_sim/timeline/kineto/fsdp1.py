"""The units of FSDP1, whose annotations name none: they are told apart by their order.

A step's forwards nest in the root's: the outermost is ``root``, the others are named after the module they wrap where
the trace has modules (``with_stack=True``), else numbered ``unit.0``, ``unit.1`` … by their first forward. Backward
goes through them from the last forward to the first, and a prefetch is for the unit that comes next.
"""

from __future__ import annotations

from fsdp_sim.timeline.kineto.names import ROOT
from fsdp_sim.timeline.kineto.nesting import Nesting
from fsdp_sim.timeline.kineto.notes import Note
from fsdp_sim.timeline.kineto.rows import Span

WRAPPERS = ("FullyShardedDataParallel", "CheckpointWrapper", "OffloadWrapper")


def named_units(notes: list[Note], modules: list[Span]) -> list[Note]:
    """FSDP1's notes as FSDP2 would have written them; others as they are."""
    wrapped = _wrapped(notes, modules)
    walk = _Walk(wrapped, _order(notes, wrapped))
    marks = [(note.start, 1, note) for note in notes] + [(note.end, 0, note) for note in notes]
    return [
        named for time, begins, note in sorted(marks, key=lambda m: m[:2]) for named in walk.pass_(note, bool(begins))
    ]


def _order(notes: list[Note], wrapped: dict[float, str]) -> list[str]:
    """The units in the order of the last forward: what a prefetch in the first goes by, recorded from its second on."""
    walk = _Walk(wrapped, [])
    forwards = [note for note in notes if note.kind == "fsdp1:forward"]
    marks = [(note.start, 1, note) for note in forwards] + [(note.end, 0, note) for note in forwards]
    for _, begins, note in sorted(marks, key=lambda m: m[:2]):
        walk.pass_(note, bool(begins))
    return walk.order


def _wrapped(notes: list[Note], modules: list[Span]) -> dict[float, str]:
    """By start of a unit's forward the name of the outermost module in it that is no wrapper."""
    forwards = sorted((note for note in notes if note.kind == "fsdp1:forward"), key=lambda note: note.start)
    inside = Nesting(*([getattr(f, field) for f in forwards] for field in ("start", "end", "tid")))
    names: dict[float, str] = {}
    for module in sorted(modules, key=lambda module: module.start):
        at = inside.at(module.tid, module.start)
        if at >= 0 and not module.name.startswith(WRAPPERS):
            names.setdefault(forwards[at].start, module.name)
    return names


class _Walk:
    """The order of forwards and backwards while the marks pass by."""

    def __init__(self, wrapped: dict[float, str], last_order: list[str]) -> None:
        self._wrapped = wrapped
        self._open: list[str] = []  # units whose forward runs, the root first
        self.order: list[str] = []  # of this forward, as units began
        self._finished: list[str] = []  # of this forward, as units ended; backward takes from its end
        self._last_order = last_order  # of the forward before
        self._in_backward: list[str] = []
        self._outer: dict[str, tuple[str, ...]] = {}  # of a unit those that it lies in

    def pass_(self, note: Note, begins: bool) -> list[Note]:
        """The notes to put in the place of one whose start or end passes by."""
        if not note.kind.startswith("fsdp1:"):
            return [note] if begins else []
        kind = note.kind.removeprefix("fsdp1:")
        if kind == "forward":
            return self._forward(note, begins)
        if not begins:
            return []
        unit = self._open[-1] if self._open else ROOT
        if kind == "pre_forward":
            return [note._replace(kind="pre_forward", unit=unit)]
        if kind == "post_forward":
            return [note._replace(kind="post_forward", unit=unit)]
        if kind == "pre_forward_prefetch":
            return [note._replace(kind="forward_prefetch", unit=self._after(self._last_order, unit))]
        if kind == "pre_backward_hook":
            self._in_backward.append(self._finished.pop() if self._finished else ROOT)
            return [note._replace(kind="pre_backward", unit=self._in_backward[-1])]
        if kind in ("pre_backward_prefetch", "post_backward_prefetch"):
            return [note._replace(kind="backward_prefetch", unit=self._finished[-1] if self._finished else "")]
        if kind == "post_backward_hook":
            return [note._replace(kind="post_backward_reduce", unit=self._reduced())]
        return [note._replace(kind=kind)]

    def _reduced(self) -> str:
        """The unit whose gradients are ready: of those in backward the first, but none before the units within it."""
        around = {outer for unit in self._in_backward for outer in self._outer.get(unit, ())}
        unit = next((unit for unit in self._in_backward if unit not in around), ROOT)
        if unit in self._in_backward:
            self._in_backward.remove(unit)
        return unit

    def _forward(self, note: Note, begins: bool) -> list[Note]:
        if not begins:
            if self._open:
                self._finished.append(self._open.pop())
            return []
        root = not self._open
        if root:
            self._last_order, self.order = self.order or self._last_order, []
            self._finished, self._in_backward = [], []
        unit = ROOT if root else self._wrapped.get(note.start, f"unit.{len(self.order) - 1}")
        self._outer[unit] = tuple(self._open)
        self._open.append(unit)
        self.order.append(unit)
        return [note._replace(kind="root_pre_forward", end=note.start)] if root else []

    @staticmethod
    def _after(order: list[str], unit: str) -> str:
        """The unit whose forward came next in the step before."""
        at = order.index(unit) + 1 if unit in order else len(order)
        return order[at] if at < len(order) else ""
