"""Answers about practice, computed in another way than the templates do: by stepping through what happens."""

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from tests.learn.drill.oracles.shapes import shapes_of


@functools.cache
def bytes_of_a_checkpoint(model: str, ranks: int, kind: str) -> float:
    """Tensor by tensor, each rank's rows padded to the largest."""
    total = 0
    for shape in shapes_of(model):
        rows = math.ceil(shape[0] / ranks) if kind == "the file of one rank" else shape[0]
        dtypes = (torch.bfloat16,) if kind == "an export" else (torch.float32,) * 3  # weight, exp_avg, exp_avg_sq
        total += sum(dtype.itemsize for dtype in dtypes) * rows * math.prod(shape[1:])
    return total


@functools.cache
def checkpoint_interval(cost_s: float, mtbf_s: float) -> float:
    """The interval that loses least, by trying all; losses averaged over the moments at which a failure can come."""
    intervals = np.geomspace(10, mtbf_s, 20_000)
    moments = (np.arange(200) + 0.5) / 200  # in an interval
    lost = cost_s / intervals + np.mean(moments) * intervals / mtbf_s
    return float(intervals[np.argmin(lost)])


@functools.cache
def time_lost(cost_s: float, every_s: float, mtbf_s: float, restart_s: float) -> float:
    """Step through a long time in which failures come evenly over all moments of an interval."""
    failures = 400
    trained_s = failures * mtbf_s
    saved_s = trained_s / every_s * cost_s
    again_s = sum((n + 0.5) / failures * every_s + restart_s for n in range(failures))
    return 100 * (saved_s + again_s) / trained_s


@functools.cache
def mtbf_of_a_job(failures: int, days: int, of: int, gpus: int, job_days: int) -> float:
    """Failures per GPU and second, added up over the GPUs."""
    rate = sum(itertools.repeat(Fraction(failures, days * 86400 * of), gpus // 256)) * 256
    return float(rate * job_days * 86400) if job_days else float(1 / rate)


@functools.cache
def seconds_to_write(model: str, nodes: int, node_gb_s: float, total_gb_s: float) -> float:
    """Tick by tick: each node sends what it may, the file system takes what it can."""
    left = 12 * sum(math.prod(shape) for shape in shapes_of(model)) / nodes  # of each node, they are alike
    ticks, tick_s = 0, left / (node_gb_s * 1e9) / 400
    while left > 1:
        sent = min(left, node_gb_s * 1e9 * tick_s)
        left -= sent * min(1, total_gb_s * 1e9 * tick_s / (nodes * sent))
        ticks += 1
    return ticks * tick_s


@functools.cache
def accumulation_for_a_batch(batch: int, gpus: int, micro: int, seq_len: int, tensor: int) -> int:
    """Go on until there are enough tokens."""
    groups = list(itertools.batched(range(gpus), tensor)) if hasattr(itertools, "batched") else range(0, gpus, tensor)
    tokens = rounds = 0
    while tokens < batch:
        tokens += sum(micro * seq_len for _ in groups)
        rounds += 1
    assert tokens == batch
    return rounds


@functools.cache
def rate_after_scaling(rate: float, before: int, after: int, rule: str, kept: str) -> float:
    """From a batch of 64 sequences per GPU: how many a step then sees, doubling by doubling."""
    was = 64 * before
    now = was if kept == "global" else 64 * after
    while was < now:
        was *= 2
        rate *= 2 if rule == "linear" else 2**0.5
    return rate


@functools.cache
def factor_of_clipping(norms: tuple[float, ...], most: float) -> float:
    """torch clips a gradient made of such shards."""
    weight = torch.nn.Parameter(torch.zeros(4 * len(norms), dtype=torch.float64))
    shards = [torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64) * norm / 2 for norm in norms]
    weight.grad = torch.cat(shards)
    torch.nn.utils.clip_grad_norm_([weight], most)
    return float(weight.grad[0] / shards[0][0])


@functools.cache
def scale_of_a_summed_loss(tokens: tuple[int, ...], rank: int, asked: str) -> float:
    """With a gradient of its own for each token; autograd, then the mean over the ranks."""

    def gradients(loss_of: str) -> torch.Tensor:
        weights = torch.zeros(sum(tokens), dtype=torch.float64, requires_grad=True)
        for mine in weights.split(tokens):
            loss = {"sum": mine.sum, "mean": mine.mean}[loss_of]()
            (loss / len(tokens)).backward()
        assert weights.grad is not None
        return weights.grad

    right = 1 / sum(tokens)
    if asked == "factor":
        return right / float(gradients("sum")[0])
    return float(gradients("mean").split(tokens)[rank][0]) / right


@functools.cache
def update_that_arrives(pairs: tuple[tuple[str, float, float], ...]) -> str:
    (found,) = (
        name
        for name, weight, update in pairs
        if (torch.tensor(weight).bfloat16() + torch.tensor(update)).bfloat16().item() != weight
    )
    return found


@functools.cache
def largest_scale(gradient: float) -> float:
    scale = 1.0
    while (torch.tensor(gradient) * 2 * scale).half().isfinite():
        scale *= 2
    return scale


@functools.cache
def scale_after_steps(overflows: tuple[int, ...], steps: int) -> float:
    """torch's own update of the scale, step by step."""
    scale, growth = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    found = {True: torch.tensor(1.0), False: torch.tensor(0.0)}
    for step in range(1, steps + 1):
        torch._amp_update_scale_(scale, growth, found[step in overflows], 2.0, 0.5, 2000)
    return scale.item()


@functools.cache
def samples_of_an_epoch(samples: int, ranks: int, drop: bool) -> int:
    drawn = [n for rank in range(ranks) for n in DistributedSampler(range(samples), ranks, rank, drop_last=drop)]
    return samples - len(set(drawn)) if drop else len(drawn) - len(set(drawn))


@functools.cache
def sample_after_a_resume(before: int, after: int, micro: int, accumulated: int, step: int, rank: int) -> int:
    """Hand out the stream, micro-batch by micro-batch."""
    stream = itertools.count()
    read = {r: 0 for r in range(max(before, after))}

    def hand_out(ranks: int) -> None:
        for r in range(ranks):
            read[r] = next(stream)
            for _ in range(micro - 1):
                next(stream)

    for _ in range(min(step, 3) * accumulated):  # all steps are alike
        hand_out(before)
    start = next(stream)
    stream = itertools.count(start // min(step, 3) * step)
    hand_out(after)
    return read[rank]


@functools.cache
def update_without_moments(rate: float, b1: float, b2: float, counted: bool) -> float:
    """torch's Adam, with a state that is set."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=rate, betas=(b1, b2), eps=0)
    weight.grad = torch.full_like(weight, 0.37)
    if counted:
        zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        optimizer.state[weight] = {"step": torch.tensor(100_000.0), **zeros}
    optimizer.step()
    return abs(weight.item())
