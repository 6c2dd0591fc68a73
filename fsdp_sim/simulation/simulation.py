"""`simulate`: a model, a cluster and a plan in; when everything runs, what is alive and why out.

The rooms before this one in a row: `cost` says what the model has to compute, `schedule` which program torch's FSDP
issues for it, `cost` again how long each operation takes, `engine` when each runs and what memory is alive.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, Literal

from fsdp_sim import engine
from fsdp_sim.cost import (
    OF_WORK,
    Calibration,
    CollectiveCosts,
    Costs,
    Shares,
    Workload,
    check_fp8,
    interval_s,
    offload_s,
)
from fsdp_sim.cost import workload as transformer_workload
from fsdp_sim.diagnose import Explanation, explain
from fsdp_sim.engine import Given, Run
from fsdp_sim.schedule import Instruction, Program, blocks_of, build, state_bytes
from fsdp_sim.simulation.limits import check_blocks, check_each
from fsdp_sim.simulation.remarks import remarks
from fsdp_sim.simulation.without_effect import without_effect
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Header, Op, Timeline
from fsdp_sim.words import human_rate, in_brief

Skew = Callable[[Given, int], Given]

# What is kept of a GPU's memory outside of torch's allocator. NCCL's buffers: 4 MiB, NCCL_BUFFSIZE's default by its
# documentation, for each of up to 32 channels, of a ring and of a tree. The driver and the CUDA context are assumed.
NCCL_BYTES = 2 * 32 * 4 * 2**20
CONTEXT_BYTES = 1.25 * 2**30 + NCCL_BYTES
# What cuBLAS takes of torch's allocator for each thread that multiplies matrices, where CUBLAS_WORKSPACE_CONFIG is not
# set: ``at::cuda::parseChosenWorkspaceSize`` in torch 2.13, 32 MiB from compute capability 9 on.
WORKSPACE_BYTES = {"Hopper": 32 * 2**20, "Blackwell": 32 * 2**20}
OLDER_WORKSPACE_BYTES = 2 * 4096 * 2**10 + 8 * 16 * 2**10  # its default, :4096:2:16:8
# Where the edge of memory begins. Of the published runs the two that are predicted to hold more than 0.95 of the limit
# are 17 and 23% slower than predicted, those up to 0.94 are not; and what is held is predicted to within 4%.
EDGE = 0.9
# A plan whose tensors take less than this share of the limit is not at the edge: no plan that was tried made the
# allocator hold as much as twice what is alive.
FAR_FROM_EDGE = EDGE / 2


def workspace_bytes(cluster: Cluster) -> int:
    """What cuBLAS takes of torch's allocator, once for forward's thread and once for autograd's."""
    return WORKSPACE_BYTES.get(cluster.gpu.arch, OLDER_WORKSPACE_BYTES)


class Fit(StrEnum):
    """Whether a step finds room on its GPUs."""

    FITS = "fits"
    EDGE = "on the edge"
    DOES_NOT_FIT = "does not fit"


class Simulation:
    """One training step, predicted. Everything is computed when it is first asked for.

    Attributes:
        workload: units and kernels of the model.
        plan, cluster: what was asked.
        costs: seconds of each operation.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        plan: Plan,
        calibration: Calibration | None = None,
        skew: Skew | None = None,
        asked: tuple[Model | Workload, Plan] | None = None,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.plan = plan
        self.costs = Costs(workload, plan, cluster, calibration)
        if skew is not None:  # which says how ranks differ
            alike = replace(self.costs.calibration, slowest_per_doubling=0.0)
            self.costs = Costs(workload, plan, cluster, alike)
        self._skew = skew
        self._asked = asked or (workload, plan)
        self._calibration = calibration

    def __str__(self) -> str:
        return "\n".join([repr(self), *self.notes])

    def __repr__(self) -> str:
        low, high = self.step_time_interval_s
        return (
            f"Simulation({self.workload.name} on {self.cluster.gpus} x {self.cluster.gpu.name}: "
            f"{self.step_time_s * 1e3:.1f} ms a step (80%: {low * 1e3:.1f} to {high * 1e3:.1f} ms), "
            f"{human_rate(self.tokens_per_s_per_gpu)} tokens/s per GPU, "
            f"{self.peak_memory_bytes / 2**30:.1f} GiB{'' if self.fit is Fit.FITS else f', {self.fit}'})"
        )

    def recalibrated(self, calibration: Calibration) -> Simulation:
        """The same request with other numbers; the program is not built again."""
        other = Simulation(self.workload, self.cluster, self.plan, calibration, self._skew, self._asked)
        other.__dict__["program"] = self.program
        return other

    @cached_property
    def program(self) -> Program:
        """What torch issues; two steps where the second differs from the first (FSDP1's forward prefetch)."""
        steps = 2 if self.plan.api == "fsdp1" and self.plan.forward_prefetch else 1
        return build(self.workload.units, self.plan, self.cluster.gpus, steps)

    @cached_property
    def run(self) -> Run:
        """When each operation runs; on one rank that stands for all, or, with a skew, on every rank."""
        alone = self._replayed(self.costs.seconds, self._contention, self.workload.alike)
        if self._skew is None:
            return alone
        return self._replayed(self._skew(_lasted(alone), self.cluster.gpus), None, {})

    def _replayed(self, seconds: Given, contention: engine.Contention | None, alike: engine.Alike) -> Run:
        return engine.run(
            self.program, seconds, issue_s=self.costs.issue_s, launch_s=self.costs.launch_s,
            device=self.device, contention=contention, alike=alike,
        )  # fmt: skip

    @cached_property
    def memory(self) -> engine.MemoryProfile:
        """Live bytes by category at every event, the peak and what makes it up; what torch's allocator holds."""
        found = replace(self._alive, run=self.run, allocator=self._allocator)
        if "_held" in self.__dict__:
            found.__dict__["pools"] = self._held
        return found

    @cached_property
    def _held(self) -> engine.Pools:
        """What torch's allocator holds; without a replay where no moment matters to it."""
        return (self.memory if self._alive.needs_times else replace(self._alive, allocator=self._allocator)).pools

    @property
    def _allocator(self) -> engine.Allocator | None:
        if self.cluster.kind == "cpu":
            return None
        limited = self.peak_memory_bytes <= self.memory_limit_bytes  # else it would end at the first tensor too many
        return engine.Allocator(
            int(self.memory_limit_bytes) if limited else None, self.plan.expandable_segments,
            workspace_bytes(self.cluster),
        )  # fmt: skip

    @cached_property
    def _alive(self) -> engine.MemoryProfile:
        """The same without times: what is alive follows from the program alone, no replay needed."""
        return engine.memory(self.program, self.workload)

    @property
    def header(self) -> Header:
        """What its timelines say of themselves."""
        plan, cluster = self.plan, self.cluster
        return Header(
            producer="simulate", clock="simulated", world_size=cluster.gpus,
            title=f"{self.workload.name}, {plan.api}", hardware=f"{cluster.gpus} x {cluster.gpu.name}",
            api=plan.api, device=self.device, memory_limit_bytes=int(self.memory_limit_bytes),
            units=self.program.unit_shards,
        )  # fmt: skip

    @cached_property
    def timeline(self) -> Timeline:
        """The step as events: every operation, and all that is allocated and freed."""
        return self.memory.timeline(lambda: self.header)

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """``cpu`` where the thread that issues also computes."""
        return "cpu" if self.cluster.kind == "cpu" else "gpu"

    @property
    def _contention(self) -> engine.Contention | None:
        if not self.costs.calibration.contention or self.cluster.kind == "cpu":
            return None
        return _contention_of(self.costs.collectives)

    @cached_property
    def step_time_s(self) -> float:
        """Seconds per optimizer step: the replay, and what a training loop does between two steps."""
        return self.run.step_time_s() + self.between_steps_s

    @property
    def between_steps_s(self) -> float:
        """Of `step_time_s`, what is no operation of the program: data and logging, fitted (see `Calibration`), and
        checkpoints.
        """
        return self.costs.calibration.step_s + self.checkpoint_s

    @cached_property
    def checkpoint_s(self) -> float:
        """What saving checkpoints costs a step (``save_every``), on average.

        A rank writes its shards and states; training waits for that, or, with ``async_save``, for their copy to the
        CPU's memory and for what of the writing is not done when the next checkpoint is due.
        """
        return self._checkpoint_s(self.run.step_time_s()) if self.plan.save_every else 0.0

    def _checkpoint_s(self, step_s: float) -> float:
        """The same where the operations of a step take so many seconds."""
        plan = self.plan
        if plan.save_every is None:
            return 0.0
        n_bytes = sum(state_bytes(self.program.units, replace(plan, cpu_offload=False), self.cluster.gpus).values())
        write_s = n_bytes / ((plan.storage_gb_per_s or math.inf) * 1e9)
        if not plan.async_save:
            return write_s / plan.save_every
        copy_s = 0.0 if plan.cpu_offload else offload_s(n_bytes, self.cluster)
        between_s = plan.save_every * (step_s + self.costs.calibration.step_s)
        return (copy_s + max(0.0, write_s - between_s)) / plan.save_every

    @property
    def step_time_interval_s(self) -> tuple[float, float]:
        """Between which seconds `step_time_s` lies, four times in five: see `fsdp_sim.cost.interval_s`."""
        return interval_s(self.step_time_s, self.plan.stack, self.cluster, self.uncertain_shares)

    @property
    def uncertain_shares(self) -> Shares:
        """Parts of the step that published runs hardly identify, which widen its interval."""
        step_s, between_s = self.step_time_s, self.between_steps_s
        waiting_s = max(0.0, step_s - between_s - self.exposure.compute_s)
        return Shares(waiting_s / step_s, between_s / step_s, self.costs.gaps_s() / step_s)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.workload.tokens * self.plan.grad_accum / self.step_time_s

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilisation: 6 N + 12 L d T FLOPs per token (Chowdhery et al. 2022) over the dense peak in
        `peak_dtype`.
        """
        peak: float = self.cluster.gpu.peak_flops(peak_dtype(self.workload.dtype, self.plan))
        return self.tokens_per_s_per_gpu * self.workload.model_flops_per_token / peak

    @cached_property
    def exposure(self) -> engine.Exposure:
        """Communication, how much of it no compute hides, and where compute stands idle."""
        return engine.exposure(self.run)

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of a step in which rank 0 communicates and does not compute."""
        return self.exposure.exposed_s

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes alive at one moment on a rank."""
        return self._alive.peak_bytes

    @cached_property
    def host_memory_bytes(self) -> int:
        """What a rank offloads to the CPU's memory: shards, their gradients and states; activations."""
        last = [i for i in self.program.ops if (i.step, i.micro_batch) == (0, self.plan.grad_accum - 1)]
        copied = sum([self.costs.offloaded_bytes(i) for i in last if i.op is Op.ACT_D2H])
        copied += sum([i.bytes for i in last if i.op is Op.D2H])
        if not self.plan.cpu_offload:
            return copied
        states = state_bytes(self.program.units, replace(self.plan, cpu_offload=False), self.cluster.gpus)
        return copied + sum(states.values()) - sum([unit.buffer_bytes for unit in self.program.units])

    @property
    def memory_limit_bytes(self) -> float:
        """What a training process can use of the GPU's memory; of a CPU's, a rank's whole share."""
        mem_bytes: float = self.cluster.gpu.mem_bytes
        return mem_bytes - CONTEXT_BYTES if self.cluster.kind == "gpu" else mem_bytes

    @property
    def fit_at_once(self) -> Fit | None:
        """`fit` where the bytes alive tell it; None where torch's allocator has to be played, which takes longer than
        all the rest."""
        limit = self.memory_limit_bytes
        if self.peak_memory_bytes > limit:
            return Fit.DOES_NOT_FIT
        if self.cluster.kind == "cpu":
            return Fit.FITS  # malloc gives back what is freed: torch's caching allocator is one of GPUs
        unlimited = self.plan.api == "fsdp1" and not self.plan.limit_all_gathers  # gathers take all that there is
        return Fit.FITS if self.peak_memory_bytes < FAR_FROM_EDGE * limit and not unlimited else None

    @cached_property
    def fit(self) -> Fit:
        """Whether it fits, with a margin: torch's allocator is played over the step's tensors where it is close.

        It does not fit if more is alive than a process can use, or if what the allocator caches in pieces leaves no
        room for a tensor. It is on the edge if the allocator holds more than `EDGE` of the limit, or has to give
        memory back to the device in each step.
        """
        if at_once := self.fit_at_once:
            return at_once
        held = self._held
        if held.fails:
            return Fit.DOES_NOT_FIT
        return Fit.EDGE if held.retries or held.reserved_bytes > EDGE * self.memory_limit_bytes else Fit.FITS

    @cached_property
    def without_effect(self) -> dict[str, str]:
        """A sentence for each setting of the plan or the cluster that was given and changes nothing, by its name."""
        model, plan = self._asked
        return without_effect(
            self.cluster,
            plan,
            lambda cluster, plan: simulate(model, cluster, plan, calibration=self._calibration),
            traced=self._is_traced,
        )

    @property
    def _is_traced(self) -> bool:
        """Whether its work was read off a module, which no plan decides."""
        return not self.workload.written_for

    @property
    def notes(self) -> list[str]:
        """What a reader should know beside the numbers: what is unverified, and which settings change nothing."""
        asked = self._asked[0]
        said = remarks(asked if isinstance(asked, Model) else None, self.workload, self.cluster, self.plan)
        return [*self.cluster.notes, *said, *self.without_effect.values()]

    @property
    def fits(self) -> bool:
        """Whether it runs: it fits, or is on the edge. `fit` tells the two apart."""
        return self.fit is not Fit.DOES_NOT_FIT

    def explain(self) -> Explanation:
        """Why the step takes as long as it does, in sentences and numbers."""
        return replace(explain(self.run), loop_s=self.costs.calibration.step_s, checkpoint_s=self._checkpoint_s)

    def show(self, **options: Any) -> None:
        """The timeline over the memory, as a figure; of ranks that differ, as bands (needs plotly).

        Args:
            options: of ``fsdp_sim.viz.timeline``, or with a skew of ``rank_bands``.
        """
        from fsdp_sim import show  # which knows the figures: they come after this room

        show(self, **options)


def simulate(
    model: str | Model | Workload,
    cluster: Cluster,
    plan: Plan | None = None,
    *,
    calibration: Calibration | None = None,
    skew: Skew | None = None,
) -> Simulation:
    """Predict one training step.

    Args:
        model: a name of the catalogue, dimensions, or the workload that `fsdp_sim.measure.model_from_module` traced.
        cluster: GPUs and links.
        plan: how the model is trained; torch's defaults if not given.
        calibration: the fitted numbers; by default those fitted to all published measurements.
        skew: how ranks differ, in place of `Calibration.slowest_per_doubling`; then each of them is played, with what
            operations took on one rank beside the others (contention is not played again). It makes seconds for each
            rank of the seconds and the number of ranks: ``lambda seconds, ranks: jitter(seconds, ranks, sigma=0.05)``,
            with `jitter`, `straggler` and `slow_node` of `fsdp_sim.engine`.

    Raises:
        ValueError: an impossible request; names the field, the value and what would be right.

    Example:
        >>> sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), Plan(micro_batch=8, param_dtype="bf16"))
        >>> sim.fits, 0.05 < sim.step_time_s < 0.5
        (True, True)
    """
    plan = plan or Plan()
    if isinstance(model, str):
        model = Model.preset(model)
    for name, value, kinds, right in (
        ("model", model, (Model, Workload), "a name of the catalogue, a Model, or what model_from_module traced"),
        ("cluster", cluster, (Cluster,), "a Cluster, such as Cluster('H100', gpus=8)"),
        ("plan", plan, (Plan,), "a Plan, such as Plan(micro_batch=2)"),
    ):
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is {in_brief(value)}; it must be {right}")
    asked = model, plan
    if isinstance(model, Model):
        check_blocks(model.n_layer + model.n_encoder_layer, plan)
        check_each(model, plan)
        model = transformer_workload(model, plan)
    if plan.shard_size is not None and cluster.gpus % plan.shard_size:
        raise ValueError(
            f"Plan.shard_size is {plan.shard_size}, which does not divide the {cluster.gpus} GPUs of the cluster; "
            f"take a divisor, for example {_divisor(cluster.gpus, plan.shard_size)}"
        )
    if "HYBRID" in plan.sharding_strategy and plan.shard_size is None:  # as torch: within a node
        plan = replace(plan, shard_size=min(cluster.node_size, cluster.gpus))
    if plan.expandable_segments and cluster.kind == "cpu" and "expandable_segments" in plan.unlike_its_stack:
        raise ValueError(
            "Plan.expandable_segments is True, a setting of torch's allocator for GPUs, and this cluster computes on "
            "CPU cores; leave it False"
        )
    if plan.activation_offload and cluster.kind == "cpu":
        raise ValueError(
            f"Plan.activation_offload is {plan.activation_offload!r}, from a GPU's memory to the CPU's, and this "
            "cluster computes on CPU cores; make it None"
        )
    _check_checkpointing(model, plan)
    if (model.attention_impl == "math") != (plan.attention_impl == "math"):
        raise ValueError(
            f"Plan.attention_impl is {plan.attention_impl!r}, but {model.name} was traced with "
            f"{model.attention_impl!r}; give the plan to model_from_module too"
        )
    if model is asked[0]:
        _check_settings(model, plan)
    cluster.gpu.peak_flops(model.dtype)  # a GPU without the dtype says so now
    if plan.float32_matmul_precision == "high":
        if model.dtype != "fp32":
            raise ValueError(
                f"Plan.float32_matmul_precision is 'high', which is for fp32, and {model.name} computes in "
                f"{model.dtype}; leave it 'highest'"
            )
        cluster.gpu.peak_flops("tf32")
    if plan.fp8:
        check_fp8(plan.fp8, cluster.gpu)
    return Simulation(model, cluster, plan, calibration, skew, asked)


@lru_cache(maxsize=256)
def _contention_of(collectives: CollectiveCosts) -> engine.Contention:
    return engine.Contention(compute_slowdown_by_collective=collectives.slowdown, nic_share=collectives.nic_share)


def peak_dtype(dtype: str, plan: Plan) -> str:
    """In which dtype the peak is that `Simulation.mfu` is a share of: that of compute; where matmuls are in fp8 bf16's,
    as is usual, and where they are in TF32 TF32's.
    """
    if dtype != "fp32":
        return dtype
    return "bf16" if plan.fp8 else "tf32" if plan.float32_matmul_precision == "high" else dtype


def _check_settings(workload: Workload, plan: Plan) -> None:
    """What a plan says of the work itself must have been known when the work was written down."""
    for name in OF_WORK:
        asked, known = getattr(plan, name), workload.written_for.get(name, getattr(Plan, name))
        if asked != known:
            raise ValueError(
                f"Plan.{name} is {asked!r}, but the work of {workload.name} was written for {known!r}; "
                f"{OF_WORK[name]}, or leave it {known!r}"
            )


def _check_checkpointing(workload: Workload, plan: Plan) -> None:
    """Blocks that checkpointing cannot reach are not left out in silence."""
    if plan.activation_checkpointing is None or (
        workload.once("blocks", lambda: blocks_of(workload.units)) and not workload.loose_blocks
    ):
        return
    which = f"{workload.loose_blocks[0]} of {workload.name} is" if workload.loose_blocks else f"{workload.name} is all"
    raise ValueError(
        f"Plan.activation_checkpointing is {plan.activation_checkpointing!r}, but {which} part of the root, whose "
        f"compute was traced in one piece; make units of the blocks (wrap), or put torch's checkpoint around them in "
        f"the module, which the trace sees, and leave activation_checkpointing None"
    )


def _lasted(run: Run) -> Callable[[Instruction], float]:
    """How long each operation lasted in a run, on average over its occurrences: contention included."""
    seen: dict[tuple[object, ...], list[float]] = defaultdict(list)
    columns = run.columns
    for i, start, end in zip(run.ops, columns.start_s, columns.end_s, strict=True):
        seen[i.op, i.unit, i.bytes, i.group_size].append(float(end) - float(start))
    mean = {key: sum(some) / len(some) for key, some in seen.items()}
    return lambda i: mean[i.op, i.unit, i.bytes, i.group_size]


def _divisor(number: int, near: int) -> int:
    """The divisor of ``number`` nearest to ``near``."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))
