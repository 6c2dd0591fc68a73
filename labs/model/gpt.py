"""The GPT that the course trains: GPT-2's architecture, small enough to read, with the shapes beside the code.

Shapes: B rows in the batch, T tokens in a row, D = d_model, H heads, V = vocab_size.
Sources: Radford et al. 2019 (GPT-2); `GPT2LMHeadModel` of Hugging Face transformers, whose parameter counts the
presets equal.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from labs.model.initial_weights import initial_parameters_, without_random_start

IGNORED = -1  # a target that is not learnt from: `torch.nn.functional.cross_entropy`'s ignore_index
Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT.

    Attributes:
        context: the most tokens in a row (one learned position each).
        tied: the head's weight is the token embedding's weight (one Parameter), as in GPT-2.
        bias: biases in the linear layers and layer norms, as in GPT-2. The head never has one.

    Raises:
        ValueError: a size that is not positive, d_model that does not divide into n_head, dropout outside [0, 1).
    """

    n_layer: int
    n_head: int
    d_model: int
    vocab_size: int = 50257
    context: int = 1024
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "n_layer", "n_head", "d_model", "vocab_size", "context")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: the share of values dropped is at least 0 and below 1")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """A size from `PRESETS`, with some fields changed.

        Example:
            >>> GPTConfig.preset("teaching", n_layer=2).n_layer
            2

        Raises:
            ValueError: no such preset, or no such field (the nearest name is suggested).
        """
        return changed_preset(PRESETS, name, changes)


def check_sizes(config: Any, *fields: str) -> None:
    """Raise ValueError unless the fields are whole numbers, at least 1, and the heads divide d_model."""
    for field in fields:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{field}={value!r}: it is a whole number, at least 1")
    d_model, n_head = config.d_model, config.n_head
    if d_model % n_head:
        below, above = d_model // n_head * n_head, -(-d_model // n_head) * n_head
        sizes = " or ".join(str(n) for n in (below, above) if n)
        raise ValueError(f"d_model={d_model} does not divide into n_head={n_head} heads; use d_model={sizes}")


def changed_preset(presets: Mapping[str, Config], name: str, changes: Mapping[str, Any]) -> Config:
    """The preset of that name with some fields changed.

    Raises:
        ValueError: no such preset, or no such field (the nearest name is suggested).
    """
    if name not in presets:
        raise ValueError(f"there is no preset {name!r}{did_you_mean(name, presets)}")
    preset: Any = presets[name]
    fields = [field.name for field in dataclasses.fields(preset)]
    for key in changes:
        if key not in fields:
            raise ValueError(f"{type(preset).__name__} has no field {key!r}{did_you_mean(key, fields)}")
    return dataclasses.replace(preset, **changes)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, if any, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    return (f"; did you mean {near[0]!r}? There are: " if near else "; there are: ") + ", ".join(known)


PRESETS = {
    "teaching": GPTConfig(n_layer=5, n_head=4, d_model=128, vocab_size=256, context=128),
    "gpt2": GPTConfig(n_layer=12, n_head=12, d_model=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, d_model=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, d_model=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, d_model=1600),
}
"""Sizes by name: ``teaching`` (1.04 M parameters, bytes as tokens) and the published GPT-2 sizes."""


class Attention(nn.Module):
    """Causal self-attention with H heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.n_head, d // self.n_head)  # (B, T, 3, H, D/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, H, T, D/H)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))  # (B, T, D)


class MLP(nn.Module):
    """Two linear layers, 4 D wide in between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.d_model, 4 * config.d_model, bias=config.bias)
        self.proj = nn.Linear(4 * config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))  # (B, T, D) -> (B, T, 4D) -> (B, T, D)


class Block(nn.Module):
    """Attention, then MLP, each on normalised input and added to the stream. FSDP makes a unit of each block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x)))  # (B, T, D)
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Tokens in; logits out, or the loss when targets are given.

    Its weights belong to the seed, by default the one last given to `torch.manual_seed`. Construct it under
    ``torch.device("meta")`` to have shapes without memory.
    """

    def __init__(self, config: GPTConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        with without_random_start():
            self.tok_emb = nn.Embedding(config.vocab_size, config.d_model)
            self.pos_emb = nn.Embedding(config.context, config.d_model)
            self.drop = nn.Dropout(config.dropout)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.norm = nn.LayerNorm(config.d_model, bias=config.bias)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tok_emb.weight
        initial_parameters_(self, config.n_layer, seed)

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Nothing: GPT-2 has no buffers. The Llama shape has, and is started in the same way."""

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
        x = self.drop(self.tok_emb(idx) + self.pos_emb(torch.arange(idx.shape[1], device=idx.device)))  # (B, T, D)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if targets is None else self.loss(x, targets, reduction)

    def loss(self, x: torch.Tensor, targets: torch.Tensor, reduction: Literal["mean", "sum"]) -> torch.Tensor:
        """What follows the blocks, for their output (B, T, D): compiled it is one graph that keeps no fp32 logits."""
        return loss_of(self.head(self.norm(x)), targets, reduction)

    def num_params(self) -> int:
        """How many numbers are trained; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters())


def check_length(idx: torch.Tensor, context: int) -> None:
    """Raise ValueError when the rows of (B, T) tokens are longer than the context."""
    if idx.shape[1] > context:
        raise ValueError(f"rows of {idx.shape[1]} tokens, but context={context}; shorten them or raise context")


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: Literal["mean", "sum"]) -> torch.Tensor:
    """The cross-entropy of logits (B, T, V) and targets (B, T), in fp32 whatever the logits are in.

    In bf16 a loss has three digits, and a sum over thousands of tokens fewer.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: torch.Tensor,
    n: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Append ``n`` tokens to a prompt of shape (T,): the likeliest ones, or drawn when ``temperature`` > 0.

    On a sharded model every rank must call it, with the same prompt: each forward is a collective. Ranks draw the
    same tokens when their generators are seeded alike.

    Args:
        model: a `GPT` or a `labs.model.llama.Llama`, sharded or not, or one in DistributedDataParallel.
        generator: what tokens are drawn with, on any device; by default one with seed 0, so that ranks agree and the
            global generator stays as it is.
    """
    generator = generator or torch.Generator().manual_seed(0)
    config: Any = getattr(model, "module", model).config  # DDP keeps the model in .module
    tokens = prompt
    for _ in range(n):
        logits = model(tokens[None, -config.context :])[0, -1].float()  # (V,)
        if temperature > 0:
            probabilities = F.softmax(logits / temperature, dim=-1).to(generator.device)
            token = torch.multinomial(probabilities, 1, generator=generator).to(tokens.device)  # (1,)
        else:
            token = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, token])
    return tokens
