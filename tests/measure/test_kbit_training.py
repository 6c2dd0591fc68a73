"""QLoRA as peft and trl prepare a model for one GPU: norms in fp32 beside autocast; memory against torch, on a CPU.

What bitsandbytes' layers get in fp32 they give back in fp32, so that the stream is fp32. Experts run in a loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_sim.cost.transformer import workload
from fsdp_sim.engine.memory import memory
from fsdp_sim.measure.live_bytes import live_bytes
from fsdp_sim.schedule import build
from fsdp_sim.spec import Model, Plan
from tests.measure.adapters import Adapted, Quantised
from tests.measure.llama import rotate
from tests.measure.mem_tracker import with_layers

SMALL: dict[str, Any] = {"d_model": 128, "n_head": 4, "n_kv_head": 4, "vocab": 256}
MODELS = {
    "dense": with_layers("llama2-7b", 3, d_ffn=448, **SMALL),
    "layernorm": with_layers("llama2-7b", 3, d_ffn=448, norm="layernorm", **SMALL),
    "experts": with_layers("mixtral-8x7b", 2, d_ffn=448, n_expert=4, **SMALL),
}


class Linear4bit(Quantised):
    """bitsandbytes 0.43: computes in bf16, and gives back the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


class Norm(nn.Module):
    """LlamaRMSNorm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class LayerNorm(Norm):
    """As autocast has it on a GPU: in fp32, and so is what it puts out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float())


class FeedForward(nn.Module):
    def __init__(self, model: Model, *, adapted: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down = (linear(model, i, o, adapted) for i, o in ((0, 1), (0, 1), (1, 0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """MixtralSparseMoeBlock of transformers 4.45."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.top_k, self.count = model.experts_per_token or 0, model.n_expert or 0
        self.gate = nn.Linear(model.d_model, self.count, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.experts = nn.ModuleList(FeedForward(model, adapted=False) for _ in range(self.count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        weights, _ = self.gate(x).float().softmax(-1).topk(self.top_k)
        each = len(x) * self.top_k // self.count
        chosen = torch.arange(self.count).repeat(each).view(-1, self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == e)
            made = expert(x[rows]) * weights[rows, place, None]
            out.index_add_(0, rows, made.to(x.dtype))
        return out.view_as(hidden)


def norm_of(model: Model) -> nn.Module:
    return (LayerNorm if model.norm == "layernorm" else Norm)(model.d_model)


def linear(model: Model, of: int, to: int, adapted: bool) -> nn.Module:
    sizes = (model.d_model, model.d_ffn)
    shape = torch.Size((sizes[to], sizes[of]))
    base = Linear4bit(shape)
    return Adapted(base, shape, 8).to(torch.bfloat16) if adapted else base


class Block(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads, self.head_dim = model.n_head, model.d_head
        self.norms = nn.ModuleList(norm_of(model) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(model, 0, 0, adapted=True) for _ in range(4))
        self.ffn = Experts(model) if model.n_expert else FeedForward(model, adapted=True)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.norms[0](x)
        q, k, v = (of(h).view(b, t, self.heads, -1).transpose(1, 2) for of in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (y.to(torch.bfloat16) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.ffn(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        dtype = torch.float32 if plan.kbit_training == "peft" else torch.bfloat16
        self.embed = nn.Embedding(model.vocab, model.d_model, dtype=dtype).requires_grad_(False)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.n_layer))
        self.norm = norm_of(model)
        self.head = nn.Linear(model.d_model, model.vocab, bias=False, dtype=dtype).requires_grad_(False)
        self.checkpointed = plan.activation_checkpointing == "full"
        angle = torch.zeros(plan.seq_len, model.d_head)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).requires_grad_(self.checkpointed)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def torch_says(model: Model, plan: Plan) -> int:
    decoder = Decoder(model, plan)
    optimizer = torch.optim.AdamW([p for p in decoder.parameters() if p.requires_grad], foreach=False)
    tokens = torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.long)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = decoder(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with live_bytes(decoder, optimizer) as meter:
        step()
    return meter.peak_bytes


@pytest.mark.parametrize(
    ("kind", "who", "checkpointing"),
    [
        ("layernorm", None, None),
        ("dense", "trl", "full"),
        ("experts", "peft", None),
    ],
)
def test_the_stream_is_fp32_and_so_is_what_quantised_layers_make_of_it(
    kind: str, who: str | None, checkpointing: str | None
) -> None:
    model = dataclasses.replace(MODELS[kind], dtype="bf16")
    targets = ("wq", "wk", "wv", "wo") if kind == "experts" else "all-linear"
    plan = Plan(
        api="ddp", lora_rank=8, lora_targets=targets, base_quantization="nf4", kbit_training=who, micro_batch=4,
        seq_len=64, rms_norm="composed", activation_checkpointing=checkpointing,
    )  # fmt: skip
    work = workload(model, plan)

    ours = memory(build(work.units, plan, 1), work).peak_bytes

    assert ours == pytest.approx(torch_says(model, plan), rel=0.08)
