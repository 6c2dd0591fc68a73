"""How much work there is for each byte, of memory and of the network, in what a simulated step does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsdp_sim.cost import Kernel, collective_s, kernel_s, recomputed
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import COLLECTIVES, Op, Phase

SEGMENTS = {Op.FWD, Op.BWD, Op.RECOMPUTE}
A_LARGE_MESSAGE = 2.0**40  # bytes, of which latency has no part


class KernelPoint(NamedTuple):
    """Kernels alike in a step.

    Attributes:
        kernel: one of them.
        backward: whether they run in backward.
        calls: how many in a step.
        seconds: what all of them take.
        units: segments that run them.
    """

    kernel: Kernel
    backward: bool
    calls: int
    seconds: float
    units: tuple[str, ...]

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory."""
        return self.kernel.flops / self.kernel.bytes if self.kernel.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.kernel.flops * self.calls / self.seconds if self.seconds else 0.0


class UnitPoint(NamedTuple):
    """One phase of one unit: what it computes, and what it has to communicate for that.

    Attributes:
        bytes: of whole messages: all-gather outputs, reduce-scatter inputs, all-reduce buffers.
        compute_s, comm_s: what both take alone.
    """

    unit: str
    phase: Phase
    flops: float
    bytes: int
    compute_s: float
    comm_s: float

    @property
    def intensity(self) -> float:
        """FLOP per byte communicated."""
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def flops_per_s(self) -> float:
        """What it can reach with all communication behind all compute: bound by the longer of the two."""
        longer_s = max(self.compute_s, self.comm_s)
        return self.flops / longer_s if longer_s else 0.0

    @property
    def hidden(self) -> bool:
        """Whether its communication is short enough to hide behind its own compute."""
        return self.comm_s <= self.compute_s


def kernel_points(sim: Simulation) -> list[KernelPoint]:
    """The kernels of a step that compute and move bytes, those alike together; the ones that take longest first."""
    plan, costs = sim.plan, sim.costs
    alike: dict[tuple[Kernel, bool], list[str]] = defaultdict(list)
    for op, unit, *_ in _last_step(sim):
        if op in SEGMENTS:
            for kernel in _kernels(sim, op, unit):
                alike[kernel._replace(count=1, op=""), op is Op.BWD] += [unit] * kernel.count
    found = []
    for (kernel, backward), units in alike.items():
        how = {"backward": backward, "compiled": plan.compile, "attention": plan.attention_impl}
        one_s = kernel_s(kernel, sim.cluster.gpu, costs.calibration, **how)  # type: ignore[arg-type]
        found.append(KernelPoint(kernel, backward, len(units), one_s * len(units), tuple(dict.fromkeys(units))))
    return sorted(found, key=lambda point: -point.seconds)


def unit_points(sim: Simulation) -> list[UnitPoint]:
    """Forward and backward of each unit in a step, in the order in which they are issued.

    Where what communicates are not the units that compute (DDP's buckets), each phase counts as one unit.
    """
    unit_of = {segment: unit.name for unit in sim.workload.units for segment in unit.names_of_segments}
    flops: dict[tuple[str, Phase], float] = defaultdict(float)
    sizes: dict[tuple[str, Phase], int] = defaultdict(int)
    compute: dict[tuple[str, Phase], float] = defaultdict(float)
    comm: dict[tuple[str, Phase], float] = defaultdict(float)
    for op, unit, phase, n_bytes, _, alone_s in _last_step(sim):
        key = (unit_of.get(unit, unit), phase)
        if op in SEGMENTS:
            flops[key] += sum(k.flops * k.count for k in _kernels(sim, op, unit))
            compute[key] += alone_s
        elif op in COLLECTIVES:
            sizes[key] += n_bytes
            comm[key] += alone_s
    columns = (flops, sizes, compute, comm)
    if set(sizes) - set(flops):
        columns = tuple(_by_phase(column) for column in columns)  # type: ignore[assignment]
    keys = dict.fromkeys([*columns[0], *columns[1]])
    return [UnitPoint(*key, *(column.get(key, 0) for column in columns)) for key in keys]  # type: ignore[arg-type]


def peak_of(sim: Simulation, kernels: Sequence[KernelPoint]) -> tuple[float, str]:
    """The roof of the dtype that most of the work is in, and its name."""
    work: dict[str, float] = {}
    for point in kernels:
        if point.kernel.flops and point.kernel.dtype in sim.cluster.gpu.dtypes:
            work[point.kernel.dtype] = work.get(point.kernel.dtype, 0.0) + point.kernel.flops * point.calls
    dtype = max(work, key=lambda d: work[d], default=sim.workload.dtype)
    return sim.cluster.gpu.peak_flops(dtype), dtype


def compute_flops_per_s(units: Sequence[UnitPoint]) -> float:
    """FLOP/s of the whole step while it computes."""
    seconds = sum(u.compute_s for u in units)
    return sum(u.flops for u in units) / seconds if seconds else 0.0


def alike(points: Sequence[UnitPoint]) -> list[list[UnitPoint]]:
    """Units of a phase that compute and communicate as much as each other."""
    found: dict[tuple[float, int], list[UnitPoint]] = {}
    for p in points:
        found.setdefault((p.flops, p.bytes), []).append(p)
    return list(found.values())


def _by_phase(column: Mapping[tuple[str, Phase], float]) -> dict[tuple[str, Phase], float]:
    summed: dict[tuple[str, Phase], float] = {}
    for (_, phase), value in column.items():
        summed["all units", phase] = summed.get(("all units", phase), 0) + value
    return summed


def network_bytes_per_s(sim: Simulation) -> float:
    """Bytes of message per second of the step's collectives, were they all large; 0 where nothing communicates."""
    sizes: dict[tuple[Op, int, int], int] = defaultdict(int)
    for op, _, _, n_bytes, group_size, _ in _last_step(sim):
        if op in COLLECTIVES and group_size > 1:  # replicas of a shard lie a shard group apart
            sizes[op, group_size, sim.plan.shard_size or 1 if op is Op.ALL_REDUCE else 1] += n_bytes
    seconds = sum(
        n_bytes * collective_s(op.lower(), A_LARGE_MESSAGE, group_size, sim.cluster, stride=stride) / A_LARGE_MESSAGE
        for (op, group_size, stride), n_bytes in sizes.items()
    )
    return sum(sizes.values()) / seconds * sim.costs.calibration.link_fraction if seconds else 0.0


def _last_step(sim: Simulation) -> list[tuple[Op, str, Phase, int, int, float]]:
    """Of each operation of the last step: op, unit, phase, bytes, ranks of its group, and its seconds alone."""
    ops, seconds = sim.program.ops, sim.costs.seconds
    return [(i.op, i.unit, i.phase, i.bytes, i.group_size, seconds(i)) for i in ops if i.step == ops[-1].step]


def _kernels(sim: Simulation, op: Op, segment: str) -> Iterable[Kernel]:
    work = sim.workload.work[segment]
    if op is Op.BWD:
        return work.backward
    return recomputed(work, sim.plan) if op is Op.RECOMPUTE else work.forward
