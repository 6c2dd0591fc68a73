"""Hugging Face's names and layouts for the models of `labs.model`: GPT-2, and Llama.

GPT-2 keeps its linear weights as (in, out) (`Conv1D`), so they are transposed; Llama has query, key and value apart,
which are the rows of `qkv` one after the other. All other tensors only have other names. Rotary positions pair the
same numbers on both sides.

Sources: `transformers.models.gpt2.modeling_gpt2`, `transformers.models.llama.modeling_llama`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from labs.checkpoint.tensors import Form, Index, Source, write_tensors
from labs.model import ModelConfig
from labs.model.gpt import GPTConfig


@dataclass(frozen=True)
class Family:
    """How one kind of model is named there.

    Attributes:
        root: what stands before all names but the head's (GPT-2 as published leaves it away).
        block: what stands before the number of a block.
        modules: our module, within its block or the root, to theirs; to several whose rows are ours one by one.
        transposed: our modules whose weight lies there as (in, out).
        needless: names that hold nothing trained.
        tied: whether the head's weight is the token embedding's when config.json does not say.
    """

    root: str
    block: str
    modules: Mapping[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()
    needless: str = ""
    tied: bool = False
    back: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.back.update({part: module for module, parts in self.modules.items() for part in parts})

    def theirs(self, name: str) -> tuple[str, ...]:
        """Their names for our parameter, without the root: one, or those of its parts."""
        block, module, kind = split(name, "layers")
        return tuple(
            f"{self.block}.{block}.{part}.{kind}" if block else f"{part}.{kind}" for part in self.modules[module]
        )

    def ours(self, name: str) -> str | None:
        """Our name for their parameter or part of one, given without the root; None if our models have no such one."""
        block, module, kind = split(name, self.block)
        if module not in self.back:
            return None
        return f"layers.{block}.{self.back[module]}.{kind}" if block else f"{self.back[module]}.{kind}"

    def is_transposed(self, name: str) -> bool:
        """Whether our parameter is a weight that lies there as (in, out)."""
        _, module, kind = split(name, "layers")
        return module in self.transposed and kind == "weight"


def split(name: str, block: str) -> tuple[str, str, str]:
    """The number of the block ('' outside of blocks), the module in it, and weight or bias.

    Example:
        >>> split("layers.3.attn.qkv.weight", "layers")
        ('3', 'attn.qkv', 'weight')
    """
    found = re.fullmatch(rf"(?:{block}\.(\d+)\.)?(.+)\.([^.]+)", name)
    return (found[1] or "", found[2], found[3]) if found else ("", name, "")


GPT2 = Family(
    root="transformer.",
    block="h",
    modules={
        "tok_emb": ("wte",),
        "pos_emb": ("wpe",),
        "attn_norm": ("ln_1",),
        "attn.qkv": ("attn.c_attn",),
        "attn.proj": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.fc": ("mlp.c_fc",),
        "mlp.proj": ("mlp.c_proj",),
        "norm": ("ln_f",),
        "head": ("lm_head",),
    },
    transposed=frozenset({"attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"}),
    needless=r".*\.attn\.(bias|masked_bias)",  # causal masks in old files
    tied=True,
)

LLAMA = Family(
    root="model.",
    block="layers",
    modules={
        "tok_emb": ("embed_tokens",),
        "attn_norm": ("input_layernorm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.proj": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate": ("mlp.gate_proj",),
        "mlp.fc": ("mlp.up_proj",),
        "mlp.proj": ("mlp.down_proj",),
        "norm": ("norm",),
        "head": ("lm_head",),
    },
    needless=r".*\.rotary_emb\.inv_freq",
)

FAMILIES = {"wte.weight": GPT2, "embed_tokens.weight": LLAMA}
"""By a name that only this family has."""


# ---- From there ------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says; nothing without one."""
    path = folder / "config.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def renamed(source: Source, config: Mapping[str, Any]) -> Source:
    """Tensors under our names, if they have Hugging Face's; otherwise as they are.

    Args:
        config: from `read_config`.

    Raises:
        ValueError: a tensor that our models do not have, as in another kind of model.
    """
    forms = source.forms.items()
    for name, family in FAMILIES.items():
        if name in source.forms or family.root + name in source.forms:
            if any(name.endswith("attn.c_attn.weight") and form.shape[0] > form.shape[1] for name, form in forms):
                family = dataclasses.replace(family, transposed=frozenset())  # nanoGPT: their names, linear layers
            return _RenamedSource(source, family, tied=config.get("tie_word_embeddings", family.tied))
    return source


class _RenamedSource:
    """Their tensors under our names and in our layout; read in slices, as those are.

    Attributes:
        parts: by our name, theirs and the rows of ours that each has.
    """

    def __init__(self, source: Source, family: Family, *, tied: bool) -> None:
        self.source, self.family = source, family
        self.forms: dict[str, Form] = {}
        self.parts: dict[str, list[tuple[str, range]]] = {}
        given = {name.removeprefix(family.root): name for name in source.forms}
        for name in given:
            ours = family.ours(name)
            if re.fullmatch(family.needless, name) or (tied and ours == "head.weight") or ours in self.parts:
                continue
            if ours is None:
                raise ValueError(f"{given[name]} has no place in GPT-2 or Llama as they are here")
            self.parts[ours], rows = [], 0
            for part in family.theirs(ours):
                if part not in given:
                    raise ValueError(f"{given[name]} is there without {family.root}{part}; copy the whole folder")
                dtype, shape = source.forms[given[part]]
                shape = shape[::-1] if family.is_transposed(ours) else shape
                self.parts[ours].append((given[part], range(rows, rows + shape[0])))
                rows += shape[0]
            self.forms[ours] = Form(dtype, (rows, *shape[1:]))

    def read(self, name: str, index: Index) -> torch.Tensor:
        """A slice of one of our tensors."""
        rows, *rest = index
        found = []
        for part, has in self.parts[name]:
            begin, end = max(rows.start, has.start), min(rows.stop, has.stop)
            if begin >= end:
                continue
            within = (slice(begin - has.start, end - has.start), *rest)
            if self.family.is_transposed(name):
                found.append(self.source.read(part, within[::-1]).T)
            else:
                found.append(self.source.read(part, within))
        return found[0] if len(found) == 1 else torch.cat(found)


# ---- To there --------------------------------------------------------------------------------------------------------


def write_model(folder: Path, source: Source, config: ModelConfig) -> None:
    """Write model.safetensors and config.json, which ``from_pretrained(folder)`` of transformers loads.

    Args:
        source: all parameters by our names; read one at a time.
        config: of the model.

    Raises:
        ValueError: a GPT without biases, which transformers does not have. OSError: it cannot be written.
    """
    family = GPT2 if isinstance(config, GPTConfig) else LLAMA
    if isinstance(config, GPTConfig) and not config.bias:
        raise ValueError("bias=False: GPT-2 in transformers has biases; train with bias=True")
    forms: dict[str, Form] = {}
    origins: dict[str, tuple[str, range]] = {}
    for name, (dtype, shape) in source.forms.items():
        begin = 0
        for part, rows in zip(family.theirs(name), _part_rows(name, shape[0], config), strict=True):
            full_name = part if part.startswith("lm_head.") else family.root + part
            part_shape = (rows, *shape[1:])
            forms[full_name] = Form(dtype, part_shape[::-1] if family.is_transposed(name) else part_shape)
            origins[full_name] = (name, range(begin, begin := begin + rows))

    def read(full_name: str) -> torch.Tensor:
        name, rows = origins[full_name]
        columns = (slice(0, n) for n in source.forms[name].shape[1:])
        tensor = source.read(name, (slice(rows.start, rows.stop), *columns))
        return tensor.T if family.is_transposed(name) else tensor

    write_tensors(folder / "model.safetensors", forms, read)
    (folder / "config.json").write_text(json.dumps(_their_config(config), indent=2) + "\n")


def _part_rows(name: str, rows: int, config: ModelConfig) -> tuple[int, ...]:
    if isinstance(config, GPTConfig) or not name.endswith(".qkv.weight"):
        return (rows,)
    kv_rows = config.n_kv_head * config.head_dim
    return rows - 2 * kv_rows, kv_rows, kv_rows


def _their_config(config: ModelConfig) -> dict[str, Any]:
    """As `transformers.GPT2Config` and `transformers.LlamaConfig` name things."""
    common = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(config, GPTConfig):
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
        return common | dropouts | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.d_model,
            "n_positions": config.context,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
        }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # where transformers 4 looks
        "rope_parameters": rope,
    }
