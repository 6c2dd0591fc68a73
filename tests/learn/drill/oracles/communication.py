"""Answers about communication: rings are stepped through, programs are built, torch is asked."""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_sim.mini.siblings.zero import ZeroOptimizer
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.spec.links import link_of_text
from fsdp_sim.timeline import Op

OPS = {Op.ALL_GATHER: "all-gather", Op.REDUCE_SCATTER: "reduce-scatter", Op.ALL_REDUCE: "all-reduce"}


@functools.cache
def steps_of(op: str, ranks: int) -> int:
    """Pass chunks to the right until the collective is done; each rank sends one chunk in each step."""
    if op == "all-reduce":
        return steps_of("reduce-scatter", ranks) + steps_of("all-gather", ranks)
    steps = 0
    if op == "all-gather":
        held = [{rank} for rank in range(ranks)]
        newest = list(range(ranks))
        while any(len(chunks) < ranks for chunks in held):
            newest = [newest[rank - 1] for rank in range(ranks)]
            for rank, chunk in enumerate(newest):
                held[rank].add(chunk)
            steps += 1
        return steps
    sums = [1] * ranks  # how many ranks are in the sum that a rank is about to send on
    while sums[0] < ranks:
        sums = [sums[rank - 1] + 1 for rank in range(ranks)]
        steps += 1
    return steps


def sent_by_a_rank(op: str, ranks: int, message: float) -> float:
    return steps_of(op, ranks) * message / ranks


def sent_in_an_all_reduce(ranks: int, message_bytes: float) -> float:
    return sent_by_a_rank("all-reduce", ranks, message_bytes)


def sent_from_a_shard(op: str, ranks: int, shard_bytes: float) -> float:
    return steps_of(op, ranks) * shard_bytes


def owner_against_ring(ranks: int, megabytes: int) -> float:
    """Seconds at 1 MB/s, event by event."""
    owner_s = sum(megabytes for other in range(1, ranks))
    ring_s = sum(megabytes / ranks for step in range(steps_of("all-gather", ranks)))
    return owner_s / ring_s


@functools.cache
def per_parameter(ranks: int, root: int = 1, layers: int = 3, **settings: Any) -> float:
    """Bytes that a rank sends per parameter in a step: the collectives of torch's program, each stepped as a ring."""
    matrix = (1024, 4)
    units = [Unit(f"layers.{i}", (Param("weight", matrix),)) for i in range(layers)]
    outer = tuple(Param(f"embed{i}", matrix) for i in range(root))
    ops = build([Unit("root", outer, ("embed", ..., "head")), *units], Plan(**settings), ranks).ops
    sent = sum(sent_by_a_rank(OPS[i.op], i.group_size, i.bytes) for i in ops if i.op in OPS and i.group_size > 1)
    return sent / (1024 * 4 * (layers + root))


def _fsdp(param_dtype: str, reduce_dtype: str, kept: bool, ranks: int) -> float:
    return per_parameter(ranks, param_dtype=param_dtype, reduce_dtype=reduce_dtype, reshard_after_forward=not kept)


def _ddp(dtype: str, ranks: int) -> float:
    """The program reduces fp32 gradients."""
    return per_parameter(ranks, api="ddp") * (0.5 if dtype == "bf16" else 1)


def times_ddp(param_dtype: str, reduce_dtype: str, ddp_dtype: str, kept: bool) -> float:
    return _fsdp(param_dtype, reduce_dtype, kept, 8) / _ddp(ddp_dtype, 8)


def sent_in_a_step(parameters: int, ranks: int, param_dtype: str, reduce_dtype: str, kept: bool) -> float:
    return parameters * _fsdp(param_dtype, reduce_dtype, kept, ranks)


def root_below_three_halves(layers: int, root: int) -> float:
    return per_parameter(8, root=root, layers=layers) / per_parameter(8, root=root, layers=layers, api="ddp")


def sent_while_accumulating(parameters: int, ranks: int, batches: int, each: bool) -> float:
    sync = True if each else "last"
    return parameters * per_parameter(
        ranks, reshard_after_forward=True, param_dtype="bf16", reduce_dtype="fp32", grad_accum=batches,
        requires_gradient_sync=sync,
    )  # fmt: skip


@functools.cache
def ways_by_bytes_sent(ways: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    def sent(way: str) -> float:
        if way.startswith("DDP"):
            return _ddp("bf16" if "bf16" in way else "fp32", 8)
        gathers = "bf16" if "bf16" in way else "fp32"
        return _fsdp(gathers, "fp32" if "fp32" in way else "bf16", "kept" in way, 8)

    assert ranks >= 8
    return tuple(sorted(ways, key=sent))


@functools.cache
def between_backward_and_forward(way: str, clips: bool) -> str:
    """Ask torch (and, for ZeRO, the mini), on the fake process group, which sends nothing and counts all."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        params = model.parameters()
        step: Callable[[], object]
        if way.startswith("ZeRO"):
            zero = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=int(way[-1]))
            step = zero.step
        else:
            if way != "DDP":
                shape, names = ((2, 4), ("replicate", "shard")) if way == "HSDP" else ((8,), ("shard",))
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                for module in (*model, model):
                    fully_shard(module, mesh=mesh)
            params = model.parameters()
            step = torch.optim.AdamW(model.parameters()).step
        model(torch.ones(2, 8)).sum().backward()
        with CommDebugMode() as seen:
            if clips:
                nn.utils.clip_grad_norm_(params, 1.0)
            step()
        issued = {str(op).rpartition(".")[2] for op, count in seen.get_comm_counts().items() if count}
    finally:
        dist.destroy_process_group()
    if not issued:
        return "nothing"
    if all("all_reduce" in name for name in issued):
        return "one all-reduce of norms, a number for each parameter"
    return "an all-gather of the updated parameters"


def hsdp_through_an_adapter(parameters: int, nodes: int, reduce_dtype: str) -> float:
    """The all-reduces of torch's program are what crosses between nodes."""
    matrix = (1024, 4)
    units = [Unit("root", (Param("w", matrix),), ("embed", ..., "head")), Unit("layers.0", (Param("w", matrix),))]
    return parameters * _crossing(nodes, reduce_dtype, tuple(units)) / (2 * 1024 * 4)


@functools.cache
def _crossing(nodes: int, reduce_dtype: str, units: tuple[Unit, ...]) -> float:
    plan = Plan(shard_size=8, param_dtype="bf16", reduce_dtype=reduce_dtype)
    ops = build(units, plan, 8 * nodes).ops
    assert {i.group_size for i in ops if i.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)} == {8}
    return sum(sent_by_a_rank("all-reduce", i.group_size, i.bytes) for i in ops if i.op is Op.ALL_REDUCE)


@functools.cache
def _border(nodes: int) -> Fraction:
    """Share of a message that crosses from a node to the next while a ring gathers it: follow every chunk."""
    ranks, crossed = 8 * nodes, 0
    for chunk in range(ranks):
        at = chunk
        while (at + 1) % ranks != chunk:
            crossed += at == 7  # from the last GPU of node 0
            at = (at + 1) % ranks
    return Fraction(crossed, ranks)


def fsdp_out_of_a_node(parameters: int, nodes: int, kept: bool) -> float:
    of_message = _fsdp("bf16", "fp32", kept, 8) * 8 / 7
    return parameters * of_message * float(_border(nodes))


@functools.cache
def seconds_of_a_ring(op: str, ranks: int, message_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Every rank's clock, step by step: it goes on when its own chunk is out and its neighbour's is in."""
    clocks = np.zeros(ranks)
    for _ in range(steps_of(op, ranks)):
        sent = clocks + (latency_s + message_bytes / ranks / bytes_per_s)
        clocks = np.maximum(sent, np.roll(sent, 1))
    return float(clocks.max())


@functools.cache
def message_worth_its_latency(op: str, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Search for the message that takes twice as long as an empty one."""
    empty_s = seconds_of_a_ring(op, ranks, 0, latency_s, bytes_per_s)
    low, high = 0.0, 1e12
    for _ in range(60):
        middle = (low + high) / 2
        longer = steps_of(op, ranks) * (latency_s + middle / ranks / bytes_per_s) > 2 * empty_s
        low, high = (low, middle) if longer else (middle, high)
    return low


@functools.cache
def what_makes_a_ring_faster(ranks: int, latency_us: int, megabytes: int, gbytes_per_s: float) -> str:
    def seconds(message: float, latency_s: float, rate: float) -> float:
        return seconds_of_a_ring("all-gather", ranks, message, latency_s, rate)

    message, latency_s, rate = megabytes * 1e6, latency_us * 1e-6, gbytes_per_s * 1e9
    took = {
        "links of twice the bandwidth": seconds(message, latency_s, 2 * rate),
        "half the latency in each step": seconds(message, latency_s / 2, rate),
        "the same message in two halves, one after the other": 2 * seconds(message / 2, latency_s, rate),
    }
    return min(took, key=took.__getitem__)


def bus_bandwidth(op: str, ranks: int, message_bytes: float, time_s: float) -> float:
    """What one link of the ring carried, over the time."""
    return sent_by_a_rank(op, ranks, message_bytes) / time_s


@functools.cache
def share_of_the_network(adapters: int, gbits: int) -> float:
    return link_of_text(f"{adapters}x{gbits}Gb/s", 8).bytes_per_s


def gather_over_nvlink(ranks: int, megabytes: int, sheet_gbytes_per_s: float) -> float:
    return seconds_of_a_ring("all-gather", ranks, megabytes * 1e6, 0.0, sheet_gbytes_per_s / 2 * 1e9)
