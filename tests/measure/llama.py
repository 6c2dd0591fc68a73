"""A compact Llama for tests: RMS norms, rotary positions, grouped queries, SwiGLU, an untied head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_sim.spec import Model


class GatedMLP(nn.Module):
    def __init__(self, d: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(d, ffn, bias=False), nn.Linear(d, ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GroupedAttention(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(d, heads * head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(d, kv_heads * head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(heads * head_dim, d, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, model: Model, norm: type[nn.Module]) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = norm(model.d_model), norm(model.d_model)
        self.attn = GroupedAttention(model.d_model, model.n_head, model.kv_heads, model.d_head)
        self.ffn = GatedMLP(model.d_model, model.d_ffn)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens in; with targets the loss, in fp32 as usual."""

    def __init__(self, model: Model, n_layer: int | None = None, norm: Any = nn.RMSNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.d_model)
        self.layers = nn.ModuleList(LlamaBlock(model, norm) for _ in range(n_layer or model.n_layer))
        self.norm = norm(model.d_model)
        self.head = nn.Linear(model.d_model, model.vocab, bias=False)
        self.head_dim = model.d_head

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        angle = torch.outer(torch.arange(tokens.shape[1]), 1e4 ** -torch.arange(0, 1, 2 / self.head_dim)).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
