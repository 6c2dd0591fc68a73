"""What a program's compute holds in memory: the activations a segment keeps, and what it needs for a moment.

The work of a segment (`fsdp_sim.cost.Work`) says how much; the program says when. What a segment keeps includes its
output, which is the next one's input, so an activation is counted where it was made.

    FWD         saved_bytes stay; beyond them forward_temporary_bytes for a moment
    FWD, to be computed again: the output stays, with those of operators that activation checkpointing keeps
    RECOMPUTE   the rest of saved_bytes comes back, and what was kept and backward does not need goes
    BWD         backward_temporary_bytes and the gradients it makes for a moment; then saved_bytes go and the
                gradients stay
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fsdp_sim.cost import Work, kept_of
from fsdp_sim.schedule import Program, policy_of
from fsdp_sim.timeline import Memory, Op


class ActivationChange(NamedTuple):
    """A change of the bytes alive: ``at_end`` of the operation, or at its start."""

    category: Memory
    bytes: int
    at_end: bool = False


SEGMENT_OPS = frozenset({Op.FWD, Op.BWD, Op.RECOMPUTE})


def first_trained(program: Program) -> tuple[str, str]:
    """The last segment that has no backward, and the first that has one and may keep its output; empty: all have."""
    forwards, back = list(program.segments_of(Op.FWD)), program.segments_of(Op.BWD)
    first = next((n for n, segment in enumerate(forwards) if segment in back), 0)
    return (forwards[first - 1], forwards[first]) if first else ("", "")


def last_backward(program: Program) -> str:
    """The segment whose backward is the last of a micro-batch."""
    return next(reversed(program.segments_of(Op.BWD)), "")


def drops_logits(program: Program) -> str:
    """The segment with whose backward logits go that the loop holds (``Plan.held_logits``)."""
    if program.plan.held_logits == "fp32_in_head":
        return next(iter(program.segments_of(Op.BWD)), "")
    return last_backward(program)


class Staying(NamedTuple):
    """Segments whose input stays, with its gradient, until backward is over; and those that have made such an input."""

    readers: frozenset[str] = frozenset()
    makers: frozenset[str] = frozenset()

    def of(self, segment: str) -> tuple[bool, bool]:
        return segment in self.readers, segment in self.makers


def staying(program: Program) -> Staying:
    """What reentrant checkpointing leaves alive.

    Of a frozen flat parameter FSDP1 keeps a hook on what goes into its module
    (``_register_post_backward_reshard_only_hook``), until ``_finalize_params`` removes it. ``register_multi_grad_hook``
    closes over the nodes of the graph, and of a reentrantly checkpointed block, whose input is a leaf, that is an
    ``AccumulateGrad``: it has the input and the gradient that is gathered there.
    """
    plan = program.plan
    if not plan.use_reentrant:
        return Staying()
    back, again = program.segments_of(Op.BWD), program.segments_of(Op.RECOMPUTE)
    adapted = plan.lora_rank is not None  # what is frozen of a unit is a flat parameter of its own
    readers = frozenset(
        segment
        for unit in program.units
        for segment in unit.names_of_segments
        if segment in again and segment in back and (adapted or not unit.trained_count)
    )
    order = pairwise(program.segments_of(Op.FWD))
    return Staying(readers, frozenset(before for before, of in order if of in readers and before in back))


class ActivationChanges:
    """The changes that each operation of a program's compute makes.

    Args:
        program: whose operations.
        work: what each segment keeps and needs.

    Raises:
        ValueError: a segment of the program has no work.
    """

    def __init__(self, program: Program, work: Mapping[str, Work]) -> None:
        self.policy = policy_of(program.plan)
        self.work = work
        forwards = program.segments_of(Op.FWD)
        if not forwards.keys() <= work.keys():
            first = next(segment for segment in forwards if segment not in work)
            raise ValueError(
                f"the workload says nothing of segment {first!r}, which the program computes; "
                f"it knows {', '.join(list(work)[:5]) or 'none'}"
            )
        self.with_backward, self.recomputed = program.segments_of(Op.BWD), program.segments_of(Op.RECOMPUTE)
        self.handed_on, self.keeper = first_trained(program)
        if self.keeper and self.keeper not in self.recomputed and not work[self.keeper].saves_input:
            self.handed_on = self.keeper = ""
        self.last, self.drops_logits = last_backward(program), drops_logits(program)
        self.staying = staying(program)

    @cached_property
    def held_bytes(self) -> int:
        """Logits that the loop holds."""
        return sum({id(w): w.held_bytes for w in self.work.values()}.values())

    @cached_property
    def staying_bytes(self) -> int:
        """What stays until backward is over, of all segments."""
        return sum(map(self.stays_of, self.staying.readers | self.staying.makers))

    def stays_of(self, segment: str) -> int:
        """What stays when its backward is over: its input, and the gradient of its output."""
        reads, made = self.staying.of(segment)
        return self.work[segment].input_bytes * reads + self.work[segment].output_bytes * made

    def of(self, op: Op, segment: str, made: int = 0) -> tuple[ActivationChange, ...]:
        """The changes of one operation; ``made`` are bytes of whole gradients that a backward makes."""
        if op is Op.BWD:
            changes = self._backward(segment, made)
        else:
            changes = self._forward(segment) if op is Op.FWD else self._recompute(segment)
        return tuple(change for change in changes if change.bytes)

    def offloaded(self, op: Op, segment: str) -> tuple[ActivationChange, ...]:
        """What a segment keeps goes, as it has been copied to the CPU, or comes back (``ALLOC``)."""
        work, sign = self.work[segment], 1 if op is Op.ALLOC else -1
        if segment in self.recomputed:
            found: Iterable[ActivationChange] = [
                ActivationChange(Memory.CHECKPOINT, work.kept_bytes(True, self.policy))
            ]
        else:
            found = self._saved(work, 0)
        return tuple(ActivationChange(category, sign * n_bytes) for category, n_bytes, _ in found if n_bytes)

    def _forward(self, segment: str) -> Iterable[ActivationChange]:
        work = self.work[segment]
        moment = work.forward_temporary_bytes
        if segment in self.recomputed:
            kept = kept_of(work.outputs, self.policy)
            yield ActivationChange(Memory.CHECKPOINT, work.output_bytes + kept.bytes)
            moment += max(0, work.saved_bytes - work.output_bytes - kept.bytes)
        elif segment in self.with_backward:
            yield from self._saved(work, 0)
        else:  # nothing is kept, but its output lives until it is read; as good as an addition to what is in flight
            moment += work.saved_bytes
            if segment == self.handed_on:
                yield ActivationChange(Memory.ACTIVATION, work.output_bytes)
                moment -= work.output_bytes
        yield from for_a_moment(_moment(work), moment)
        yield ActivationChange(Memory.LOGITS, work.held_bytes, at_end=True)

    def _recompute(self, segment: str) -> Iterable[ActivationChange]:
        work = self.work[segment]
        kept = kept_of(work.outputs, self.policy)
        yield from self._saved(work, work.output_bytes + kept.saved_bytes)
        yield from for_a_moment(_moment(work), work.forward_temporary_bytes)
        yield ActivationChange(Memory.CHECKPOINT, kept.saved_bytes - kept.bytes, at_end=True)

    def _backward(self, segment: str, made: int) -> Iterable[ActivationChange]:
        """Whole gradients come as saved activations go, so that their peak is one; backward_temporary_bytes is of both.

        The gradient of the input takes the place of the input, which the segment before counts.
        """
        work = self.work[segment]
        most = max(0, work.backward_temporary_bytes + made)
        there = min(made, most)
        yield ActivationChange(Memory.UNSHARDED_GRAD, there)
        yield from for_a_moment(_moment(work), most - there)
        again = segment in self.recomputed
        kept = (work.output_bytes + kept_of(work.outputs, self.policy).saved_bytes) * again
        for change in self._saved(work, kept):
            yield ActivationChange(change.category, -change.bytes, at_end=True)
        yield ActivationChange(Memory.CHECKPOINT, -kept, at_end=True)
        if segment == self.keeper:
            yield ActivationChange(Memory.ACTIVATION, -self.work[self.handed_on].output_bytes, at_end=True)
        yield ActivationChange(Memory.UNSHARDED_GRAD, made - there, at_end=True)
        yield ActivationChange(Memory.CHECKPOINT, self.stays_of(segment), at_end=True)
        if segment == self.drops_logits:
            yield ActivationChange(Memory.LOGITS, -self.held_bytes, at_end=True)
        if segment == self.last:
            yield ActivationChange(Memory.CHECKPOINT, -self.staying_bytes, at_end=True)

    @staticmethod
    def _saved(work: Work, kept: int) -> Iterable[ActivationChange]:
        """What a segment keeps beyond ``kept``."""
        yield ActivationChange(Memory.LOGITS, work.logits_bytes)
        yield ActivationChange(Memory.ACTIVATION, max(0, work.saved_bytes - work.logits_bytes - kept))


def _moment(work: Work) -> Memory:
    """The head's temporaries are logits and their gradients."""
    return Memory.LOGITS if work.logits_bytes else Memory.TEMPORARY


def for_a_moment(category: Memory, n_bytes: int) -> Iterable[ActivationChange]:
    """Alive while an operation runs."""
    yield ActivationChange(category, n_bytes)
    yield ActivationChange(category, -n_bytes, at_end=True)
