"""What the CPU was doing when it issued something: which annotation, which unit, which phase, step and micro-batch.

FSDP2 annotates its hooks with the unit's name; a unit's forward is what lies between its ``pre_forward`` and its
``post_forward``, its backward between ``pre_backward`` and ``post_backward``. Units nest, the root around all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from functools import cached_property
from math import inf
from typing import NamedTuple

from fsdp_sim.timeline.kinds import Op, Phase
from fsdp_sim.timeline.kineto.fsdp1 import named_units
from fsdp_sim.timeline.kineto.names import ROOT, mark
from fsdp_sim.timeline.kineto.nesting import Nesting
from fsdp_sim.timeline.kineto.notes import Note
from fsdp_sim.timeline.kineto.rows import Span, TraceRows

LOSS = "loss"  # what runs between the root's forward and its backward


class HostState(NamedTuple):
    """What is computed between two marks."""

    phase: Phase = Phase.NONE
    op: Op = Op.OTHER
    unit: str = ""
    occurrence: int = 0  # counts the forwards and backwards of units
    step: int = 0
    micro_batch: int = 0


class Host:
    """The CPU side of a trace.

    Attributes:
        notes: the annotations that mean something, sorted by start.
        fsdp: 2, 1, or 0 where the trace has no annotation of FSDP.
        ops: the CPU operations, as columns; telling: indices of those that say what is done.
    """

    def __init__(self, rows: TraceRows) -> None:
        read = [(span, found) for span in rows.annotations if (found := mark(span.name))]
        notes = [Note(*span[:3], *found) for span, found in read]
        fsdp1 = any(note.kind.startswith("fsdp1:") for note in notes)
        if fsdp1:
            notes = named_units(notes, rows.modules)
        self.notes = sorted(notes, key=lambda note: (note.start, -note.end))
        self.fsdp = 1 if fsdp1 else 2 if any(note.unit for note in self.notes) else 0
        self.ops = rows.ops
        self.op_names = rows.names
        self._nesting = Nesting(*_columns(self.notes))
        self._frames = Nesting(*_columns(rows.frames))
        self._frame_names = [frame.name for frame in rows.frames]
        self._python_thread = Counter(frame.tid for frame in rows.frames).most_common(1)[0][0] if rows.frames else 0
        self._times: list[float] = []
        self._states: list[HostState] = []
        self._walk()
        self.telling = self._telling_ops()
        self._op_nesting = self._nested(self.telling)

    def named(self, begin: str | tuple[str, ...]) -> set[int]:
        """Which of ``op_names`` begin so."""
        return {i for i, name in enumerate(self.op_names) if name.startswith(begin)}

    def note(self, tid: int, time: float) -> list[Note]:
        """The annotations that a moment lies in, from the innermost outwards."""
        return [self.notes[i] for i in self._nesting.around(tid, time)]

    def state(self, time: float) -> HostState:
        """What was computed at a moment."""
        index = bisect_right(self._times, time) - 1
        return self._states[index] if index >= 0 else self._before

    def op_around(self, tid: int, time: float) -> list[str]:
        """Names of the telling CPU operations that a moment lies in, from the innermost outwards."""
        return [self.op_names[self.ops.name[i]] for i in self.op_ids_around(tid, time)]

    def op_ids_around(self, tid: int, time: float) -> list[int]:
        """The same as indices of ``ops``."""
        return [self.telling[i] for i in self._op_nesting.around(tid, time)]

    def recomputes(self, tid: int, time: float) -> bool:
        """Whether, inside of backward, an operation is recorded for autograd: a forward that runs again."""
        return any(self.ops.forward[i] for i in self.op_ids_around(tid, time))

    def in_autograd(self, tid: int, time: float) -> bool:
        """Whether the autograd engine runs a node on that thread: not so when backward is over."""
        return self._engine.at(tid, time) >= 0

    def calls(self, tid: int, time: float) -> tuple[str, ...]:
        """``file:line`` of the user's functions that ran, outermost first.

        The autograd engine has a thread of its own; there they are those of the thread that waits for it.
        """
        found = list(self._frames.around(tid, time)) or list(self._frames.around(self._python_thread, time))
        return tuple(self._frame_names[i] for i in reversed(found))

    # ---- building ----

    def _walk(self) -> None:
        """Go through all marks in time; note the state after each."""
        marks = [(note.start, 0, note, True) for note in self.notes] + [
            (note.end, -1, note, False) for note in self.notes
        ]
        edges = sorted(m[0] for m in marks)
        marks += [(t, 1, Note(t, t, 0, "autograd"), True) for t in self._autograd_starts(edges)]
        if not self.fsdp:  # FSDP says where a forward begins
            marks += [(t, 1, Note(t, t, 0, "forward"), True) for t in self._forward_starts()]
        walk = _Walk([note for note in self.notes if note.kind == "step"], self.fsdp)
        for time, _, note, begins in sorted(marks, key=lambda m: m[:2]):
            walk.step_to(time)
            walk.pass_(note, begins)
            self._times.append(time)
            self._states.append(walk.state())
        if not self.fsdp:
            self._begin_steps_early()
        self._before = HostState(step=walk.first_step, phase=Phase.NONE)

    def _begin_steps_early(self) -> None:
        """What is issued between an optimizer and the next forward prepares that: weights are gathered for it."""
        for i in range(len(self._states) - 2, -1, -1):
            state, following = self._states[i], self._states[i + 1]
            if state.phase is Phase.NONE and following.step > state.step:
                self._states[i] = state._replace(step=following.step, micro_batch=0)

    @cached_property
    def _engine(self) -> Nesting:
        return self._nested(self._evaluations)

    def _nested(self, ids: list[int]) -> Nesting:
        """Some of the CPU operations."""
        start, end, tid, *_ = self.ops
        return Nesting([start[i] for i in ids], [end[i] for i in ids], [tid[i] for i in ids])

    def _autograd_starts(self, edges: list[float]) -> list[float]:
        """When the autograd engine begins to run, as often as something else happened before."""
        first: dict[int, float] = {}  # by how much happened before
        for start in (self.ops.start[i] for i in self._evaluations):
            first.setdefault(bisect_right(edges, start), start)
        return list(first.values())

    def _forward_starts(self) -> list[float]:
        """When operations that autograd records begin, outside of its engine, as often as that or an optimizer ran.

        What comes after the last backward begins no step: a loss that is added up for a log is one of these operations.
        """
        engine = sorted(self.ops.start[i] for i in self._evaluations)
        last = engine[-1] if engine else inf
        before = sorted([*engine, *(note.end for note in self.notes if note.kind == "optimizer")])
        first: dict[int, float] = {}  # by how much of these happened before
        for i, forward in enumerate(self.ops.forward):
            start = self.ops.start[i]
            if forward and start < last and not self.in_autograd(self.ops.tid[i], start):
                first.setdefault(bisect_right(before, start), start)
        return list(first.values())

    @cached_property
    def _evaluations(self) -> list[int]:
        """The CPU operations that are nodes which the autograd engine runs."""
        engine = self.named("autograd::engine::evaluate")
        return [i for i, name in enumerate(self.ops.name) if name in engine]

    def _telling_ops(self) -> list[int]:
        """The CPU operations that tell something: FSDP's, torch.distributed's, arithmetic on gradients, and forwards
        during backward.
        """
        telling, start = self.named(_TELLING), self.ops.start
        return [
            i
            for i, (name, forward) in enumerate(zip(self.ops.name, self.ops.forward, strict=True))
            if name in telling or (forward and self.state(start[i]).phase is Phase.BACKWARD)
        ]


_TELLING = (
    "fsdp::", "c10d::", "record_param_comms", "aten::_chunk_cat", "aten::chunk_cat", "aten::div", "aten::mul",
    "aten::_foreach_div", "aten::_foreach_mul", "aten::add", "aten::_foreach_add", "aten::copy_", "aten::_to_copy",
    "aten::_foreach_copy", "aten::cat", "aten::split_with_sizes_copy", "aten::constant_pad_nd",
)  # fmt: skip


def _columns(spans: list[Note] | list[Span]) -> tuple[list[float], list[float], list[int]]:
    return [s.start for s in spans], [s.end for s in spans], [s.tid for s in spans]


class _Walk:
    """The state of the training loop while its marks pass by."""

    def __init__(self, steps: list[Note], fsdp: int) -> None:
        self._steps = steps
        self._fsdp = fsdp
        self._next = 0  # the step that has not begun
        self.first_step = steps[0].number if steps else 0
        self._step = self.first_step
        self._micro_batch = -1
        self._phase = Phase.NONE
        self._stack: list[tuple[Op, str, int]] = []
        self._count = 0
        self._loss = False
        self._stepped = False  # the optimizer has run since the last forward

    def step_to(self, time: float) -> None:
        while self._next < len(self._steps) and self._steps[self._next].start <= time:
            self._begin_step(self._steps[self._next].number)
            self._next += 1

    def _begin_step(self, number: int) -> None:
        self._step, self._micro_batch, self._loss = number, -1, False

    def state(self) -> HostState:
        step, micro_batch = self._step, max(self._micro_batch, 0)
        if self._phase is Phase.OPTIMIZER:
            return HostState(self._phase, Op.OPTIM, "", self._count, step, micro_batch)
        if self._phase is Phase.NONE:
            return HostState(self._phase, Op.OTHER, "", self._count, step, micro_batch)
        forward = self._phase is Phase.FORWARD
        if self._stack:
            return HostState(self._phase, *self._stack[-1], step, micro_batch)
        op = Op.FWD if forward else Op.BWD
        return HostState(self._phase, op, LOSS if self._loss else "", self._count, step, micro_batch)

    def pass_(self, note: Note, begins: bool) -> None:
        kind, unit = note.kind, note.unit
        if (kind in ("root_pre_forward", "ddp_forward") and begins) or (kind == "step" and begins and not self._fsdp):
            self._enter(Phase.FORWARD)
        elif kind == "pre_forward" and not begins:
            backward = self._phase is Phase.BACKWARD
            if not backward:
                self._enter(Phase.FORWARD)
            self._push(Op.RECOMPUTE if backward else Op.FWD, unit)
        elif kind == "post_forward" and begins:
            self._pop((Op.FWD, Op.RECOMPUTE), unit)
            self._loss = unit == ROOT and self._phase is Phase.FORWARD
        elif kind == "forward" and self._phase is not Phase.OPTIMIZER:
            self._enter(Phase.FORWARD)
        elif kind == "ddp_forward":
            self._loss = True
            self._count += 1
        elif kind == "autograd":
            self._enter(Phase.BACKWARD)
            self._loss &= self._fsdp > 0  # only FSDP says where the backward of the loss ends
        elif kind == "pre_backward":
            self._enter(Phase.BACKWARD)
            if not begins:
                self._loss = False
                self._push(Op.BWD, unit)
        elif kind.startswith("post_backward") and begins:
            self._pop((Op.BWD,), unit)
        elif kind == "root_post_backward_callback" and not begins:
            self._stack.clear()
            self._phase = Phase.NONE
        elif kind == "optimizer":
            self._stack.clear()
            self._phase = Phase.OPTIMIZER if begins else Phase.NONE
            self._count += 1
            self._stepped = not begins

    def _enter(self, phase: Phase) -> None:
        if phase is self._phase or (phase is Phase.BACKWARD and self._phase is Phase.OPTIMIZER):
            return
        if phase is Phase.FORWARD:
            if self._stepped and not self._steps:  # nothing else says where steps end
                self._begin_step(self._step + 1)
            self._stepped = False
            self._micro_batch += 1
            self._stack.clear()
            self._loss = False
        else:
            self._stack = [entry for entry in self._stack if entry[0] is Op.BWD]
        self._phase = phase
        self._count += 1

    def _push(self, op: Op, unit: str) -> None:
        if any(entry[:2] == (op, unit) for entry in self._stack):
            return
        self._count += 1
        self._stack.append((op, unit, self._count))

    def _pop(self, ops: tuple[Op, ...], unit: str) -> None:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i][0] in ops and self._stack[i][1] == unit:
                del self._stack[i]
                return
