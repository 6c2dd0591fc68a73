"""What all units under one root share besides the streams: the collectives under way, and the order of the forwards.

One context per root is what lets a unit act for another: wait for its reduction, issue its all-gather, drop its buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fsdp_sim.mini.collectives import AllGatherResult, ReduceScatterState
from fsdp_sim.mini.labels import record_range
from fsdp_sim.mini.streams import Streams

if TYPE_CHECKING:
    from fsdp_sim.mini.group import FSDPParamGroup


class AllGatherState(NamedTuple):
    """The all-gather whose output must outlive its copy-out, see [Note: who keeps G alive] in `group`."""

    result: AllGatherResult
    event: torch.Event | None  # end of the copy-out, on a device


class FSDPCommContext(Streams):
    """Communication state shared by all units under one root (torch: `_fsdp_param_group.FSDPCommContext`).

    Attributes:
        all_gather_state: the last all-gather of this forward, see [Note: who keeps G alive] in `group`.
        reduce_scatter_states: reduce-scatters under way, oldest first, see [Note: who keeps I alive] in `group`.
        reduce_scatter_max_input_buffers: K.
        post_forward_order: units in the order in which their forward ended; backward prefetch reads it from the end.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.all_gather_state: AllGatherState | None = None
        self.reduce_scatter_states: list[ReduceScatterState] = []
        self.reduce_scatter_max_input_buffers = 1
        self.post_forward_order: list[FSDPParamGroup] = []
        self._last_post_reduce_events: dict[torch.Stream, torch.Event | None] = {}  # a later one implies the earlier

    def wait_for_last_reductions(self) -> None:
        """Make the compute stream wait until all gradients are handed out."""
        for event in self._last_post_reduce_events.values():
            if event is not None:
                self.current_stream().wait_event(event)
        self._last_post_reduce_events.clear()

    def release_all_gather_state(self) -> AllGatherState | None:
        """Let go of the gathered buffer that was kept for one unit longer; later copy-ins wait for its copy-out."""
        state, self.all_gather_state = self.all_gather_state, None
        if state is not None:
            self.wait_all_gather_streams_on_event(state.event)
        return state

    def wait_for_reduce_scatters(self, keep: int, fqn: str | None) -> None:
        """For a unit, wait for the oldest reduce-scatters until ``keep`` are under way, and drop their inputs."""
        if len(self.reduce_scatter_states) > keep:
            with record_range(f"FSDP::post_backward_rs_wait ({fqn})"):
                while len(self.reduce_scatter_states) > keep:
                    self.reduce_scatter_states.pop(0).wait(self)  # I dies here

    def wait_for_all_reduce_scatters(self) -> None:
        """At the end of backward: wait for all; the caller drops them."""
        for state in self.reduce_scatter_states:
            state.wait(self)
