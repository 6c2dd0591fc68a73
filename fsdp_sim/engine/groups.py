"""Which ranks a collective brings together.

Of the ``group_size`` ranks of a collective a shard group is a block of consecutive ones (HSDP's shard groups, the
smaller groups of ``reshard_after_forward=n``); a replicate group is the ranks at equal positions of the blocks. Of
groups that are played in part only the played ranks count.
"""

from __future__ import annotations

from fsdp_sim.engine.seconds import Seconds, Times
from fsdp_sim.schedule import Instruction


def group_of(i: Instruction, rank: int, world_size: int, ranks: int) -> range:
    """The played ranks that take part in a rank's collective."""
    if _strided(i):
        stride = max(1, world_size // i.group_size)
        return range(rank % stride, ranks, stride)
    first = rank // i.group_size * i.group_size
    return range(first, min(first + i.group_size, ranks))


def over_group(value: Seconds, i: Instruction, world_size: int, ranks: int) -> Seconds:
    """The largest of each group a collective runs in, on each of its ranks.

    A collective is a rendezvous: it starts when the last rank of the group is ready, and lasts as long as its slowest
    says.
    """
    if isinstance(value, float) or not value.ndim:
        return float(value)
    import numpy as np  # which one rank does without

    size = i.group_size
    if size >= world_size or (ranks <= size and not _strided(i)):
        return float(value.max())
    block = world_size // size if _strided(i) else size
    blocks = -(-ranks // block)
    padded: Times = np.full(blocks * block, -np.inf)
    padded[:ranks] = value
    table = padded.reshape(blocks, block)  # a row is a block of consecutive ranks, a column those at equal positions
    if _strided(i):
        return np.tile(table.max(axis=0), blocks)[:ranks]
    return np.repeat(table.max(axis=1), block)[:ranks]


def _strided(i: Instruction) -> bool:
    return i.communicator.startswith("replicate")
