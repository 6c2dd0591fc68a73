"""The words every part of the project speaks: operations, lanes, phases, and what memory is held for.

The spelling of operations and lanes is that of the recorded torch programs, so a timeline can be laid
beside what torch itself issued.
"""

from enum import StrEnum


class Word(StrEnum):
    """A word of the vocabulary. It hashes as the string it is: enum's own hash is a Python function, and slow."""

    __hash__ = str.__hash__


class Op(Word):
    """What an event does. ``ALLOC`` and ``FREE`` take no time; everything else occupies its lane."""

    FWD = "FWD"
    BWD = "BWD"
    RECOMPUTE = "RECOMPUTE"  # a forward run again in backward, under activation checkpointing
    OPTIM = "OPTIM"
    H2D = "h2d"  # shards from the CPU, where they are offloaded
    AG_CAST = "ag_cast"  # shards to param_dtype
    AG_COPY_IN = "ag_copy_in"
    ALL_GATHER = "ALL_GATHER"
    AG_COPY_OUT = "ag_copy_out"
    CLONE = "clone_post_forward_shard"  # the slice kept between forward and backward (reshard_after_forward=n)
    UPCAST = "upcast_unsharded_grad"  # whole gradients kept without sync, to reduce_dtype
    RS_COPY_IN = "rs_copy_in"
    RS_COPY = "rs_copy"  # from input to output where one rank has nothing to scatter
    DIV = "div"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    GRAD_CAST = "grad_cast"  # reduced gradients to the dtype of the shards
    ACCUMULATE = "accumulate"  # into gradients of an earlier micro-batch
    NORM = "norm"  # of gradients, to clip them; of weights in fp8, for their scales
    CLIP = "clip"  # gradients times what brings their norm down
    D2H = "d2h"  # reduced gradients to the CPU
    ACT_D2H = "act_d2h"  # activations to the CPU, in forward
    ACT_H2D = "act_h2d"  # and back, in backward
    ALL_REDUCE = "ALL_REDUCE"
    ALL_TO_ALL = "ALL_TO_ALL"  # tokens to the ranks of their experts, and back
    BROADCAST = "BROADCAST"
    BARRIER = "BARRIER"
    SEND = "SEND"
    RECV = "RECV"
    OTHER = "OTHER"
    ALLOC = "alloc"
    FREE = "free"


class Lane(Word):
    """A FIFO queue on one rank: a CUDA stream, or on a CPU rank the thread or the wire that plays its part."""

    COMPUTE = "compute"
    AG_COPY_IN = "ag_copy_in"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    OTHER_COMM = "other_comm"
    # FSDP1's streams, beside compute and all_reduce
    UNSHARD = "unshard"
    PRE_UNSHARD = "pre_unshard"
    POST_BACKWARD = "post_backward"
    OFFLOAD = "offload"  # activations to the CPU and back
    CPU = "cpu"  # what the thread that issues computes itself: the optimizer, where shards are offloaded


class Phase(Word):
    """The part of a training step an event was issued in; empty outside a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    NONE = ""


class Memory(Word):
    """What bytes are alive for: the categories of the memory strip, from bottom to top."""

    SHARDED = "sharded"  # this rank's parameter shards
    OPTIMIZER = "optimizer"  # optimizer state of those shards
    RS_OUTPUT = "rs_output"  # O: sharded gradients
    UNSHARDED = "unsharded"  # U: whole parameters of a unit
    AG_OUTPUT = "ag_output"  # G: flat all-gather output
    UNSHARDED_GRAD = "unsharded_grad"  # whole gradients of a unit
    RS_INPUT = "rs_input"  # I: flat reduce-scatter input
    ACTIVATION = "activation"
    CHECKPOINT = "checkpoint"  # block inputs kept under activation checkpointing
    LOGITS = "logits"  # the output of the head, its loss and their gradients
    TEMPORARY = "temporary"  # alive within one operation
    NONE = ""  # the event is not an alloc or free


MEMORY = frozenset({Op.ALLOC, Op.FREE})  # what takes no time
COMM_LANES = frozenset(
    {Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, Lane.OTHER_COMM, Lane.UNSHARD, Lane.POST_BACKWARD}
)
COLLECTIVES = frozenset(
    {
        Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BROADCAST, Op.BARRIER, Op.SEND, Op.RECV
    }
)  # fmt: skip
COLLECTIVE_LANE = {
    Op.ALL_GATHER: Lane.ALL_GATHER,
    Op.REDUCE_SCATTER: Lane.REDUCE_SCATTER,
    Op.ALL_REDUCE: Lane.ALL_REDUCE,
}


SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def dtype_name(dtype: object) -> str:
    """The short name of a torch dtype: ``torch.float32`` is ``fp32``; others keep torch's, ``uint8``."""
    name = str(dtype).removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


def lane_of(op: Op) -> Lane:
    """The lane an operation runs on in FSDP2: collectives and the all-gather copy-in have their own."""
    if op in COLLECTIVE_LANE:
        return COLLECTIVE_LANE[op]
    if op is Op.AG_COPY_IN:
        return Lane.AG_COPY_IN
    if op in (Op.ALL_TO_ALL, Op.BROADCAST, Op.BARRIER, Op.SEND, Op.RECV, Op.OTHER):
        return Lane.OTHER_COMM
    return Lane.COMPUTE
