"""A tape: a segment's forward, operation by operation, and what autograd keeps alive when it runs."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Activations(NamedTuple):
    """Bytes of one segment for one micro-batch on one rank; the names are those of `fsdp_sim.cost.Work`.

    Attributes:
        saved_bytes: kept from this segment's forward to its backward, its output included, its input not.
        input_bytes: its input, the output of the segment before.
        output_bytes: its output.
        forward_temporary_bytes: the most alive during forward, less what is kept at its end.
        backward_temporary_bytes: the most alive during backward, less ``saved_bytes`` and the whole gradients of the
            segment's parameters. The gradient of the output, which comes in, takes the place of the output, which
            is gone by then. Below 0 where gradients of parameters take the place of activations that are gone.
        selective_bytes: what selective checkpointing keeps: outputs of attention and of every other matmul.
        logits_bytes: of ``saved_bytes``, what the loss keeps.
        saves_input: its input is kept for its backward.
        tape: tensor by tensor.
    """

    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    selective_bytes: int = 0
    logits_bytes: int = 0
    saves_input: bool = True
    tape: Tape | None = None


class Step(NamedTuple):
    """One operation of a forward: names of tensors.

    Attributes:
        reads: what it differentiates with respect to.
        writes: its outputs.
        saves: what autograd keeps for its backward.
        alias: the gradients of what it reads are the gradient of its output, not new tensors (an addition).
        kind: ``matmul`` and ``attention`` are what selective checkpointing looks at.
        scratch: bytes its backward needs for a moment beside its results.
        param_bytes: of the whole gradients its backward makes.
        holds: what is alive until it has run, beside what it reads: an operator's own variables.
        trains: it has parameters that are trained.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    saves: tuple[str, ...] = ()
    alias: bool = False
    kind: str = ""
    scratch: int = 0
    param_bytes: int = 0
    holds: tuple[str, ...] = ()
    trains: bool = False


class Tape(NamedTuple):
    """The forward of a segment; the first step reads ``x``, the last writes ``y``.

    Attributes:
        sizes: bytes of each tensor.
        logits: tensors that count as logits and loss.
        held: tensors that a variable of the program holds until the end of the forward.
        keeps_output: the segment after this one saves what it is given, as all do but norms that make an fp32 copy.
        input_grad: its input needs a gradient: something that is trained comes before it.
    """

    sizes: dict[str, int]
    steps: list[Step]
    logits: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    keeps_output: bool = True
    input_grad: bool = True

    @property
    def needs_grad(self) -> set[str]:
        """The tensors that need a gradient, as autograd follows it: what comes of one that does, or is trained."""
        needs = {"x", "encoded"} if self.input_grad else set()
        for step in self.steps:
            if step.trains or not needs.isdisjoint(step.reads):
                needs.update(step.writes)
        return needs


def walk(tape: Tape) -> Activations:
    """Run a tape forward and backward as autograd does, counting the bytes that are alive."""
    sizes, needs = tape.sizes, tape.needs_grad
    steps = [s if not needs.isdisjoint(s.writes) else s._replace(saves=()) for s in tape.steps]
    outside = {"x", "encoded"}  # they belong to the segments that made them
    keepers = Counter(name for step in steps for name in set(step.saves))
    last_read = {name: i for i, step in enumerate(steps) for name in (*step.reads, *step.holds)}
    kept = sum(sizes[name] for name in ({*keepers, "y"} if tape.keeps_output else {*keepers}) - outside)

    alive: set[str] = set()
    highest = 0
    for i, step in enumerate(steps):
        alive |= {*step.writes, *step.saves} - outside
        highest = max(highest, sum(sizes[name] for name in alive))
        ended = {name for name in (*step.reads, *step.holds) if last_read[name] == i and not keepers[name]}
        alive -= ended - tape.held
    forward = highest - kept

    grads: dict[str, int] = {"y": sizes["y"]} if "y" in needs else {}
    saved = {name for name in keepers if name not in outside}
    highest = params = 0
    for step in reversed(steps):
        whole = sum(grads.get(name, 0) for name in step.writes)
        if needs.isdisjoint(step.writes):
            continue
        made = {} if step.alias else {name: sizes[name] for name in step.reads if name in needs}
        params += step.param_bytes
        now = sum(sizes[name] for name in saved) + sum(grads.values()) + params
        highest = max(highest, now + sum(made.values()) + step.scratch)
        for name in step.writes:
            grads.pop(name, None)
        if step.alias:
            made = dict.fromkeys([name for name in step.reads if name in needs], 0)
            made[next(iter(made))] = whole
        for name, size in made.items():
            grads[name] = max(size, grads.get(name, 0))  # a second gradient is added to the first in place
        for name in step.saves:
            keepers[name] -= 1
            if not keepers[name]:
                saved.discard(name)
    backward = highest - kept - params
    saves_input = any("x" in step.saves for step in steps)

    return Activations(
        saved_bytes=kept,
        input_bytes=sizes["x"],
        output_bytes=sizes["y"],
        forward_temporary_bytes=forward,
        backward_temporary_bytes=backward,
        selective_bytes=sum(sizes[name] for name in selected(tape)),
        logits_bytes=sum(sizes[name] for name in tape.logits),
        saves_input=saves_input,
        tape=tape,
    )


def selected(tape: Tape) -> set[str]:
    """What selective checkpointing keeps: outputs of attention (with its row sums) and of every other matmul."""
    kept: set[str] = set()
    matmuls = 0
    for step in tape.steps:
        if step.kind == "matmul":
            matmuls += 1
            kept |= set(step.writes) if matmuls % 2 else set()
        elif step.kind == "attention":
            kept |= {*step.writes, *step.saves} - set(step.reads)
    return kept
