"""When each tensor of a segment is allocated and freed: what `tape.walk` counts, one by one, for an allocator."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_sim.cost.tape import Tape, selected
from fsdp_sim.schedule import Policy

OUTSIDE = {"x", "encoded"}  # they belong to the segments that made them
INCOMING, OUTGOING, PARAM_GRAD = -1, -2, -3

Moves = tuple[tuple[int, int], ...]
"""(which tensor, its bytes) where it is allocated, (which tensor, 0) where it is freed.

Tensors of the forward and gradients have numbers from 0. ``INCOMING`` is the gradient of the segment's output, which
the segment after it has made; ``OUTGOING`` that of its input; ``PARAM_GRAD`` the whole gradients of parameters, which
FSDP frees.
"""


class Lifetimes(NamedTuple):
    """The moves of a segment's passes.

    Attributes:
        forward: its forward, which leaves what backward needs; of a checkpointed segment what is kept of it.
        recompute: makes the rest again.
        backward: frees all of it.
    """

    forward: Moves
    recompute: Moves
    backward: Moves


def lifetimes(
    tape: Tape, checkpointed: bool, policy: Policy, with_backward: bool = True, handed_on: bool = False
) -> Lifetimes:
    """Of one segment.

    Args:
        checkpointed: its backward computes its forward again.
        policy: which outputs are then kept.
        with_backward: there is one; else nothing is kept but,
        handed_on: its output, for the backward of the segment after it.
    """
    needs = tape.needs_grad
    tape = tape._replace(steps=[s if needs.intersection(s.writes) else s._replace(saves=()) for s in tape.steps])
    number = {name: n for n, name in enumerate(tape.sizes)}
    saved = {name for step in tape.steps for name in step.saves} - OUTSIDE
    output = {"y"} if tape.keeps_output else set()
    if not with_backward:
        return Lifetimes(_forward(tape, number, {"y"} if handed_on else set(), set()), (), ())
    if not checkpointed:
        kept = saved | output
        return Lifetimes(_forward(tape, number, kept, set()), (), _backward(tape, number, kept))
    kept = {"y"} | selected(tape, policy)
    again = _forward(tape, number, saved | {"y"}, kept)
    return Lifetimes(_forward(tape, number, kept, set()), again, _backward(tape, number, saved | {"y"}))


def _forward(tape: Tape, number: dict[str, int], kept: set[str], there: set[str]) -> Moves:
    """Tensors live until their last reader has run; those that are kept stay, those that are there are not made."""
    sizes, steps = tape.sizes, tape.steps
    last_read = {name: i for i, step in enumerate(steps) for name in (*step.reads, *step.holds)}
    alive = dict.fromkeys(name for name in number if name in there and sizes[name])
    moves: list[tuple[int, int]] = []
    for i, step in enumerate(steps):
        for name in (*step.writes, *step.saves):
            if sizes[name] and name not in alive and name not in OUTSIDE and name not in there:
                alive[name] = None
                moves.append((number[name], sizes[name]))
        for name in list(alive):
            if name not in kept and name not in tape.held and last_read.get(name, i) <= i:
                del alive[name]
                moves.append((number[name], 0))
    moves += [(number[name], 0) for name in alive if name not in kept]
    return tuple(moves)


def _backward(tape: Tape, number: dict[str, int], kept: set[str]) -> Moves:
    """Gradients of what a step read are made, then those of what it wrote go, and what its backward needed."""
    sizes, needs = tape.sizes, tape.needs_grad
    first_saved: dict[str, int] = {}
    for i, step in enumerate(tape.steps):
        for name in step.saves:
            first_saved.setdefault(name, i)
    fresh = iter(range(len(number), 10**9))
    grads: dict[str, int] = {"y": INCOMING} if "y" in needs else {}
    moves: list[tuple[int, int]] = []
    left = dict.fromkeys(name for name in kept if sizes[name])
    for name in [name for name in left if name not in first_saved]:  # the output, which the segment after it has freed
        del left[name]
        moves.append((number[name], 0))

    def make(n_bytes: int, which: int | None = None) -> int:
        which = next(fresh) if which is None else which
        moves.append((which, n_bytes))
        return which

    for i in reversed(range(len(tape.steps))):
        step = tape.steps[i]
        if needs.isdisjoint(step.writes):
            continue
        reads = [name for name in step.reads if name in needs]
        moments = [make(step.scratch)] if step.scratch else []
        if step.param_bytes:
            make(step.param_bytes, PARAM_GRAD)
        whole = [grads.pop(name) for name in step.writes if name in grads]
        if step.alias:  # the gradient of what it read is that of what it wrote
            for name in reads[:1]:
                if name in grads:
                    moments += whole
                elif whole:
                    grads[name], whole = whole[0], whole[1:]
        else:
            for name in filter(sizes.get, reads):
                gradient = make(sizes[name])
                if name in grads:  # a second one is added to the first in place
                    moments.append(gradient)
                else:
                    grads[name] = gradient
            moments += whole
        moves += [(which, 0) for which in moments]
        for name in [name for name in step.saves if name in left and first_saved[name] == i]:
            del left[name]
            moves.append((number[name], 0))
    outgoing = grads.pop("x", None)
    moves += [(which, 0) for which in grads.values()]
    moves += [(number[name], 0) for name in left]
    return tuple((OUTGOING if which == outgoing else which, n_bytes) for which, n_bytes in moves)
