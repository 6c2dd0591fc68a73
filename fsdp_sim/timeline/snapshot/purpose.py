"""What a block of memory is for: from the calls that allocated it, and from those that freed it.

FSDP's and DDP's buffers are known by the function that allocates them. Of the rest autograd and the model share, what
tells them apart is when they go:

    allocated in        freed in                         is
    forward             forward                          temporary
    forward             backward                         activation; of a checkpointed block: checkpoint
    backward, again     backward                         activation
    backward            where gradients are reduced      unsharded gradient
    backward            later, or never                  unsharded gradient
    backward            backward                         temporary
    optimizer step      optimizer step, or not           temporary, or optimizer state

[Note: other names than the simulator's]  Of the bytes that compute holds for a moment, three have another name than in
`fsdp_sim.engine.memory`. So compare the categories of `FOR_COMPUTE` together; the sum is the same.

    the gradient of a block's input    a temporary; there it takes the place of the input, an activation
    the logits                         a temporary, unless the loss makes or keeps them; there logits
    pieces of FSDP1's flat gradient    temporaries, until autograd puts them together; there unsharded gradients

Two sums are higher than predicted, by a few percent: DDP with a tied head, whose gradient autograd keeps until it has
that of the embedding; and the micro-batches that accumulate, whose new gradients are there until they are added.

Sources, torch 2.13: ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` (foreach_all_gather,
foreach_all_gather_copy_out, foreach_reduce) and ``_fsdp_param.py``; ``torch/distributed/fsdp/_flat_param.py`` and
``_runtime_utils.py`` (FSDP1); ``torch/nn/parallel/distributed.py`` (DDP, whose reducer makes its buckets).
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.timeline.kinds import Memory, Phase
from fsdp_sim.timeline.snapshot.blocks import Block, Frame

FOR_COMPUTE = (Memory.ACTIVATION, Memory.CHECKPOINT, Memory.LOGITS, Memory.TEMPORARY, Memory.UNSHARDED_GRAD)
"""What the model and autograd allocate, see [Note: other names than the simulator's]."""

PARALLEL = ("/torch/distributed/fsdp/", "/torch/nn/parallel/distributed.py", "/fsdp_sim/mini/")
"""Where the functions of `ALLOCATES` and `REDUCES` are."""

ALLOCATES = {
    # FSDP2 and the mini-FSDP
    "_get_param_all_gather_inputs": Memory.TEMPORARY,
    "all_gather_inputs": Memory.TEMPORARY,
    "foreach_all_gather": Memory.AG_OUTPUT,
    "foreach_all_gather_copy_out": Memory.UNSHARDED,
    "to_sharded_post_forward": Memory.SHARDED,
    "to_accumulated_grad_if_needed": Memory.UNSHARDED_GRAD,
    "keep_in_reduce_dtype": Memory.UNSHARDED_GRAD,
    "foreach_reduce": Memory.RS_OUTPUT,
    "foreach_reduce_scatter": Memory.RS_OUTPUT,
    # FSDP1
    "_use_low_precision_shard": Memory.TEMPORARY,
    "_alloc_padded_unsharded_flat_param": Memory.UNSHARDED,
    "_get_reduce_scatter_tensors": Memory.RS_OUTPUT,
    "_accumulate_sharded_grad": Memory.RS_OUTPUT,
    "_post_backward_hook": Memory.RS_INPUT,
    # DDP: the buckets are made with the wrapper, and once more before the second forward
    "_ddp_init_helper": Memory.UNSHARDED_GRAD,
    "_pre_forward": Memory.UNSHARDED_GRAD,
}
"""What a function of an FSDP or of DDP allocates; the innermost one counts."""

INPUT_FIRST = ("foreach_reduce", "foreach_reduce_scatter")
"""These allocate the input of the reduce-scatter, further down the output."""

REDUCES = (*INPUT_FIRST, "post_backward", "_post_backward_hook", "_reduce_grad", "_get_reduce_scatter_tensors")
"""Where whole gradients go."""

BACKWARD = {
    "_engine_run_backward", "backward", "unpack_hook", "_pre_backward", "pre_backward", "post_backward",
    "_pre_backward_hook", "_post_backward_hook", "_root_post_backward_final_callback", "_post_backward_final_callback",
}  # fmt: skip
ENGINE = "autograd::Engine::"
LOSS = ("_log_softmax", "nll_loss", "cross_entropy", "LogSoftmax", "NllLoss", "CrossEntropy")


def phase_of(frames: Sequence[Frame]) -> Phase:
    """The part of a training step that a stack belongs to; autograd's threads for a GPU may have no frames at all."""
    if not frames or any(ENGINE in frame.name for frame in frames) or _any(frames, ("/torch/", *PARALLEL), BACKWARD):
        return Phase.BACKWARD
    if any("/torch/optim/" in frame.filename for frame in frames):
        return Phase.OPTIMIZER
    return Phase.FORWARD if _any(frames, ("/torch/nn/modules/module.py",), {"_call_impl"}) else Phase.NONE


def purposes(blocks: Sequence[Block], of: Sequence[Block] | None = None) -> list[Memory]:
    """What each block of a recording is for, by the rules above; or each of some of them."""
    first: dict[str, int] = {}  # of each function of INPUT_FIRST the line that allocates first
    for frames in {id(block.born.frames): block.born.frames for block in blocks}.values():
        if (frame := _allocator(frames)) and frame.name in INPUT_FIRST:
            first[frame.name] = min(frame.line, first.get(frame.name, frame.line))
    return [_purpose(block, first) for block in (blocks if of is None else of)]


def _purpose(block: Block, first: dict[str, int]) -> Memory:
    if block.known is not None:
        return block.known
    if frame := _allocator(block.born.frames):
        return _of_parallel(block, frame, first)
    frames, died = block.born.frames, block.died
    phase, until = phase_of(frames), phase_of(died.frames) if died else None
    again = _checkpoints(frames)
    if phase in (Phase.FORWARD, Phase.BACKWARD) and _of_loss(frames):
        return Memory.LOGITS
    if phase is Phase.FORWARD:
        kept = Memory.CHECKPOINT if again else Memory.ACTIVATION
        return Memory.TEMPORARY if until is phase else kept
    if phase is Phase.BACKWARD and again:
        return Memory.TEMPORARY if died and _checkpoints(died.frames) else Memory.ACTIVATION
    if phase is Phase.BACKWARD:
        reduced = died is None or until is not phase or _any(died.frames, PARALLEL, REDUCES)
        return Memory.UNSHARDED_GRAD if reduced else Memory.TEMPORARY
    if until is phase:
        return Memory.TEMPORARY
    return Memory.OPTIMIZER if phase is Phase.OPTIMIZER else Memory.NONE


def _of_parallel(block: Block, allocator: Frame, first: dict[str, int]) -> Memory:
    name, category = allocator.name, ALLOCATES[allocator.name]
    if name in INPUT_FIRST:
        return Memory.RS_INPUT if allocator.line == first[name] else category
    if name == "_get_reduce_scatter_tensors" and _any(block.born.frames, ("/torch/nn/functional.py",), {"pad"}):
        return Memory.RS_INPUT
    within = block.died is not None and _any(block.died.frames, PARALLEL, {name})
    return Memory.TEMPORARY if within and category in (Memory.AG_OUTPUT, Memory.UNSHARDED) else category


def _allocator(frames: Sequence[Frame]) -> Frame | None:
    """The innermost function of `ALLOCATES` in which a block was allocated."""
    for frame in frames:
        if frame.name in ALLOCATES and any(part in frame.filename for part in PARALLEL):
            return frame
    return None


def _checkpoints(frames: Sequence[Frame]) -> bool:
    return _any(frames, ("/torch/utils/checkpoint.py",), {"checkpoint", "unpack_hook"})


def _of_loss(frames: Sequence[Frame]) -> bool:
    """Whether torch's own cross-entropy, forward or backward, is among the calls: as Python, an operator, or C++."""
    return any(
        word in frame.name for frame in frames for word in LOSS if "/torch/" in frame.filename or ":" in frame.name
    )


def _any(frames: Sequence[Frame], files: tuple[str, ...], names: set[str] | tuple[str, ...]) -> bool:
    return any(frame.name in names and any(part in frame.filename for part in files) for frame in frames)
