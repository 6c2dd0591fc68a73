"""What a real training step holds in memory, by the categories in which the simulator predicts it.

    with counted(wrapped.model, optimizer, api="fsdp2") as memory:      # a CPU rank; on a GPU: recorded
        train_step(...)
    at_peak(memory.timeline, rank)                                      # bytes by category

Read in this order:

    blocks      what is there before a step; blocks and their purposes: `fsdp_sim.timeline.snapshot`
    series      the bytes alive over time
    counted     of a CPU rank: every storage
    on_gpu      of a GPU: what torch's allocator recorded
    strips      predicted over measured, as a figure; apart, for ranks import what is above and draw nothing
"""

from fsdp_sim.timeline.snapshot import FOR_COMPUTE
from labs.measure.allocations.counted import counted
from labs.measure.allocations.on_gpu import read_snapshot, recorded
from labs.measure.allocations.series import StepMemory, at_peak, timeline_of

__all__ = [
    "FOR_COMPUTE",
    "StepMemory",
    "at_peak",
    "counted",
    "read_snapshot",
    "recorded",
    "timeline_of",
]
