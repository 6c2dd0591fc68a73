"""Decoders for tests, by the dimensions of a model: Llama, and what later ones have beside or in place of its parts.

Norms of queries and keys, norms of outputs, biases of queries, keys and values, latent attention, experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_sim.spec import Model, blocks
from fsdp_sim.spec.blocks import has_bias


class GatedMLP(nn.Module):
    def __init__(self, model: Model, ffn: int) -> None:
        super().__init__()
        d, self.act = model.d_model, F.silu if model.ffn_type == "swiglu" else F.gelu
        self.gate, self.up = nn.Linear(d, ffn, bias=False), nn.Linear(d, ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A router, experts by grouped matmuls, and shared ones: as in transformers (integrations/moe.py)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        count, d, width = model.n_expert or 0, model.d_model, model.d_expert or model.d_ffn
        self.top_k = model.experts_per_token or 0
        self.router = nn.Parameter(torch.empty(count, d))
        self.up = nn.Parameter(torch.empty(count, 2 * width, d))
        self.down = nn.Parameter(torch.empty(count, d, width))
        self.shared = GatedMLP(model, model.n_shared_expert * width) if model.n_shared_expert else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens.view(-1, tokens.shape[-1])
        weights, chosen = F.linear(x, self.router).float().softmax(-1).topk(self.top_k)
        order = chosen.view(-1).argsort()
        ends = torch.arange(1, len(self.up) + 1, dtype=torch.int32) * (len(order) // len(self.up))
        gate, up = torch._grouped_mm(x[order // self.top_k], self.up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        weighed = (out * weights.view(-1)[order].unsqueeze(-1))[back]
        y = weighed.view(len(x), self.top_k, -1).sum(1).to(x.dtype).view_as(tokens)
        return y if self.shared is None else y + self.shared(tokens)


class GroupedAttention(nn.Module):
    def __init__(self, model: Model, norm: Any) -> None:
        super().__init__()
        d, q, kv, bias = (
            model.d_model,
            model.n_head * model.d_head,
            model.kv_heads * model.d_head,
            has_bias(model, "qkv"),
        )
        self.head_dim = model.d_head
        self.wq = nn.Linear(d, q, bias=bias)
        self.wk, self.wv = (nn.Linear(d, kv, bias=bias) for _ in range(2))
        self.wo = nn.Linear(q, d, bias=False)
        self.norms = nn.ModuleList(norm(n if model.qk_norm == "projection" else model.d_head) for n in (q, kv))
        self.normed = model.qk_norm
        if not self.normed:
            self.norms = nn.ModuleList()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.normed == "projection":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (y.view(b, t, -1, self.head_dim) for y in (q, k, v))
        if self.normed == "head":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class LatentAttention(nn.Module):
    """DeepSeek-V3's, as in transformers."""

    def __init__(self, model: Model, norm: Any) -> None:
        super().__init__()
        self.model = model
        d, heads, rank, rope = model.d_model, model.n_head, model.kv_lora_rank or 0, model.rope_head_dim or 0
        narrow = model.q_lora_rank or 0
        self.wq_a, self.q_norm = nn.Linear(d, narrow, bias=False), norm(narrow)
        self.wq_b = nn.Linear(narrow, heads * model.d_head, bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(d, rank + rope, bias=False), norm(rank)
        self.wkv_b = nn.Linear(rank, heads * (model.d_head - rope + model.d_value), bias=False)
        self.wo = nn.Linear(heads * model.d_value, d, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        (b, t, _), model, rope = x.shape, self.model, self.model.rope_head_dim or 0
        plain = model.d_head - rope
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, t, -1, model.d_head).transpose(1, 2)
        latent, k_rope = self.wkv_a(x).split([model.kv_lora_rank or 0, rope], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent)).view(b, t, model.n_head, -1).transpose(1, 2)
        k, v = kv.split([plain, model.d_value], dim=-1)
        q_plain, q_rope = q.split([plain, rope], dim=-1)
        q_rope, k_rope = rotate(q_rope, cos, sin), rotate(k_rope.view(b, 1, t, rope), cos, sin)
        q = torch.cat((q_plain, q_rope), dim=-1)
        k = torch.cat((k, k_rope.expand(-1, model.n_head, -1, -1)), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, model: Model, norm: Any, moe: bool) -> None:
        super().__init__()
        self.attn = (LatentAttention if model.kv_lora_rank else GroupedAttention)(model, norm)
        self.ffn = Experts(model) if moe else GatedMLP(model, model.d_ffn)
        before, after = model.norm_position in ("pre", "both"), model.norm_position != "pre"
        self.attn_norm, self.ffn_norm = ((norm if before else Nothing)(model.d_model) for _ in range(2))
        self.attn_post_norm, self.ffn_post_norm = ((norm if after else Nothing)(model.d_model) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn_post_norm(self.attn(self.attn_norm(x), cos, sin))
        return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x)))


class Nothing(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Llama(nn.Module):
    """Tokens in; with targets the loss, in fp32 as usual."""

    def __init__(self, model: Model, norm: Any = nn.RMSNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.d_model)
        self.layers = nn.ModuleList(LlamaBlock(model, norm, block.moe) for block in blocks(model).values())
        self.norm = norm(model.d_model)
        self.head = nn.Linear(model.d_model, model.vocab, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embed.weight
        self.rotated = model.rope_head_dim or model.d_head

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        angle = torch.outer(torch.arange(tokens.shape[1]), 1e4 ** -torch.arange(0, 1, 2 / self.rotated)).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
