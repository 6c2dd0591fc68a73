"""The tensors of a program, one by one, in the order in which they are allocated and freed.

Where `memory` counts bytes, an allocator needs tensors: FSDP's buffers cut into parameters, and what the compute of
each segment makes, by its tape. Work without a tape counts as one tensor for each change of its bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from fsdp_sim.cost import OUTGOING, PARAM_GRAD, Moves, Work, lifetimes
from fsdp_sim.engine.activations import SEGMENT_OPS, ActivationChanges
from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.spec import OPTIMIZER_STATES
from fsdp_sim.timeline import Lane, Memory, Op

_ALLOC, _FREE, _OP, _RECORD_STREAM = Kind.ALLOC, Kind.FREE, Kind.OP, Kind.RECORD_STREAM
_COMPUTE = Lane.COMPUTE
_READ = itemgetter(
    *map(Instruction._fields.index, ("kind", "op", "lane", "unit", "bytes", "category", "tensors"))
)  # what is read of an instruction


class Move(NamedTuple):
    """A tensor is allocated, or freed where ``bytes`` is 0.

    Attributes:
        tensor: its number.
        lane: the stream whose pool it comes from.
        now_s: the CPU's time.
        until_s: of a free: when the streams that use it too (``record_stream``) are done with it.
    """

    tensor: int
    bytes: int
    lane: Lane = _COMPUTE
    now_s: float = 0.0
    until_s: float | None = None


class Tensors(NamedTuple):
    """What a program does to memory.

    Attributes:
        parameters: sizes of what is there before the first step.
        states: sizes of the optimizer's states, which the first step makes.
        before_optimizer, after: the moves of a step, before the states are made and after; those of each micro-batch
            are a list of their own. Micro-batches that do the same have equal lists.
        step_s: how long a step takes on the CPU's clock; 0 where no moment matters.
    """

    parameters: list[int]
    states: list[int]
    before_optimizer: list[list[Move]]
    after: list[list[Move]]
    step_s: float


def needs_times(program: Program) -> bool:
    """Whether it matters to the allocator when things happen: whether memory waits for other streams before it goes."""
    return program.once_for_all("needs_times", lambda program: any([i.kind is _RECORD_STREAM for i in program]))


def tensors(program: Program, work: Mapping[str, Work] | None, run: Run | None) -> Tensors:
    """The tensors of a program.

    Args:
        work: of its segments; without it FSDP's buffers alone.
        run: when the instructions ran, which matters to ``record_stream`` alone. Without it nothing is known of that.
    """
    if not needs_times(program):
        run = None
    states = program.state_bytes
    by_param = program.plan.api != "fsdp1"
    sizes: dict[Memory, list[int]] = {Memory.SHARDED: [], Memory.OPTIMIZER: []}
    for unit in program.units:
        weights = [p.bytes for p in unit.params] if by_param else [1]
        for category, of_kind in sizes.items():
            repeated = weights * (OPTIMIZER_STATES[program.plan.optimizer] if category is Memory.OPTIMIZER else 1)
            of_kind += split(states.get((category, unit.name), 0), repeated)
    writer = _Writer(program, work, run)
    writer.write()
    end = len(writer.moves)
    optimizer_at = end if writer.optimizer_at is None else writer.optimizer_at
    cuts = sorted({0, *writer.micro_batch_at, optimizer_at, end})
    pieces = [(start, writer.moves[start:stop]) for start, stop in pairwise(cuts)]
    return Tensors(
        sizes[Memory.SHARDED], sizes[Memory.OPTIMIZER],
        [piece for start, piece in pieces if start < optimizer_at],
        [piece for start, piece in pieces if start >= optimizer_at],
        0.0 if run is None else run.span_s,
    )  # fmt: skip


def split(total: int, weights: Sequence[float]) -> list[int]:
    """A number in parts of given proportions; parts of nothing are left out.

    Example:
        >>> split(10, [1, 2, 2]), split(0, [1])
        ([2, 4, 4], [])
    """
    whole, done, before, parts = sum(weights), 0.0, 0, []
    for weight in weights:
        done += weight
        upto = round(total * done / whole)
        parts.append(upto - before)
        before = upto
    return [part for part in parts if part]


class _Writer:
    """Goes through the instructions of a program once."""

    def __init__(self, program: Program, work: Mapping[str, Work] | None, run: Run | None) -> None:
        self.program, self.work = program, work
        self.moves: list[Move] = []
        self.optimizer_at: int | None = None
        self.micro_batch_at: list[int] = []  # where the moves of each begin
        self.now_s = 0.0
        self._clock: dict[int, tuple[float, float]] = {}
        if run is not None:
            self._clock = {number: (cpu, reached) for number, cpu, reached in zip(*run.memory_times(), strict=True)}
        self._live: defaultdict[tuple[object, str], deque[tuple[int, int]]] = defaultdict(deque)  # (tensor, bytes)
        self._owed: defaultdict[tuple[object, str], int] = defaultdict(int)  # bytes freed of tensors that are larger
        self._last = 0  # number given out
        self._numbers: list[int] = []  # given back: the lowest comes next, so that repetitions have equal numbers
        self._shares = {unit.name: [p.bytes for p in unit.params] for unit in program.units}
        self._buffer: tuple[object, str] | None = None  # that was freed last,
        self._just_freed: list[int] = []  # and the moves that free it, one after the other
        self._made: list[Instruction] = []  # whole gradients that the next operation, if a backward, makes
        self._gradient: int | None = None  # of the output of the segment whose backward comes next
        self._activations: ActivationChanges | None = None
        self._moves_of: dict[tuple[object, ...], Moves] = {}
        self._first: dict[str, int] = {}  # number of the first tensor of each segment's tape
        if work is not None:
            self._activations = ActivationChanges(program, work)

    def write(self) -> None:
        """One micro-batch after the other. One that does what the one before it did, and finds what that one found,
        makes the same moves; it is not gone through where no moment matters.
        """
        before: object = None
        for _, some in groupby(enumerate(self.program.instructions), lambda one: one[1].micro_batch):
            micro_batch = list(some)
            self.micro_batch_at.append(len(self.moves))
            found = None if self._clock else ([_READ(i) for _, i in micro_batch], self._state())
            if found is not None and found == before:
                self.moves += self.moves[slice(*self.micro_batch_at[-2:])]
            else:
                self._go_through(micro_batch)
            before = found

    def _state(self) -> tuple[object, ...]:
        """What, beyond the instructions to come, decides the moves to come."""
        live = {key: list(some) for key, some in self._live.items() if some}
        owed = {key: n_bytes for key, n_bytes in self._owed.items() if n_bytes}
        numbers = self._last, sorted(self._numbers), dict(self._first)
        return live, owed, numbers, self._gradient, list(self._made), self.optimizer_at

    def _go_through(self, instructions: Iterable[tuple[int, Instruction]]) -> None:
        for number, i in instructions:
            kind, buffer = i.kind, self._buffer
            if number in self._clock:
                self.now_s = self._clock[number][0]
            if kind is _RECORD_STREAM:
                if (i.category, i.unit) == buffer and self._clock:
                    until_s = self._clock[number][1]
                    for at in self._just_freed:
                        self.moves[at] = self.moves[at]._replace(until_s=until_s)
                self._just_freed.clear()
            elif kind in (_ALLOC, _FREE) and i.category is Memory.ACTIVATION:
                self._offloaded(i)
            elif kind is _FREE:
                self._make()
                if (i.category, i.unit) != buffer:
                    self._just_freed, self._buffer = [], (i.category, i.unit)
                before = len(self.moves)
                self._free((i.category, i.unit), i.bytes)
                self._just_freed += range(before, len(self.moves))
                continue
            elif kind is _ALLOC:
                if i.category is Memory.UNSHARDED_GRAD and self.work is not None:
                    self._made.append(i)
                else:
                    self._make()
                    self._allocate((i.category, i.unit), self._sizes(i), i.lane or _COMPUTE)
            elif kind is _OP:
                if i.op is Op.OPTIM:
                    self.optimizer_at = len(self.moves)
                if self._activations is not None and i.op in SEGMENT_OPS:
                    self._compute(i)
                else:
                    self._make()
            self._buffer = None

    def _allocate(self, key: tuple[object, str], sizes: Sequence[int], lane: Lane = _COMPUTE) -> None:
        for n_bytes in sizes:
            tensor = self._number()
            self._live[key].append((tensor, n_bytes))
            self.moves.append(Move(tensor, n_bytes, lane, self.now_s))

    def _free(self, key: tuple[object, str], n_bytes: int) -> None:
        """The oldest tensors of a buffer that have so many bytes together, or else one that has, or else the oldest, as
        far as these bytes and those that were left of earlier calls go.

        Where there are two alike, of shards of gradients the newest: it is added to the one that is there and goes
        (``sharded_grad += new_sharded_grad``), so that a micro-batch leaves memory as it found it.
        """
        live = self._live[key]
        half, sizes = len(live) // 2, [size for _, size in live]
        if key[0] is Memory.RS_OUTPUT and sizes[:half] == sizes[half:] and sum(sizes[:half]) == n_bytes:
            live.rotate(half)
        elif n_bytes in sizes and n_bytes not in accumulate(sizes):  # autograd made them in another order
            at = sizes.index(n_bytes)
            self._ended(live[at][0])
            del live[at]
            return
        self._owed[key] += n_bytes
        while live and live[0][1] <= self._owed[key]:
            tensor, size = live.popleft()
            self._owed[key] -= size
            self._ended(tensor)

    def _number(self) -> int:
        if self._numbers:
            return heappop(self._numbers)
        self._last += 1
        return self._last

    def _ended(self, tensor: int) -> None:
        self.moves.append(Move(tensor, 0, now_s=self.now_s))
        heappush(self._numbers, tensor)

    def _make(self) -> None:
        """Whole gradients that no backward of ours makes."""
        for i in self._made:
            self._allocate((i.category, i.unit), self._sizes(i))
        self._made.clear()

    def _sizes(self, i: Instruction) -> list[int]:
        """A buffer of several tensors in the proportions of the parameters that it is of, where that can be told."""
        if i.tensors == 1:
            return [i.bytes]
        shares = self._shares.get(i.unit, [])
        whole = sum(shares)
        for at in range(len(shares) - i.tensors + 1):
            window = shares[at : at + i.tensors]
            if len(window) == len(shares) or sum(window) in (i.bytes, 2 * i.bytes, i.bytes // 2):
                return split(i.bytes, window)
        return split(i.bytes, [whole or 1] * i.tensors)

    # -- compute

    def _compute(self, i: Instruction) -> None:
        assert self.work is not None
        assert self._activations is not None
        made = sum(grad.bytes for grad in self._made) if i.op is Op.BWD else 0
        if self.work[i.unit].tape is None:
            if i.op is not Op.BWD:
                self._make()
            unit = self._made[0].unit if self._made else i.unit
            self._made.clear()
            for category, n_bytes, _ in self._activations.of(i.op, i.unit, made):
                key = (category, f"{i.unit}()" if category is not Memory.UNSHARDED_GRAD else unit)
                self._allocate(key, [n_bytes]) if n_bytes > 0 else self._free(key, -n_bytes)
            return
        grads: list[int] = []
        if i.op is Op.BWD:
            parts = [n_bytes for tensor, n_bytes in self._tape_moves(i) if tensor == PARAM_GRAD]
            grads = split(made, parts) if made and parts else []
            if made and not parts:
                self._make()
        else:
            self._make()
        whose = (Memory.UNSHARDED_GRAD, self._made[0].unit if self._made else i.unit)
        self._made.clear()
        first = self._first.setdefault(i.unit, -(len(self._first) + 1) * 10_000)
        outgoing = None
        for tensor, n_bytes in self._tape_moves(i):
            if tensor >= 0:
                self.moves.append(Move(first + tensor, n_bytes, now_s=self.now_s))
            elif tensor == PARAM_GRAD and made:
                self._allocate(whose, [grads.pop(0)] if grads else [])
            elif tensor == PARAM_GRAD:  # added to the one that is there
                self._allocate((Memory.TEMPORARY, "sum"), [n_bytes])
                self._free((Memory.TEMPORARY, "sum"), n_bytes)
            elif tensor == OUTGOING:
                outgoing = self._number()
                self.moves.append(Move(outgoing, n_bytes, now_s=self.now_s))
            elif self._gradient is not None:
                self._ended(self._gradient)
                self._gradient = None
        self._gradient = outgoing or self._gradient
        if i.op is Op.FWD and self.work[i.unit].held_bytes:
            self._allocate((Memory.LOGITS, "held"), [self.work[i.unit].held_bytes])
        if i.op is Op.BWD and i.unit == self._activations.drops_logits:
            self._free((Memory.LOGITS, "held"), self._activations.held_bytes)
        if i.op is Op.BWD and (stays := self._activations.stays_of(i.unit)):
            self._allocate((Memory.CHECKPOINT, "staying"), [stays])
        if i.op is Op.BWD and i.unit == self._activations.last:
            self._free((Memory.CHECKPOINT, "staying"), self._activations.staying_bytes)
        handed_on = self._activations.handed_on
        tape = self.work[handed_on].tape if i.op is Op.BWD and i.unit == self._activations.keeper else None
        if tape is not None:
            output = self._first[handed_on] + list(tape.sizes).index("y")
            self.moves.append(Move(output, 0, now_s=self.now_s))

    def _offloaded(self, i: Instruction) -> None:
        """What is left of a segment's forward goes, or comes back."""
        if self.work is None or self._activations is None:
            return
        if self.work[i.unit].tape is None:
            for category, n_bytes, _ in self._activations.offloaded(i.op, i.unit):
                key = (category, f"{i.unit}()")
                self._allocate(key, [n_bytes], i.lane or _COMPUTE) if n_bytes > 0 else self._free(key, -n_bytes)
            return
        left: dict[int, int] = {}
        for tensor, n_bytes in self._tape_moves(i._replace(op=Op.FWD)):
            left[tensor] = n_bytes
        for tensor, n_bytes in left.items():
            if n_bytes:
                size = n_bytes if i.kind is _ALLOC else 0
                self.moves.append(Move(self._first[i.unit] + tensor, size, i.lane or _COMPUTE, self.now_s))

    def _tape_moves(self, i: Instruction) -> Moves:
        assert self.work is not None
        assert self._activations is not None
        work, again = self.work[i.unit], i.unit in self._activations.recomputed
        with_backward = i.unit in self._activations.with_backward
        key = (i.op, id(work), again, with_backward, i.unit == self._activations.handed_on)
        if key not in self._moves_of:
            assert work.tape is not None
            handed_on = i.unit == self._activations.handed_on
            found = lifetimes(work.tape, again, self._activations.policy, with_backward, handed_on)
            self._moves_of[key] = {Op.FWD: found.forward, Op.RECOMPUTE: found.recompute, Op.BWD: found.backward}[i.op]
        return self._moves_of[key]
