"""What one rank's part of a processor reaches in training, fitted to the steps of `fsdp_sim.measure.train_probe`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fsdp_sim.cost import MEASURED, Kernel
from fsdp_sim.measure.fit import least_squares_above_zero
from fsdp_sim.measure.train_probe import ProbeShape, ProbeTime, ShardedTime, workload_of
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import COLLECTIVES, Op

BOTH = (Op.FWD, Op.BWD)


class RankRates(NamedTuple):
    """What a rank reaches in training.

    Attributes:
        matmul_flops: FLOP/s in fp32 of matrices large in every dimension.
        matmul_ramp: a matmul's start and end cost as much as so many elements of each dimension more.
        bytes_per_s: of pointwise kernels, norms, copies, the loss.
        launch_s, backward_launch_s: what Python, autograd and the dispatcher take for each kernel; None where the times
            say nothing about it.
    """

    matmul_flops: float
    matmul_ramp: float
    bytes_per_s: float
    launch_s: float | None
    backward_launch_s: float | None


class Amounts(NamedTuple):
    """What kernels do, in the quantities that have a rate.

    Attributes:
        matmul_edges: FLOPs over the length of each dimension, added up: what a matmul does at its edges.
    """

    launches: float
    bytes: float
    matmul_edges: float
    matmul_flops: float
    attention_flops: float


def amounts_of(kernels: Iterable[Kernel], *, backward: bool) -> Amounts:
    """Added up. Attention's backward is slower per FLOP, and counts for so much more."""
    launches = moved = edges = matmul = attention = 0.0
    for kernel in kernels:
        launches += kernel.count
        if kernel.kind == "matmul":
            matmul += kernel.flops * kernel.count
            edges += kernel.flops * kernel.count * sum(1 / side for side in kernel.shape[1:])
        elif kernel.kind == "attention":
            attention += kernel.flops * kernel.count * (MEASURED.attention_backward if backward else 1.0)
        else:
            moved += kernel.bytes * kernel.count
    return Amounts(launches, moved, edges, matmul, attention)


def amounts_of_probe(shape: ProbeShape) -> tuple[Amounts, Amounts]:
    """Of its forward and its backward."""
    work = workload_of(shape).work.values()
    forward = (kernel for one in work for kernel in one.forward)
    backward = (kernel for one in work for kernel in one.backward)
    return amounts_of(forward, backward=False), amounts_of(backward, backward=True)


def fit_rates(probes: Sequence[ProbeTime], attention_flops: float, stream_bytes_per_s: float) -> RankRates:
    """The rates whose forwards and backwards take nearest to the measured times, relative to them.

    Args:
        attention_flops: of the kernel measured alone: attention is too small a part to be fitted.
        stream_bytes_per_s: of a copy; no kernel that moves bytes is faster.

    Raises:
        ValueError: no rates make such times.
    """
    rows, seconds = [], []
    for probe in probes:
        for backward, (of, measured_s) in enumerate(zip(amounts_of_probe(probe.shape), probe[1:], strict=True)):
            launches = (0.0, of.launches) if backward else (of.launches, 0.0)
            rows.append([*launches, of.bytes, of.matmul_edges, of.matmul_flops])
            known_s = of.attention_flops / attention_flops + of.bytes / stream_bytes_per_s
            seconds.append(max(measured_s - known_s, 0.1 * measured_s))
    launch_s, backward_launch_s, byte_s, edge_s, flop_s = least_squares_above_zero(
        np.array(rows), np.array(seconds), first_needed=4
    ).tolist()
    bytes_per_s = 1 / (byte_s + 1 / stream_bytes_per_s)
    return RankRates(1 / flop_s, edge_s / flop_s, bytes_per_s, launch_s or None, backward_launch_s or None)


def probe_s(shape: ProbeShape, cluster: Cluster) -> tuple[float, float]:
    """What the simulator makes of a probe's forward and backward."""
    simulation = Simulation(workload_of(shape), cluster, Plan(api="ddp", seq_len=shape.seq_len))
    return tuple(sum(simulation.costs.seconds(i) for i in simulation.program.ops if i.op is op) for op in BOTH)  # type: ignore[return-value]


def sharded_s(shape: ProbeShape, cluster: Cluster) -> tuple[float, int]:
    """What the simulator makes of a sharded probe's step, and how many collectives it has.

    On CPU cores torch's FSDP waits for each of them, so the step is the sum of its parts.
    """
    plan = Plan(api="fsdp2", seq_len=shape.seq_len)
    simulation = Simulation(workload_of(shape, plan), cluster, plan)
    ops = [i for i in simulation.program.ops if i.op is not Op.OPTIM]
    costs = simulation.costs
    return sum(costs.seconds(i) + costs.issue_s(i) for i in ops), sum(i.op in COLLECTIVES for i in ops)


def fit_collective_s(times: Sequence[ShardedTime], cluster: Cluster) -> float:
    """What a collective costs a rank beside its time on the wire: the median of the probes.

    Args:
        cluster: as fitted so far, without `Gpu.collective_s`.
    """
    found = []
    for time in times:
        others_s, collectives = sharded_s(time.shape, cluster)
        found.append((time.seconds - others_s) / collectives)
    return max(0.0, statistics.median(found))
