"""What `calibrate` runs on each rank: kernels and collectives, timed. The same code on CPU cores and on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_sim.measure import train_probe
from fsdp_sim.measure.heap import keep_freed_memory
from fsdp_sim.measure.train_probe import ProbeTime, ShardedTime, time_plain, time_sharded
from fsdp_sim.measure.units import DTYPES

PLAIN, SHARDED = "train", "train sharded"
TRAINED_FOR = 4  # times the budget of a kernel, for each shape


class KernelTime(NamedTuple):
    """One kernel: what it did, in how many seconds, at its best of several."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    flops: float
    bytes: float
    seconds: float


class CollectiveTime(NamedTuple):
    """One collective: whole message, and seconds, the best of several rounds: what else runs only ever adds."""

    op: str
    group_size: int
    n_bytes: int
    seconds: float


Time = KernelTime | CollectiveTime | ProbeTime | ShardedTime


class Case(NamedTuple):
    """One thing to measure: a kernel, a collective of ``n_bytes`` in groups of ``group_size`` neighbours, or training,
    `PLAIN` or `SHARDED`, in all its shapes."""

    kind: str
    dtype: str = "fp32"
    shape: tuple[int, ...] = ()
    n_bytes: int = 0
    group_size: int = 0


def measure(
    cases: list[Case], device: str, budget_s: float, track: Callable[[list[Case]], Iterable[Case]] = iter
) -> list[Time]:
    """Measure each case on this rank, all ranks at the same time.

    Args:
        device: ``cpu`` or ``cuda``.
        budget_s: about how long each case is repeated for.
        track: goes through the cases and tells somebody how far it is.
    """
    groups = {size: _my_group(size) for size in dict.fromkeys(case.group_size for case in cases) if size}
    found: list[Time] = []
    for case in track(cases):
        if case.group_size:
            found.append(collective(case, groups[case.group_size], device, budget_s))
        elif case.kind in (PLAIN, SHARDED):
            keep_freed_memory()  # as the trainer does
            if case.kind == PLAIN:
                found += time_plain(train_probe.SHAPES, TRAINED_FOR * budget_s)
            else:
                found += time_sharded(train_probe.SHARDED, TRAINED_FOR * budget_s)
        else:
            found.append(kernel(case, device, budget_s))
    return found


def _my_group(size: int) -> dist.ProcessGroup:
    """Of the groups of ``size`` neighbours, the one this rank is in."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return groups[rank // size]


def kernel(case: Case, device: str, budget_s: float) -> KernelTime:
    """One kernel of a case. Between ranks nothing is shared but the machine."""
    dtype = DTYPES[case.dtype]
    size = dtype.itemsize
    flops = moved = 0.0
    run: Callable[[], Any]
    with torch.no_grad():
        if case.kind == "matmul":
            m, n, k = case.shape
            a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
            out = torch.empty(m, n, dtype=dtype, device=device)
            flops, moved = 2.0 * m * n * k, float(size * (m * k + k * n + m * n))
            run = lambda: torch.matmul(a, b, out=out)  # noqa: E731
        elif case.kind == "attention":
            q = torch.randn(*case.shape, device=device).to(dtype)
            batch, heads, length, head = case.shape
            flops, moved = 2.0 * batch * heads * length**2 * head, float(4 * q.numel() * size)  # causal: half of 4
            run = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
        elif case.kind == "memory":
            source = torch.zeros(*case.shape, dtype=dtype, device=device)
            target = torch.empty_like(source)
            moved = float(2 * source.numel() * size)
            run = lambda: target.copy_(source)  # noqa: E731
        elif case.kind in ("h2d", "d2h"):
            there, here = torch.zeros(*case.shape, device=device), torch.zeros(*case.shape).pin_memory()
            moved = float(there.numel() * there.itemsize)
            run = lambda: there.copy_(here) if case.kind == "h2d" else here.copy_(there)  # noqa: E731
        else:  # launch: what the CPU takes to issue an operation that does next to nothing
            one = torch.zeros(1, device=device)
            run = lambda: one.add_(1.0)  # noqa: E731
            return KernelTime(case.kind, case.dtype, (), 0.0, 0.0, _best_s(run, device, budget_s, wait=False))
        return KernelTime(case.kind, case.dtype, case.shape, flops, moved, _best_s(run, device, budget_s))


def collective(case: Case, group: dist.ProcessGroup, device: str, budget_s: float) -> CollectiveTime:
    """One collective, in all groups of that size at once, as HSDP's shard groups do.

    Several are issued in a row, so that leaving a barrier at different times does not count.
    """
    ranks = case.group_size
    numel = -(-case.n_bytes // 4 // ranks) * ranks
    whole, shard = torch.zeros(numel, device=device), torch.zeros(numel // ranks, device=device)
    run = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }[case.kind]
    once = _rounds(run, device, 2, 1)[1]
    rounds, calls = 8, max(1, int(budget_s / 8 / max(once, 1e-6)))
    agreed = torch.tensor([calls], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return CollectiveTime(case.kind, ranks, numel * 4, min(_rounds(run, device, rounds, int(agreed))))


def _rounds(run: Callable[[], Any], device: str, rounds: int, calls: int) -> list[float]:
    """Seconds per call of each round."""
    found = []
    for _ in range(rounds):
        dist.barrier()
        _wait(device)
        start_s = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(device)
        found.append((time.perf_counter() - start_s) / calls)
    return found


def _best_s(run: Callable[[], Any], device: str, budget_s: float, *, wait: bool = True) -> float:
    """The least seconds of one call: calls are timed in batches of about a millisecond until the budget is spent."""
    run()
    _wait(device)
    start_s = time.perf_counter()
    run()
    _wait(device)
    calls = max(1, int(1e-3 / max(time.perf_counter() - start_s, 1e-7)))
    best, end_s = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end_s or best == float("inf"):
        start_s = time.perf_counter()
        for _ in range(calls):
            run()
        if wait:
            _wait(device)
        best = min(best, (time.perf_counter() - start_s) / calls)
        _wait(device)
    return best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
