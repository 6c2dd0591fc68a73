"""A tape: a segment's forward, operation by operation, and what autograd keeps alive when it runs."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fsdp_sim.schedule import SDPA, Policy


class Output(NamedTuple):
    """What one operator puts out.

    Attributes:
        op: its name (`fsdp_sim.spec.OPERATORS`).
        bytes: of all its outputs that it makes.
        saved_bytes: of these, what backward needs.
        needed: backward needs it, or what is computed again for backward.
    """

    op: str
    bytes: int
    saved_bytes: int
    needed: bool = True


def kept_of(outputs: tuple[Output, ...], policy: Policy) -> Output:
    """Of the outputs of a block's operators, in order, those that a policy keeps, together."""
    keeps = policy.keeps()
    kept = [output for output in outputs if keeps(output.op) and (output.needed or not policy.compiled)]
    return Output("", sum(output.bytes for output in kept), sum(output.saved_bytes for output in kept))


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
        outputs: of the operators that activation checkpointing may keep.
        logits_bytes: of ``saved_bytes``, what the loss keeps.
        saves_input: its input is kept for its backward.
        tape: tensor by tensor.
    """

    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    outputs: tuple[Output, ...] = ()
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
        op: its name, where activation checkpointing may keep its outputs.
        scratch: bytes its backward needs for a moment beside its results.
        param_bytes: of the whole gradients its backward makes.
        holds: what is alive until it has run, beside what it reads: an operator's own variables.
        trains: it has parameters that are trained.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    saves: tuple[str, ...] = ()
    alias: bool = False
    op: str = ""
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
        parts: where it is computed in several segments, what their names end with and the step at which each begins.
    """

    sizes: dict[str, int]
    steps: list[Step]
    logits: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    keeps_output: bool = True
    input_grad: bool = True
    parts: tuple[tuple[str, int], ...] = ()

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
    (found,) = _walk(tape, [len(tape.steps)])
    return found._replace(tape=tape)


def walk_parts(tape: Tape) -> dict[str, Activations]:
    """The same of a tape that is computed in several segments, by what their names end with.

    What a part keeps is what is alive at its end and was not before it; its output is what of that a later part reads.
    """
    ends = [*(begin for _, begin in tape.parts[1:]), len(tape.steps)]
    return dict(zip((of for of, _ in tape.parts), _walk(tape, ends), strict=True))


def _walk(tape: Tape, ends: list[int]) -> list[Activations]:
    """Of the parts of a tape that end before these steps."""
    sizes, needs = tape.sizes, tape.needs_grad
    steps = [s if not needs.isdisjoint(s.writes) else s._replace(saves=()) for s in tape.steps]
    outside = {"x", "encoded"}  # they belong to the segments that made them
    keepers = Counter(name for step in steps for name in set(step.saves))
    last_read = {name: i for i, step in enumerate(steps) for name in (*step.reads, *step.holds)}
    kept_at_end = ({*keepers, "y"} if tape.keeps_output else {*keepers}) - outside
    begins = [0, *ends[:-1]]

    alive: set[str] = set()
    alive_bytes = 0  # of these; counted as they come and go, for a tape may have thousands of steps
    kept: list[int] = []  # after each part
    forward: list[int] = []
    outputs: list[int] = []
    for begin, end in zip(begins, ends, strict=True):
        highest, made = 0, set[str]()
        for i in range(begin, end):
            step = steps[i]
            new = {*step.writes, *step.saves} - outside - alive
            alive |= new
            alive_bytes += sum([sizes[name] for name in new])
            made |= {*step.writes}
            highest = max(highest, alive_bytes)
            ended = {name for name in (*step.reads, *step.holds) if last_read[name] == i and not keepers[name]}
            ended = (ended - tape.held) & alive
            alive -= ended
            alive_bytes -= sum([sizes[name] for name in ended])
        last = end == len(steps)
        kept.append(sum(sizes[name] for name in kept_at_end) if last else alive_bytes)
        forward.append(highest - kept[-1])
        outputs.append(sizes["y"] if last else sum(sizes[name] for name in made if last_read.get(name, 0) >= end))

    grads: dict[str, int] = {"y": sizes["y"]} if "y" in needs else {}
    saved = {name for name in keepers if name not in outside}
    saved_bytes, grad_bytes = sum(sizes[name] for name in saved), sum(grads.values())
    backward: list[int] = []
    for part in reversed(range(len(ends))):
        highest = params = 0
        for step in reversed(steps[begins[part] : ends[part]]):
            whole = sum(grads.get(name, 0) for name in step.writes)
            if needs.isdisjoint(step.writes):
                continue
            made_grads = {} if step.alias else {name: sizes[name] for name in step.reads if name in needs}
            params += step.param_bytes
            now = saved_bytes + grad_bytes + params
            highest = max(highest, now + sum(made_grads.values()) + step.scratch)
            for name in step.writes:
                grad_bytes -= grads.pop(name, 0)
            if step.alias:
                made_grads = dict.fromkeys([name for name in step.reads if name in needs], 0)
                made_grads[next(iter(made_grads))] = whole
            for name, size in made_grads.items():
                of = max(size, grads.get(name, 0))  # a second gradient is added to the first in place
                grad_bytes += of - grads.get(name, 0)
                grads[name] = of
            for name in step.saves:
                keepers[name] -= 1
                if not keepers[name] and name in saved:
                    saved.remove(name)
                    saved_bytes -= sizes[name]
        backward.insert(0, highest - kept[part] - params)

    one = len(ends) == 1
    return [
        Activations(
            saved_bytes=kept[part] - (kept[part - 1] if part else 0),
            input_bytes=outputs[part - 1] if part else sizes["x"],
            output_bytes=outputs[part],
            forward_temporary_bytes=forward[part],
            backward_temporary_bytes=backward[part],
            outputs=_outputs(tape, set(keepers)) if one else (),
            logits_bytes=sum(sizes[name] for name in tape.logits) if one else 0,
            saves_input=any("x" in step.saves for step in steps[begins[part] : ends[part]]) or part > 0,
        )
        for part in range(len(ends))
    ]


def made_by(step: Step) -> set[str]:
    """What an operator puts out: attention with one number for each row and head, which it saves."""
    return {*step.writes, *step.saves} - set(step.reads) if step.op == SDPA else {*step.writes}


def selected(tape: Tape, policy: Policy) -> set[str]:
    """The tensors that a policy keeps."""
    keeps = policy.keeps()
    kept = {name for step in tape.steps if keeps(step.op) for name in made_by(step)}
    return kept & _needed(tape) if policy.compiled else kept


def _needed(tape: Tape) -> set[str]:
    """What backward needs, and what is computed again for it reads."""
    needed = {name for step in tape.steps for name in step.saves}
    for step in reversed(tape.steps):
        if not needed.isdisjoint({*step.writes, *step.saves} - {*step.reads, "y"}):
            needed.update(step.reads)
    return needed


def _outputs(tape: Tape, saved: set[str]) -> tuple[Output, ...]:
    made = [(step.op, made_by(step)) for step in tape.steps if step.op]
    sizes, needed = tape.sizes, _needed(tape)
    return tuple(
        Output(
            op, sum(sizes[name] for name in names), sum(sizes[name] for name in names & saved),
            not needed.isdisjoint(names),
        )
        for op, names in made
    )  # fmt: skip
