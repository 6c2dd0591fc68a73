"""The streams, on which a device runs one thing beside another, and what stands in for them on CPU.

[Note: streams]  A GPU runs what the CPU issues in queues called streams: FIFO within a stream, side by side across
streams, and "wait" makes a stream wait for an event of another while the CPU runs on. FSDP uses five:

    compute         forward, backward, copy-out, and the copy-in of gradients: the default stream
    ag_copy_in      copy-in of the shards, casts
    all_gather      the all-gathers
    reduce_scatter  the reduce-scatters, and what is done to their output
    all_reduce      the all-reduces of hybrid sharding

[Note: no streams on CPU]  `torch.cpu` has the same classes and they do nothing. What overlaps on CPU is the collective
itself: it is issued with ``async_op=True`` and gloo's threads carry it out while this thread computes. So "wait for
the event" and "wait for the collective" stand at the same place in the code (`AllGatherResult.wait`), and on CPU the
second blocks the thread where on a GPU the first makes a stream wait. One thing differs: on a GPU the work that
follows a reduce-scatter is queued behind it at once; on CPU it is done when somebody waits for the reduce-scatter: the
units that reduce next, and the end of backward. Where backward reaches a unit without its pre-backward hook (a head
called per chunk of the loss; a model that returns an object FSDP cannot look into) there may be no such end, and
`FSDPParamGroup.post_backward` waits itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import _get_device_handle

from fsdp_sim.states import TrainingState


class Streams:
    """The streams that all units under one root share.

    Attributes:
        device_handle: `torch.cuda`, `torch.cpu`, ...: where the device's streams and events come from.
        on_cpu: collectives are asynchronous and their ends deferred, see [Note: no streams on CPU].
    """

    all_gather_copy_in_stream: torch.Stream
    all_gather_stream: torch.Stream
    reduce_scatter_stream: torch.Stream
    all_reduce_stream: torch.Stream

    def __init__(self, device: torch.device) -> None:
        self.device_handle: Any = _get_device_handle(device.type)
        self.on_cpu = self.device_handle is torch.cpu

    def lazy_init(self) -> None:
        """Make the streams. High priority lets short copies go before long kernels."""
        if not hasattr(self, "all_gather_stream"):
            stream = self.device_handle.Stream
            self.all_gather_copy_in_stream, self.all_gather_stream = stream(priority=-1), stream(priority=-1)
            self.reduce_scatter_stream, self.all_reduce_stream = stream(priority=-1), stream()

    def current_stream(self) -> torch.Stream:
        """The compute stream, when called from a hook."""
        return self.device_handle.current_stream()

    def get_all_gather_streams(
        self, async_op: bool, training_state: TrainingState
    ) -> tuple[torch.Stream, torch.Stream]:
        """(copy-in stream, all-gather stream): their own within a step, the current one when the user calls `unshard`
        and for asynchronous all-gathers, which the process group runs on a stream of its own."""
        if not async_op and training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            return self.all_gather_copy_in_stream, self.all_gather_stream
        return self.current_stream(), self.current_stream()

    def wait_all_gather_streams_on_event(self, event: torch.Event | None) -> None:
        """No later copy-in or all-gather may start before ``event``."""
        if event is not None and hasattr(self, "all_gather_stream"):  # before the first forward there are no streams
            self.all_gather_copy_in_stream.wait_event(event)
            self.all_gather_stream.wait_event(event)
