"""What torch's CUDA allocator notes (``torch.cuda.memory._dump_snapshot``), read without ever running a pickle.

plain_pickle   a pickle of plain data, and of nothing else
blocks         memory from its allocation to its release, and who asked for it
read           a snapshot of one device: its segments and what the allocator did
purpose        what a block is for
totals         bytes allocated and reserved over time
"""

from fsdp_sim.timeline.snapshot.blocks import AllocationMoment, Block, Frame
from fsdp_sim.timeline.snapshot.plain_pickle import read_plain_pickle
from fsdp_sim.timeline.snapshot.purpose import (
    ALLOCATES,
    FOR_COMPUTE,
    INPUT_FIRST,
    PARALLEL,
    REDUCES,
    phase_of,
    purposes,
)
from fsdp_sim.timeline.snapshot.read import Action, Snapshot, load_snapshot
from fsdp_sim.timeline.snapshot.totals import Totals

__all__ = [
    "ALLOCATES",
    "FOR_COMPUTE",
    "INPUT_FIRST",
    "PARALLEL",
    "REDUCES",
    "Action",
    "AllocationMoment",
    "Block",
    "Frame",
    "Snapshot",
    "Totals",
    "load_snapshot",
    "phase_of",
    "purposes",
    "read_plain_pickle",
]
