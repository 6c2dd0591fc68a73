"""A small transformer that `calibrate` trains on CPU cores: its forward and backward, timed, and what they compute.

Kernels measured alone at their best say too little about training on a CPU: matrices are small, autograd transposes
them, pointwise kernels compute as much as they move, and Python takes its time for each. So the rates of a rank are
fitted to whole forwards and backwards of one block between an embedding and a loss, in a few sizes.

It is trained by one thread, whose clock is the processor's time that this thread has had: on an idle machine that is
the time that passes, and on a busy one what other programs take is not in it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_sim.cost import Kernel
from fsdp_sim.measure.model_from_module import model_from_module

HEAD_WIDTH = 32
ATTENTION_BACKWARD = 1.3  # seconds per FLOP over forward's, as `fsdp_sim.cost.calibration` has it


class ProbeShape(NamedTuple):
    """Rows of tokens, and how wide the model is."""

    rows: int
    seq_len: int
    width: int
    vocab: int


class Probe(nn.Module):
    """Embedding, one pre-norm block of attention and MLP, norm, head, cross-entropy."""

    def __init__(self, shape: ProbeShape) -> None:
        super().__init__()
        d = shape.width
        self.embed = nn.Embedding(shape.vocab, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.head = nn.Linear(d, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of (rows, seq_len) tokens."""
        x = self.embed(tokens)
        b, t, d = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, d // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        x = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1), tokens.flatten())


SHAPES = tuple(
    ProbeShape(*shape) for shape in (
        (4, 64, 64, 256), (8, 16, 128, 256), (2, 128, 128, 1024), (8, 128, 128, 256), (2, 256, 256, 256),
        (1, 128, 768, 256),
    )
)  # fmt: skip
"""What is trained: from a millisecond to a tenth of a second."""


class ProbeTime(NamedTuple):
    """Seconds of a forward and of a backward, the least of several."""

    shape: ProbeShape
    forward_s: float
    backward_s: float


def time_probe(shape: ProbeShape, budget_s: float) -> ProbeTime:
    """Train on this rank for about that long, by one thread."""
    model = Probe(shape)
    tokens = torch.randint(0, shape.vocab, (shape.rows, shape.seq_len))
    least = [float("inf")] * 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        end_s, done = time.thread_time() + budget_s, 0
        while done < 4 or time.thread_time() < end_s:
            model.zero_grad(set_to_none=True)
            start_s = time.thread_time()
            loss = model(tokens)
            middle_s = time.thread_time()
            loss.backward()
            least = [min(least[0], middle_s - start_s), min(least[1], time.thread_time() - middle_s)]
            done += 1
    finally:
        torch.set_num_threads(threads)
    return ProbeTime(shape, *least)


class Amounts(NamedTuple):
    """What kernels do, in the quantities that have a rate."""

    matmul_flops: float
    attention_flops: float
    bytes: float
    kernels: float


def amounts_of(kernels: Iterable[Kernel], *, backward: bool) -> Amounts:
    """Added up. Attention's backward counts `ATTENTION_BACKWARD` times."""
    found = dict.fromkeys(Amounts._fields, 0.0)
    for kernel in kernels:
        found["kernels"] += kernel.count
        if kernel.kind == "matmul":
            found["matmul_flops"] += kernel.flops * kernel.count
        elif kernel.kind == "attention":
            found["attention_flops"] += kernel.flops * kernel.count * (ATTENTION_BACKWARD if backward else 1.0)
        else:
            found["bytes"] += kernel.bytes * kernel.count
    return Amounts(**found)


@functools.cache
def amounts_of_probe(shape: ProbeShape) -> tuple[Amounts, Amounts]:
    """Of its forward and its backward, traced without computing anything."""
    tokens = torch.zeros(shape.rows, shape.seq_len, dtype=torch.int64)
    traced = model_from_module(Probe(shape), tokens, wrap="root", device="cpu", progress=False).work
    forward = [kernel for work in traced.values() for kernel in work.forward]
    backward = [kernel for work in traced.values() for kernel in work.backward]
    return amounts_of(forward, backward=False), amounts_of(backward, backward=True)
