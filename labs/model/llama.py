"""A Llama-shaped model: as the GPT of `labs.model.gpt`, with RMSNorm, rotary positions, SwiGLU and grouped queries.

Shapes: B rows in the batch, T tokens in a row, D = d_model, H = n_head query heads, K = n_kv_head key and value heads,
C = D / H numbers in a head, V = vocab_size. Modules are named as in the GPT, so that what wraps, checkpoints or
compiles one does so with the other.

Sources: Touvron et al. 2023 (Llama), Grattafiori et al. 2024 (Llama 3, table 3), `LlamaForCausalLM` of Hugging Face
transformers, whose parameter counts and logits it has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from labs.model.gpt import check_length, check_sizes, loss_of
from labs.model.initial_weights import initial_parameters_, without_random_start


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The size of a Llama-shaped model. It has no biases and no dropout.

    Attributes:
        n_kv_head: heads of keys and values; n_head / n_kv_head query heads share each (Ainslie et al. 2023, GQA).
        d_ff: width between the linear layers of the MLP.
        context: the most tokens in a row.
        tied: the head's weight is the token embedding's weight (one Parameter).
        rope_theta: the base of the rotary positions' wavelengths (Su et al. 2021 has 10,000, Llama 3 has 500,000).
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        ValueError: a size that is not positive, heads that do not divide, heads of an odd width.
    """

    n_layer: int
    n_head: int
    n_kv_head: int
    d_model: int
    d_ff: int
    vocab_size: int = 128256
    context: int = 8192
    tied: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "context")
        if self.n_head % self.n_kv_head:
            fits = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            near = min(fits, key=lambda n: abs(n - self.n_kv_head))
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}; use n_kv_head={near}")
        if self.head_dim % 2:
            raise ValueError(
                f"d_model={self.d_model} in n_head={self.n_head} heads is {self.head_dim} numbers each, and rotary "
                f"positions turn them in pairs; use d_model={(self.head_dim + 1) * self.n_head}"
            )
        for field in ("rope_theta", "norm_eps"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)}: it is a positive number")

    @property
    def head_dim(self) -> int:
        """C, the numbers in a head."""
        return self.d_model // self.n_head


PRESETS = {
    "teaching-llama": LlamaConfig(5, 4, 2, 128, 384, vocab_size=256, context=128, tied=True),
    "llama-1b": LlamaConfig(n_layer=16, n_head=32, n_kv_head=8, d_model=2048, d_ff=8192, tied=True),
    "llama-8b": LlamaConfig(n_layer=32, n_head=32, n_kv_head=8, d_model=4096, d_ff=14336),
}
"""Sizes by name: ``teaching-llama`` (1.02 M parameters, bytes as tokens), Llama 3.2 1B and Llama 3 8B.

Llama 3.2's stretching of the rotary positions to 131,072 tokens, made after its training on short rows, is left out.
"""


def rope_table(config: LlamaConfig, device: torch.device) -> torch.Tensor:
    """Cosines and sines of the angles by which each position turns each pair: fp32 of shape (2, context, C/2).

    Pair i turns by position / rope_theta^(2i/C) (Su et al. 2021, equation 15). Made in fp64 on the CPU, so that it is
    the same on every device: in fp32 the angles of late positions are off by 1e-4.
    """
    with torch.device("cpu"):
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim  # (C/2,)
        angles = torch.outer(torch.arange(config.context, dtype=torch.float64), config.rope_theta**-pairs)
        table = torch.stack([angles.cos(), angles.sin()]).float()
    return table.to(device)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn queries or keys (B, heads, T, C) by their positions, with the first T rows of a table, in fp32.

    Number i and number i + C/2 are a pair, as in transformers (Meta's own code pairs neighbours: the same up to the
    order of a head's numbers).
    """
    cos, sin = table[:, : x.shape[2]]  # (T, C/2) each
    a, b = x.chunk(2, dim=-1)  # (B, heads, T, C/2) each; times the table they are fp32
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with H query heads on K key and value heads."""

    rope: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.n_kv_head = config.head_dim, config.n_kv_head
        self.grouped = config.n_kv_head < config.n_head
        self.qkv = nn.Linear(config.d_model, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=False)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=False)
        # Not an argument of forward: FSDP2's mixed precision would cast it to bf16 there.
        self.register_buffer("rope", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        heads = self.qkv(x).view(b, t, -1, self.head_dim).transpose(1, 2)  # (B, H + 2K, T, C)
        q, k, v = heads.split([d // self.head_dim, self.n_kv_head, self.n_kv_head], dim=1)
        q, k = rotate(q, self.rope), rotate(k, self.rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)  # (B, H, T, C)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))  # (B, T, D)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): one linear layer gates another, both d_ff wide, and a third leads back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.fc = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.silu(self.gate(x)) * self.fc(x))  # (B, T, D) -> (B, T, d_ff) -> (B, T, D)


class Block(nn.Module):
    """Attention, then MLP, each on normalised input and added to the stream. FSDP makes a unit of each block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))  # (B, T, D)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens in; logits out, or the loss when targets are given. Weights and seed as in `labs.model.gpt.GPT`.

    Built under ``torch.device("meta")`` it needs `init_buffers` when its parameters have got memory: the table of
    rotary positions is in no checkpoint.
    """

    def __init__(self, config: LlamaConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        with without_random_start():
            self.tok_emb = nn.Embedding(config.vocab_size, config.d_model)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tok_emb.weight
        initial_parameters_(self, config.n_layer, seed)
        self.init_buffers()

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Make the table of rotary positions anew; all blocks share one tensor of context x C x 4 bytes.

        Args:
            device: where the model computes; by default where its parameters are (with CPU offload these differ).
        """
        table = rope_table(self.config, device or self.tok_emb.weight.device)
        for module in self.modules():  # not self.layers[i].attn: that may be a wrapper
            if isinstance(module, Attention):
                module.rope = table

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> torch.Tensor:
        """Logits (B, T, V) for tokens (B, T); with targets (B, T) the cross-entropy, a scalar, in nats.

        Args:
            targets: those that are -1 count for nothing.
            reduction: the mean over the other targets (nan when there is none), or their sum.

        Raises:
            ValueError: more tokens in a row than there are positions.
        """
        check_length(idx, self.config.context)
        x = self.tok_emb(idx)  # (B, T, D)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if targets is None else self.loss(x, targets, reduction)

    def loss(self, x: torch.Tensor, targets: torch.Tensor, reduction: Literal["mean", "sum"]) -> torch.Tensor:
        """What follows the blocks, for their output (B, T, D): compiled it is one graph that keeps no fp32 logits."""
        return loss_of(self.head(self.norm(x)), targets, reduction)

    def num_params(self) -> int:
        """How many numbers are trained; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters())
