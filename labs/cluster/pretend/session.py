"""Rank 0 of the pretended cluster trains: a fake process group, FSDP2 with hooks, random tokens, a few steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_sim.measure import live_bytes
from fsdp_sim.measure.heap import keep_freed_memory
from fsdp_sim.measure.live_bytes import CUDAMeter
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Op, Phase, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step, step_time_s
from fsdp_sim.words import human_bytes
from labs.cluster.pretend.hooks import check_hooks, give_hooks
from labs.cluster.pretend.network import ClockWire, GpuWire, PretendedWire, Seconds, instant
from labs.cluster.pretend.recorder import Clock, GpuClock, Piece, PretendedTape, ThreadClock
from labs.cluster.pretend.streams import Clocks
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.result import this_machine
from labs.loop.optimizer import make_optimizer
from labs.measure.simulated import simulated
from labs.wrapping import Wrapped, wrap
from labs.wrapping.mesh import is_hybrid, shard_size

APIS = ("fsdp2", "hsdp")
ROOT = "root"
PADS = "fsdp.chunk_cat.default"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What rank 0 trains, and in which cluster.

    Attributes:
        config: the trainer's; its steps, data and files are not used.
        cluster: pretended; its number of GPUs is the number of ranks.
        device: of this process.
        unshard_async_op: FSDP2's ``_set_unshard_async_op``: all-gathers return a handle.
    """

    config: TrainConfig
    cluster: Cluster
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    unshard_async_op: bool = False

    @property
    def place(self) -> RankPlace:
        local = min(self.cluster.node_size, self.cluster.gpus)
        return RankPlace(0, self.cluster.gpus, 0, local, torchrun=True)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """(ranks,), or of HSDP (copies, ranks that share one)."""
        shards = shard_size(self.config, self.place)
        return (self.place.world_size // shards, shards) if is_hybrid(self.config) else (shards,)

    @cached_property
    def simulation(self) -> Simulation:
        """The same on the pretended cluster. On CPUs the kernels are those of CPUs, whatever the cluster's GPU."""
        here = simulated(self.config, self.config.model_config, self.place, self.device)
        plan = dataclasses.replace(here.plan, unshard_async_op=self.unshard_async_op)
        return simulate(here.workload, self.cluster, plan)

    def check(self) -> None:
        """See that it can be pretended here.

        Raises:
            ValueError: another api, ranks that do not divide the rows, a model that does not fit this device, or a
                torch without the hooks.
        """
        config, ranks = self.config, self.place.world_size
        check_hooks()
        if config.api not in APIS:
            raise ValueError(f"api={config.api}: the pretend cluster runs torch's FSDP2; use api=fsdp2 or api=hsdp")
        if config.plan.param_dtype == "fp16":
            raise ValueError("param_dtype=fp16: its loss scaling follows the loss, which means nothing here; use bf16")
        if ranks < 2:
            raise ValueError(f"gpus={ranks}: a cluster of one rank communicates nothing; pretend 2 or more")
        if config.global_batch % ranks:
            raise ValueError(
                f"global_batch={config.global_batch}: {ranks} ranks do not divide it; use "
                f"{max(1, round(config.global_batch / ranks)) * ranks}"
            )
        rows = config.global_batch // ranks
        if rows % (config.micro_batch or rows):
            raise ValueError(f"micro_batch={config.micro_batch} does not divide the {rows} rows of a rank; use {rows}")
        self._check_memory()

    def _check_memory(self) -> None:
        """The whole model is built in host memory before it is cut, unless on the meta device."""
        on_gpu = self.device.type == "cuda"
        whole = 0 if self.config.meta_init or on_gpu else 4 * self.simulation.workload.param_count
        needed = whole + self.simulation.peak_memory_bytes
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else psutil.virtual_memory().available
        if needed > free:
            raise ValueError(
                f"model={self.config.model}: rank 0 of {self.place.world_size} needs {human_bytes(needed)} here, "
                f"and {human_bytes(free)} are free; take a smaller model, or fewer or shorter rows"
            )


@dataclasses.dataclass(frozen=True)
class PretendedRun:
    """Some steps of rank 0.

    Attributes:
        timeline: of all steps.
        pieces: what each piece of a step took, for each step.
        loss: of the last step. It means nothing: the other ranks' parameters are copies of this rank's shards.
    """

    timeline: Timeline
    pieces: list[dict[Piece, float]]
    loss: float

    @property
    def step_time_s(self) -> float:
        """Of the median step, the first one left out."""
        return step_time_s(self.timeline, median_step(self.timeline))

    @property
    def exposed_comm_s(self) -> float:
        """Of the median step: a collective is on the wire and the rank does not compute."""
        return exposed_comm_s(self.timeline.select(step=median_step(self.timeline)), 0)


class Session:
    """Rank 0 in its process group; made by `session`."""

    def __init__(self, setup: Setup, wrapped: Wrapped, clocks: Clocks | None) -> None:
        self.setup, self.wrapped, self._clocks = setup, wrapped, clocks
        self.optimizer = make_optimizer(wrapped, setup.config)
        model: Any = wrapped.model
        self._units = {
            unit.name: model if unit.name == ROOT else model.get_submodule(unit.name)
            for unit in setup.simulation.workload.units
        }
        if setup.unshard_async_op:
            model._set_unshard_async_op(True)
        ops = [i for i in setup.simulation.program.ops if i.step == i.micro_batch == 0]
        self._forward, self._backward = ([i.unit for i in ops if i.op is op] for op in (Op.FWD, Op.BWD))
        rows = setup.config.global_batch // setup.place.world_size
        shape = (rows, setup.config.plan.seq_len + 1)
        generator = torch.Generator().manual_seed(setup.config.seed)
        tokens = torch.randint(0, setup.config.model_config.vocab_size, shape, generator=generator).to(setup.device)
        self._x, self._y = tokens[:, :-1], tokens[:, 1:]
        self._micro_batches = rows // (setup.config.micro_batch or rows)

    def train(self, steps: int, seconds: Seconds = instant) -> PretendedRun:
        """Train for some steps, recorded, over a wire on which messages take so long."""
        clock: Clock = GpuClock() if self._clocks is None else ThreadClock()
        tape = PretendedTape(clock)
        wire: PretendedWire
        if self._clocks is None:
            wire = GpuWire(seconds, tape)
        else:
            self._clocks.tape = tape
            wire = ClockWire(seconds, self._clocks, tape)
        with self._watched(tape, wire):
            for step in range(steps):
                tape.step = step
                loss = self._step(tape)
            tape.mark(None)
        value = float(loss)  # on a GPU this waits for it
        timeline = tape.timeline(self.setup.place.world_size, this_machine(self.setup.device), self.setup.device.type)
        return PretendedRun(timeline, tape.pieces(), value)

    def peak_bytes(self) -> int:
        """The most bytes of tensors alive in a step; train one before, which makes the optimizer's state and, on a GPU,
        has the wire's rates measured, for which it takes memory.

        Left out on CPUs: copies in which torch's kernel there pads and casts gradients before it cuts them for the
        reduce-scatter; the kernel of GPUs makes none.
        """
        with live_bytes(self.wrapped.model, self.optimizer, device=self.setup.device.type) as meter:
            self.train(1)
        if isinstance(meter, CUDAMeter):
            return meter.peak_bytes
        change = np.zeros(len(meter.history()) + 1, dtype=np.int64)
        for a in meter.allocations:
            if a.op != PADS:
                change[a.born] += a.bytes
                change[-1 if a.died is None else min(a.died, len(change) - 1)] -= a.bytes
        return int(change[:-1].cumsum().max())

    def _step(self, tape: PretendedTape) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        n, weight = self._micro_batches, self.wrapped.replicas / (self.setup.config.global_batch * self._x.shape[1])
        for i, (x, y) in enumerate(zip(self._x.chunk(n), self._y.chunk(n), strict=True)):
            with self.wrapped.micro_batch(is_last=i == n - 1):
                tape.phase = Phase.FORWARD
                loss = self.wrapped.model(x, y, reduction="sum") * weight
                tape.phase = Phase.BACKWARD
                tape.mark(Op.BWD, self._backward[0])
                loss.backward()
                tape.end()
        tape.phase = Phase.OPTIMIZER
        tape.mark(Op.OPTIM)
        self.optimizer.step()
        return loss.detach()

    @contextmanager
    def _watched(self, tape: PretendedTape, wire: PretendedWire) -> Iterator[None]:
        """Give the units their collectives, and have the tape told which unit computes."""
        inner = {name: module for name, module in self._units.items() if name != ROOT}
        after_forward, after_backward = (_root_parts(order, inner) for order in (self._forward, self._backward))

        def reduced(unit: str) -> None:
            if unit in after_backward:
                tape.mark(Op.BWD, after_backward[unit])

        give_hooks(self._units, self.setup.mesh_shape, wire, tape, reduced)
        with ExitStack() as hooks:
            root: Any = self._units[ROOT]
            if self._forward[0] not in inner:
                hooks.callback(
                    root.register_forward_pre_hook(lambda *_: tape.mark(Op.FWD, self._forward[0])).remove
                )  # fmt: skip
            for name, module in inner.items():
                _watch(name, module, tape, after_forward.get(name), hooks)
            yield


def _root_parts(order: list[str], inner: dict[str, Any]) -> dict[str, str]:
    """What the root computes after each unit that it computes something after."""
    return {unit: part for unit, part in pairwise(order) if unit in inner and part not in inner}


def _watch(name: str, module: Any, tape: PretendedTape, root_part: str | None, hooks: ExitStack) -> None:
    """Marks inside of FSDP's own hooks, which were there before: FSDP's come first before a module, last after it."""

    def backward_of(module: Any, args: Any, output: Any) -> None:
        tape.end()
        if output.grad_fn is not None:  # after the tensor's own hooks, of which FSDP's pre-backward will be one
            output.grad_fn.register_prehook(lambda grads: tape.mark(Op.BWD, name))

    hooks.callback(module.register_forward_pre_hook(lambda *_: tape.mark(Op.FWD, name)).remove)
    hooks.callback(module.register_forward_hook(backward_of, prepend=True).remove)
    if root_part is not None:
        hooks.callback(module.register_forward_hook(lambda *_: tape.mark(Op.FWD, root_part)).remove)


@contextmanager
def session(setup: Setup) -> Iterator[Session]:
    """Be rank 0 of the pretended cluster. The process group ends with the block.

    Raises:
        ValueError: as `Setup.check`. RuntimeError: this process has a process group.
    """
    setup.check()
    if dist.is_initialized():
        raise RuntimeError(
            f"this process already has a process group of {dist.get_world_size()} ranks ({dist.get_backend()}); the "
            "pretend cluster makes a fake one of its own: call torch.distributed.destroy_process_group() first"
        )
    on_gpu = setup.device.type == "cuda"
    clocks = None if on_gpu else Clocks(PretendedTape(ThreadClock()))
    with ExitStack() as stack:
        if clocks is not None:
            keep_freed_memory()
            stack.enter_context(clocks.in_place_of_cpu())
        dist.init_process_group("fake", rank=0, world_size=setup.place.world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        _clear_sharding_prop_cache()  # DTensor's answers of earlier groups name process groups that are gone
        wrapped = wrap(setup.config, setup.config.model_config, setup.place, setup.device)
        yield Session(setup, wrapped, clocks)
