"""A small transformer that `calibrate` trains on CPU cores, and what it computes.

Kernels measured alone at their best say too little about training on a CPU: matrices are small, autograd transposes
them, pointwise kernels compute as much as they move, and Python takes its time for each. So the rates of a rank are
fitted to whole forwards and backwards, in several sizes (`time_plain`). And a collective between two computations costs
more than many in a row: hooks run around it, a rank that slept is woken, one that is late keeps the others waiting. So
the same transformer is also trained by torch's FSDP2 (`time_sharded`).

All ranks train at once, as in a step, each by its share of the cores, and the clock is the wall's.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_sim.cost import Workload
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.spec import Plan

HEAD_WIDTH = 32
WARM_UP = 2
ROUNDS = 4  # through all shapes: a while in which the machine is slow touches each of them a little


class ProbeShape(NamedTuple):
    """Rows of tokens, how wide the model is, and how deep."""

    rows: int
    seq_len: int
    width: int
    vocab: int
    layers: int = 1


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, d // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Probe(nn.Module):
    """Embedding, blocks, norm, head, cross-entropy."""

    def __init__(self, shape: ProbeShape) -> None:
        super().__init__()
        d = shape.width
        self.embed = nn.Embedding(shape.vocab, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of (rows, seq_len) tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


SHAPES = tuple(
    ProbeShape(*shape) for shape in (
        (1, 32, 64, 256, 3), (4, 64, 64, 256, 3), (4, 128, 64, 256, 3), (8, 16, 128, 256, 3), (2, 128, 128, 1024, 3),
        (8, 128, 128, 256, 3), (1, 32, 256, 1024, 3), (2, 256, 256, 256, 2), (1, 128, 768, 256, 1),
    )
)  # fmt: skip
"""What is trained on each rank alone: from a millisecond to a tenth of a second, and so deep that a block's weights and
activations have left the cache when their turn comes again, as in a real step."""

SHARDED = tuple(ProbeShape(*shape) for shape in ((4, 64, 64, 256, 4), (2, 64, 128, 256, 3), (4, 128, 192, 256, 2)))
"""And what all ranks share."""


class ProbeTime(NamedTuple):
    """Seconds of a forward and of a backward on a rank, the medians."""

    shape: ProbeShape
    forward_s: float
    backward_s: float


class ShardedTime(NamedTuple):
    """Seconds of a forward and a backward, the median: torch's FSDP2, each block a unit."""

    shape: ProbeShape
    seconds: float


def time_plain(shapes: Sequence[ProbeShape], budget_s: float) -> list[ProbeTime]:
    """Train each shape on this rank for about that long; other ranks do the same at the same time."""
    found: dict[ProbeShape, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for shape in shapes:
            found[shape] += _train(Probe(shape), shape, budget_s / ROUNDS)
    return [ProbeTime(shape, *map(statistics.median, zip(*times, strict=True))) for shape, times in found.items()]


def time_sharded(shapes: Sequence[ProbeShape], budget_s: float) -> list[ShardedTime]:
    """The same with torch's FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[ProbeShape, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for shape in shapes:
            model = Probe(shape)
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            found[shape] += map(sum, _train(model, shape, budget_s / ROUNDS))
    return [ShardedTime(shape, statistics.median(times)) for shape, times in found.items()]


def _train(model: nn.Module, shape: ProbeShape, budget_s: float) -> list[tuple[float, float]]:
    """Seconds of forwards and backwards, as many of each on all ranks."""
    tokens = torch.randint(0, shape.vocab, (shape.rows, shape.seq_len))

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        start_s = time.perf_counter()
        loss = model(tokens)
        middle_s = time.perf_counter()
        loss.backward()
        return middle_s - start_s, time.perf_counter() - middle_s

    once_s = sum([step() for _ in range(WARM_UP)][-1])
    steps = torch.tensor(max(3, int(budget_s / once_s)))
    if dist.is_initialized():
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    return [step() for _ in range(int(steps))]


@functools.cache
def workload_of(shape: ProbeShape, plan: Plan | None = None) -> Workload:
    """What a probe computes, traced without computing anything."""
    tokens = torch.zeros(shape.rows, shape.seq_len, dtype=torch.int64)
    wrap = "block" if plan is not None else "root"
    return model_from_module(Probe(shape), tokens, plan=plan, wrap=wrap, device="cpu", progress=False)
