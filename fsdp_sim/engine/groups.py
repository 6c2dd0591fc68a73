"""Which ranks a collective brings together.

Of the ``group_size`` ranks of a collective a shard group is a block of consecutive ones (HSDP's shard groups, the
smaller groups of ``reshard_after_forward=n``, the ranks that exchange tokens); a replicate group is the ranks at equal
positions of the blocks, and so is, within a shard group, one of ranks that have the same experts. Of groups that are
played in part only the played ranks count.
"""

from __future__ import annotations

from fsdp_sim.engine.seconds import Seconds, Times
from fsdp_sim.schedule import Instruction


def group_of(i: Instruction, rank: int, world_size: int, ranks: int) -> range:
    """The played ranks that take part in a rank's collective."""
    stride = i.stride_among(world_size)
    block = i.group_size * stride
    first = rank // block * block + rank % stride
    return range(first, min(first + block, ranks), stride)


def over_group(value: Seconds, i: Instruction, world_size: int, ranks: int) -> Seconds:
    """The largest of each group a collective runs in, on each of its ranks.

    A collective is a rendezvous: it starts when the last rank of the group is ready, and lasts as long as its slowest
    says.
    """
    if isinstance(value, float) or not value.ndim:
        return float(value)
    import numpy as np  # which one rank does without

    stride = i.stride_among(world_size)
    if i.group_size >= world_size or (ranks <= i.group_size and stride == 1):
        return float(value.max())
    blocks = -(-ranks // (i.group_size * stride))
    padded: Times = np.full(blocks * i.group_size * stride, -np.inf)
    padded[:ranks] = value
    table = padded.reshape(blocks, i.group_size, stride)  # a group is a column of a block
    largest: Times = np.broadcast_to(table.max(axis=1, keepdims=True), table.shape).reshape(-1)[:ranks]
    return largest
