"""`sentence`: what an event is, and why it comes now, in the voice of a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_sim.timeline import COLLECTIVES, Event, Memory, Op, Phase
from fsdp_sim.viz import theme
from fsdp_sim.viz.debugger.moments import Moment, is_compute
from fsdp_sim.words import human_bytes, human_ms

WHAT: dict[Op, str] = {
    Op.FWD: "The forward of {unit} computes with its whole parameters.",
    Op.BWD: "The backward of {unit} computes: autograd needs the whole parameters again, and leaves whole gradients.",
    Op.RECOMPUTE: "The forward of {unit} runs again: checkpointing kept its input only, and backward needs the rest.",
    Op.OPTIM: "The optimizer updates the shards this rank owns, and nothing else: no rank touches another's rows.",
    Op.H2D: "The shards of {unit} come from the CPU, where offloading keeps them between uses.",
    Op.AG_CAST: "The shards of {unit} are cast to the dtype that computes, so fewer bytes travel.",
    Op.AG_COPY_IN: "This rank copies its shard of {unit} into its own place in the flat all-gather buffer.",
    Op.ALL_GATHER: "The all-gather of {unit} ({bytes}{ranks}): each rank sends its shard to all others, and all end up "
    "with the whole unit.",
    Op.AG_COPY_OUT: "The gathered pieces of {unit} are copied side by side into whole parameters, ready to compute "
    "with.",
    Op.CLONE: "Of {unit} a slice is kept between forward and backward, so that backward gathers from fewer ranks.",
    Op.UPCAST: "The whole gradients of {unit} are kept without being reduced, in the dtype of the reduction.",
    Op.RS_COPY_IN: "The whole gradients of {unit} are cut into one piece per rank and laid into one flat buffer.",
    Op.RS_COPY: "With one rank there is nobody to reduce with: the gradients of {unit} are copied.",
    Op.DIV: "The gradients of {unit} are divided, so that the sum over the ranks becomes a mean.",
    Op.REDUCE_SCATTER: "The reduce-scatter of {unit} ({bytes}{ranks}): the ranks' gradients are averaged, and each "
    "rank receives the mean of its own rows only.",
    Op.GRAD_CAST: "The reduced gradients of {unit} are cast to the dtype of the shards.",
    Op.ACCUMULATE: "The gradients of {unit} are added to those of an earlier micro-batch.",
    Op.NORM: "Norms of this rank's shards: of gradients before they are clipped, of weights before their cast to fp8.",
    Op.CLIP: "The gradients are scaled down, so that the norm of all of them together is at most the one allowed.",
    Op.ACT_D2H: "What the backward of {unit} will need goes to the CPU's memory.",
    Op.ACT_H2D: "What backward needs of {unit} comes back from the CPU's memory.",
    Op.D2H: "The reduced gradients of {unit} go to the CPU, where offloading keeps the shards.",
    Op.ALL_REDUCE: "The all-reduce of {unit} ({bytes}{ranks}): every rank ends up with the same reduced values.",
    Op.ALL_TO_ALL: "The all-to-all of {unit} ({bytes}{ranks}): tokens go to the ranks of their experts, or back.",
    Op.BROADCAST: "A broadcast ({bytes}{ranks}): one rank's values replace those of all others.",
    Op.BARRIER: "A barrier: no rank goes on before all have come here.",
    Op.SEND: "{bytes} are sent to one other rank.",
    Op.RECV: "{bytes} are received from one other rank.",
    Op.OTHER: "An operation the record has no name for.",
}
ALLOC: dict[Memory, str] = {
    Memory.SHARDED: "This rank's shard of {unit}, {bytes}: the part of the parameters it keeps all the time.",
    Memory.OPTIMIZER: "The optimizer's state, {bytes}: made by its first step, and kept.",
    Memory.RS_OUTPUT: "{bytes} for this rank's share of the reduced gradients of {unit}; alive until zero_grad.",
    Memory.UNSHARDED: "{bytes} for whole parameters of {unit}.",
    Memory.AG_OUTPUT: "A flat buffer of {bytes} for the all-gather of {unit}, with a place for every rank's shard.",
    Memory.UNSHARDED_GRAD: "{bytes} for whole gradients of {unit}, which autograd writes: as large as the parameters.",
    Memory.RS_INPUT: "A flat buffer of {bytes} for the reduce-scatter of {unit}, with a piece for every rank.",
    Memory.ACTIVATION: "{bytes} of activations of {unit}: what its forward saves for its backward.",
    Memory.CHECKPOINT: "{bytes}: the input of {unit}, all that checkpointing keeps for backward.",
    Memory.LOGITS: "{bytes} for the logits and the loss, often the largest tensor of the step.",
    Memory.TEMPORARY: "{bytes} that {unit} needs while it computes.",
    Memory.NONE: "{bytes} are allocated for {unit}.",
}
FREE: dict[Memory, str] = {
    Memory.SHARDED: "The slice of {unit} that was kept since forward goes ({bytes}).",
    Memory.OPTIMIZER: "Optimizer state goes ({bytes}).",
    Memory.RS_OUTPUT: "The reduced gradients of {unit} go ({bytes}): whoever held them last has let go.",
    Memory.UNSHARDED: "Whole parameters of {unit} are freed ({bytes}): the unit is done with them for now, and the "
    "shards it keeps are enough to gather them again.",
    Memory.AG_OUTPUT: "The flat all-gather buffer of {unit} goes ({bytes}): all of it has been copied out.",
    Memory.UNSHARDED_GRAD: "Whole gradients of {unit} go ({bytes}).",
    Memory.RS_INPUT: "The flat reduce-scatter buffer of {unit} goes ({bytes}): the network has read it.",
    Memory.ACTIVATION: "Activations of {unit} go ({bytes}): backward has used them.",
    Memory.CHECKPOINT: "The kept input of {unit} goes ({bytes}): it has been computed again from it.",
    Memory.LOGITS: "The logits and the loss go ({bytes}): their gradients are known.",
    Memory.TEMPORARY: "Temporaries of {unit} go ({bytes}): the operation is over.",
    Memory.NONE: "{bytes} of {unit} are freed.",
}


def sentence(at: Moment) -> str:
    """What the event of a moment is, and why it comes now. Plain text."""
    event = at.event
    of_memory = FREE if event.op is Op.FREE else ALLOC
    what = of_memory[event.category] if event.is_memory else WHAT[event.op]
    for special in SPECIAL:
        if (special.op, special.category) == (event.op, event.category) and special.when(at):
            what = special.text
            break
    ranks = f" over {event.group_size} ranks" if event.group_size > 1 else ""
    happens = what.format(unit=event.unit or "all units", bytes=human_bytes(event.bytes), ranks=ranks)
    reason = next((text for why in WHY if (text := why(at))), "")
    return f"{happens} {reason}".strip()


def name(event: Event) -> str:
    """What a reader calls an event: ``forward of layers.0``, ``frees unsharded parameters of layers.0``."""
    of = f" of {event.unit}" if event.unit else ""
    if event.is_memory:
        verb = "alloc" if event.op is Op.ALLOC else "free"
        return f"{verb} {theme.MEMORY[event.category].name}{of}"
    return f"{theme.OP_NAMES[event.op]}{of}"


def _is_sharded(at: Moment) -> bool:
    return any(e.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) for e in at.events)


def _gathers_parameters(at: Moment) -> bool:
    """Not so in DDP and ZeRO-1 and 2, where every rank keeps all parameters."""
    return any(e.category is Memory.UNSHARDED for e in at.events)


def _is_slice(at: Moment) -> bool:
    """Shards are allocated once, before the first forward; later it is a slice of a unit between its passes."""
    earlier = (e for e in at.events[: at.position] if e.op is Op.ALLOC and e.category is Memory.SHARDED)
    return at.event.phase is Phase.FORWARD and any(e.unit == at.event.unit for e in earlier)


def _is_kept(at: Moment) -> bool:
    """Allocated before the first step."""
    return at.event.phase is Phase.NONE


def _next_of(at: Moment, *ops: Op) -> Op | None:
    """The next of some operations for the unit."""
    later = at.events[at.position + 1 :]
    return next((e.op for e in later if e.unit == at.event.unit and e.op in ops), None)


def _was_copied_in(at: Moment) -> bool:
    """Whether the unit's last operation was the copy-in of its gradients, or the collective that follows it."""
    before = reversed(at.events[: at.position])
    last = next((e.op for e in before if e.unit == at.event.unit and not e.is_memory), None)
    return last in (Op.RS_COPY_IN, Op.REDUCE_SCATTER)


@dataclass(frozen=True)
class Special:
    """What is said instead, where the record shows that more can be said, or less."""

    op: Op
    category: Memory
    when: Callable[[Moment], bool]
    text: str


SPECIAL = (
    Special(
        Op.OPTIM, Memory.NONE, lambda at: not _is_sharded(at),
        "The optimizer updates the parameters with their gradients.",
    ),
    Special(
        Op.RS_COPY_IN, Memory.NONE, lambda at: _next_of(at, Op.REDUCE_SCATTER, Op.ALL_REDUCE) is Op.ALL_REDUCE,
        "The gradients of {unit} are copied into one flat buffer, so that one collective reduces them all.",
    ),
    Special(
        Op.ALLOC, Memory.SHARDED, lambda at: not _gathers_parameters(at),
        "The parameters of {unit}, {bytes}, kept all the time.",
    ),
    Special(Op.ALLOC, Memory.SHARDED, _is_slice, "A slice of {unit}, {bytes}, is kept until backward."),
    Special(
        Op.ALLOC, Memory.OPTIMIZER, _is_sharded,
        "The optimizer's state, {bytes}: made by the first step, for this rank's rows only, and kept.",
    ),
    Special(
        Op.ALLOC, Memory.UNSHARDED, lambda at: _next_of(at, Op.ALL_GATHER, Op.AG_COPY_OUT) is Op.AG_COPY_OUT,
        "{bytes} for whole parameters of {unit}; the copy-out fills them next.",
    ),
    Special(
        Op.ALLOC, Memory.UNSHARDED, lambda at: _next_of(at, Op.ALL_GATHER, Op.AG_COPY_OUT) is Op.ALL_GATHER,
        "{bytes} for whole parameters of {unit}; the all-gather writes into them.",
    ),
    Special(Op.ALLOC, Memory.UNSHARDED_GRAD, _is_kept, "{bytes} for the gradients of {unit}, kept all the time."),
    Special(
        Op.FREE, Memory.UNSHARDED_GRAD, _was_copied_in,
        "Whole gradients of {unit} go ({bytes}): they are in the flat buffer now.",
    ),
)  # fmt: skip


def _peak(at: Moment) -> str:
    if at.change > 0 and at.live_bytes == at.top_bytes and at.peak_bytes == at.top_bytes:
        return f"With it memory is at its peak: {human_bytes(at.top_bytes)}."
    return ""


def _hidden(at: Moment) -> str:
    """For a collective: whether compute hid it, and whose."""
    event = at.event
    if event.op not in COLLECTIVES or event.duration_s <= 0:
        return ""
    share, lasts = at.hidden_s / event.duration_s, human_ms(event.duration_s)
    busy = [e for e in at.events if is_compute(e) and e.start_s < event.end_s and e.end_s > event.start_s]
    beside = name(max(busy, key=lambda e: min(e.end_s, event.end_s) - max(e.start_s, event.start_s))) if busy else ""
    if share > 0.95 and beside:
        ahead = "It is issued ahead of its need: the" if event.op is Op.ALL_GATHER else "The"
        return f"{ahead} {beside} computes meanwhile and hides its {lasts}."
    if share > 0.05 and beside:
        hidden = human_ms(at.hidden_s)
        return f"It lasts {lasts}; the {beside} hides {hidden} of it, the rest is exposed."
    return f"Nothing computes meanwhile: all of its {lasts} are exposed."


def _held_up(at: Moment) -> str:
    before, event = at.held_up_by, at.event
    if before is None or at.lag_s < 0.05 * event.duration_s:
        return ""
    return f"The CPU issued it {human_ms(at.lag_s)} before it could run: the {name(before)} had to be over first."


def _waited(at: Moment) -> str:
    """Copies wait where a buffer must be free first, which is the rule that bounds memory."""
    event = at.event
    if event.op is Op.RS_COPY_IN and (before := [e for e in at.waits_on if e.op is Op.REDUCE_SCATTER]):
        return (
            f"It had to wait for the reduce-scatter of {before[-1].unit}, so that not too many of these buffers "
            f"exist at once."
        )
    if event.op is Op.AG_COPY_IN and (before := [e for e in at.waits_on if e.op is Op.AG_COPY_OUT]):
        return f"Not before the copy-out of {before[-1].unit}: its flat buffer can be used again only then."
    if event.op is Op.OPTIM and (before := [e for e in at.waits_on if e.op in COLLECTIVES]):
        return f"It needs all gradients, so it waits for the last of them: the {name(before[-1])}."
    return ""


def _next(at: Moment) -> str:
    """For a whole-parameter event before a unit's compute: what it makes possible."""
    if at.event.op is not Op.AG_COPY_OUT:
        return ""
    user = next((e for e in at.waited_by if is_compute(e)), None)
    return f"The {name(user)} can start now." if user else ""


WHY: tuple[Callable[[Moment], str], ...] = (_peak, _hidden, _waited, _next, _held_up)
"""Reasons, the most telling first; the first that applies is said."""
