"""What the groups under one root share: streams' pending work, the plan's settings, and communicators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.layout import Layout
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory

EXPERTS = "experts"  # tokens that travel to their experts and back
SHARD = "shard"  # all-gathers and reduce-scatters share this communicator, so they run in issue order
REDUCE_SCATTER = "reduce_scatter"  # set_separate_reduce_scatter_group
REPLICATE = "replicate"  # HSDP's all-reduces
POST_FORWARD = "post_forward"  # gathers in backward within the smaller groups of reshard_after_forward=n


@dataclass(slots=True)
class AllGatherResult:
    """An all-gather that was issued for the unit ``name``: its flat output G is alive until this is dropped.

    Attributes:
        event: end of the gather on its stream; 0 where there is one rank and no gather.
        work: of an asynchronous gather, the event at its end; else 0.
        lane: the stream whose pool G comes from.
        from_slice: it gathers the slices of ``reshard_after_forward=n``, not the shards.
    """

    cpu: Cpu
    name: str
    layout: Layout
    event: int
    work: int
    lane: Lane
    from_slice: bool = False

    def drop(self) -> None:
        """Free G. On one rank there is none: parameters are copied straight from the shards."""
        if self.event:
            self.cpu.free(Memory.AG_OUTPUT, self.name, self.layout.gather_bytes, self.layout.gather_dtype, self.lane)


@dataclass
class CommContext:
    """Torch's ``FSDPCommContext``, and the settings that all groups have in common.

    Attributes:
        precomputed_scales: of weights that are gathered in fp8, after the optimizer.
        torch_2_15: it is the program of torch 2.15 (``Plan.torch``).
        all_gather_state: the previous group's G, and the end of its copy-out.
        reduce_scatter_states: of the reduce-scatters whose input I is alive, what frees it, and the event at their end.
        post_forward_order: `unshard` of each group whose forward has ended, in that order.
    """

    cpu: Cpu
    reduce_scatter_communicator: str = SHARD
    max_input_buffers: int = 1
    unshard_async_op: bool = False
    cpu_offload: bool = False
    precomputed_scales: bool = False
    torch_2_15: bool = False
    all_gather_state: tuple[AllGatherResult, int] | None = None
    reduce_scatter_states: list[tuple[Callable[[], None], int]] = field(default_factory=list)
    post_forward_order: list[Callable[[], None]] = field(default_factory=list)
    last_post_reduce_events: dict[Lane, int] = field(default_factory=dict)

    def all_gather_streams_wait(self, event: int) -> None:
        self.cpu.wait(Lane.AG_COPY_IN, event)
        self.cpu.wait(Lane.ALL_GATHER, event)

    def flush_all_gather_state(self) -> None:
        """End of the root's forward: drop the last G."""
        if self.all_gather_state is not None:
            last, copied_out = self.all_gather_state
            self.all_gather_streams_wait(copied_out)
            last.drop()
            self.all_gather_state = None

    def wait_for_last_reductions(self) -> None:
        """Make compute wait until all gradients are sharded ones."""
        for event in self.last_post_reduce_events.values():
            self.cpu.wait(Lane.COMPUTE, event)
        self.last_post_reduce_events.clear()

    def wait_for_reduce_scatters(self, keep: int) -> None:
        """Make compute wait for the oldest reduce-scatters and drop their inputs until ``keep`` are left."""
        while len(self.reduce_scatter_states) > keep:
            free_input, event = self.reduce_scatter_states.pop(0)
            self.cpu.wait(Lane.COMPUTE, event)
            free_input()

    def release_all_reduce_scatters(self) -> None:
        """End of backward: wait for all, then drop all, in the order in which torch's list lets go of them."""
        for _, event in self.reduce_scatter_states:
            self.cpu.wait(Lane.COMPUTE, event)
        last = self.reduce_scatter_states[-1:]
        for free_input, _ in self.reduce_scatter_states[-2::-1] + last:
            free_input()
        self.reduce_scatter_states.clear()


def comm_context(plan: Plan, cpu: Cpu) -> CommContext:
    """What is shared at the beginning of a program."""
    return CommContext(
        cpu,
        reduce_scatter_communicator=REDUCE_SCATTER if plan.separate_reduce_scatter_group else SHARD,
        max_input_buffers=plan.reduce_scatter_max_input_buffers,
        unshard_async_op=plan.unshard_async_op,
        cpu_offload=plan.cpu_offload,
        precomputed_scales=plan.fp8_precompute_scale,
        torch_2_15=plan.torch == "2.15",
    )  # fmt: skip
