"""`Model`: the dimensions of a transformer, by hand or from the catalogue."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fsdp_sim.spec.dtypes import DTYPE
from fsdp_sim.spec.fields import SIZE, field, one_of, spec, text, whole
from fsdp_sim.words import in_brief, meant

_BOOL = one_of(True, False)
_COUNT = one_of(None) | whole(1, SIZE)
_LAYERS = 10_000
NEEDS = {  # fields that say nothing without another
    "experts_per_token": "n_expert",
    "d_expert": "n_expert",
    "n_shared_expert": "n_expert",
    "d_shared_expert": "n_shared_expert",
    "shared_expert_gate": "n_shared_expert",
    "first_dense": "n_expert",
    "moe_every": "n_expert",
    "q_lora_rank": "kv_lora_rank",
    "rope_head_dim": "kv_lora_rank",
    "v_head_dim": "kv_lora_rank",
    "full_attention_every": "window",
    "chunked_window": "window",
    "image_size": "patch_size",
    "channels": "patch_size",
    "adaln": "patch_size",
}
REQUIRES = {  # and what a field cannot do without
    "n_expert": ("experts_per_token",),
    "kv_lora_rank": ("head_dim", "rope_head_dim", "v_head_dim"),
    "patch_size": ("image_size",),
}
LIMITED_BY = {
    "experts_per_token": "n_expert",
    "first_dense": "n_layer",
    "moe_every": "n_layer",
    "rope_head_dim": "head_dim",
}
EXCLUDED = (("parallel", "n_encoder_layer"), ("n_expert", "n_encoder_layer"), ("kv_lora_rank", "n_encoder_layer"),
            ("patch_size", "n_encoder_layer"), ("kv_lora_rank", "n_kv_head"), ("kv_lora_rank", "qk_norm"),
            ("kv_lora_rank", "joined_qkv"), ("adaln", "n_expert"), ("adaln", "parallel"))  # fmt: skip


@spec
class Model:
    """A transformer's dimensions. For anything else trace a module: `fsdp_sim.measure.model_from_module`.

    What a published model has is in the catalogue (`preset`), or in its ``config.json`` (`from_config`).

    Attributes:
        name: for headings.
        n_layer, d_model, n_head, d_ffn, vocab: as everywhere. Of images (``patch_size``), ``vocab`` counts classes.
        n_kv_head: key and value heads (grouped-query attention); None is ``n_head``.
        head_dim: of queries and keys; None is ``d_model / n_head``.
        ffn_type: ``gelu`` and ``relu`` have two matrices, ``swiglu`` and ``geglu`` three.
        norm: ``layernorm`` or ``rmsnorm``; how many kernels that is belongs to the software (`Plan.rms_norm`).
        norm_affine: what a norm learns: ``weight_bias``, ``weight`` or nothing (False); None is ``weight_bias`` for a
            layer norm of a model with ``bias=True``, else ``weight``.
        norm_position: ``pre`` before attention and before the feed-forward; ``post`` after each addition, and none at
            the end (BERT); ``output`` on what the two return (OLMo 2); ``both`` before and on what they return
            (Gemma 2 and 3).
        parallel: attention and feed-forward both read the block's input, through 1 norm (GPT-J) or 2 (GPT-NeoX).
        bias: of the linear layers: all (True), none (False), ``qkv`` (Qwen 2), ``attention`` or ``ffn``.
        head_bias: the head has one too.
        joined_qkv: queries, keys and values are one matrix; None is True where ``bias`` is.
        qk_norm: queries and keys are normalised: ``head`` by head (Qwen 3), ``projection`` all heads at once (OLMo 2),
            ``unweighted`` by head and without weights (Llama 4).
        positions: ``learned`` (a table of ``max_seq_len`` rows), ``rope``, ``relative`` (T5: a bias of each head by
            distance, from a table of 32 rows), or ``none`` (also for alibi, and for what is not learned).
        max_seq_len: rows of the table of learned positions; None is the plan's ``seq_len``. With ``rope``, the longest
            sequence that it is for, which a note remarks on beyond; None is any.
        token_types: rows of a table that is added to the embedding (BERT).
        embed_norm: a norm follows the embedding.
        head_transform: a linear layer, its activation and a norm come before the head (BERT).
        tied_embeddings: the head uses the embedding's weight.
        causal: attention looks back only, and computes half of the square.
        window: tokens that a query sees, itself included (sliding window); FlashAttention and flex_attention compute
            no more than these.
        full_attention_every: each so manieth layer sees everything all the same (Gemma 3: 6); None is no layer.
        chunked_window: tokens see the chunk of ``window`` tokens that they are in (Llama 4).
        sinks: each head learns one number that takes part in its softmax (GPT-OSS).
        logit_softcap: the logits pass through a tanh (Gemma 2).
        n_encoder_layer: of an encoder-decoder (T5): layers of the encoder, beside ``n_layer`` of the decoder, which
            also attend to the encoder's output.
        n_expert: routed experts of a block's feed-forward (mixture of experts); None is a dense feed-forward.
        experts_per_token: how many of them compute each token.
        d_expert: width of an expert; None is ``d_ffn``.
        n_shared_expert: experts that compute every token; together one feed-forward of ``d_shared_expert``, which by
            default is ``n_shared_expert * d_expert``.
        shared_expert_gate: what they return is weighed, token by token (Qwen 2 MoE).
        first_dense: so many first layers have a dense feed-forward (DeepSeek-V3: 3).
        moe_every: of the layers, each so manieth has experts (Llama 4 Maverick: 2), if it is not one of the first.
        kv_lora_rank, q_lora_rank: width of the latents of keys and values, and of queries (None: no latent), in
            multi-head latent attention (DeepSeek); then ``head_dim`` is the whole width of a query, of which
            ``rope_head_dim`` is rotated, and ``v_head_dim`` the width of a value.
        patch_size, image_size, channels: of an image model (ViT, DiT), which embeds patches of a square in place of
            tokens. ViT adds a class token and learned positions, and its head sees the class token alone.
        adaln: blocks are modulated by time and class, and the head predicts patches (DiT); the image is a latent.
        dtype: of the parameters, which the optimizer updates.
        unverified: its dimensions have no source that could be read; what is shown of it says so.

    Example:
        >>> Model.preset("gpt2-124m").param_count
        124439808
        >>> Model.preset("lama3-8b")
        Traceback (most recent call last):
        ValueError: no model is called 'lama3-8b'; the nearest names are llama3-8b
    """

    name: str = field(text())
    n_layer: int = field(whole(1, _LAYERS))
    d_model: int = field(whole(1, 2**20))
    n_head: int = field(whole(1, 2**20))
    d_ffn: int = field(whole(1, 2**24))
    vocab: int = field(whole(1, SIZE))
    n_kv_head: int | None = field(_COUNT, default=None)
    head_dim: int | None = field(_COUNT, default=None)
    ffn_type: str = field(one_of("gelu", "swiglu", "relu", "geglu"), default="gelu")
    norm: str = field(one_of("layernorm", "rmsnorm"), default="layernorm")
    norm_affine: str | bool | None = field(one_of(None, "weight_bias", "weight", False), default=None)
    norm_position: str = field(one_of("pre", "post", "output", "both"), default="pre")
    parallel: int | None = field(one_of(None, 1, 2), default=None)
    bias: bool | str = field(one_of(True, False, "qkv", "attention", "ffn"), default=True)
    head_bias: bool = field(_BOOL, default=False)
    joined_qkv: bool | None = field(one_of(None, True, False), default=None)
    qk_norm: str | None = field(one_of(None, "head", "projection", "unweighted"), default=None)
    positions: str = field(one_of("learned", "rope", "relative", "none"), default="learned")
    max_seq_len: int | None = field(_COUNT, default=None)
    token_types: int = field(whole(0, SIZE), default=0)
    embed_norm: bool = field(_BOOL, default=False)
    head_transform: bool = field(_BOOL, default=False)
    tied_embeddings: bool = field(_BOOL, default=True)
    causal: bool = field(_BOOL, default=True)
    window: int | None = field(_COUNT, default=None)
    full_attention_every: int | None = field(_COUNT, default=None)
    chunked_window: bool = field(_BOOL, default=False)
    sinks: bool = field(_BOOL, default=False)
    logit_softcap: bool = field(_BOOL, default=False)
    n_encoder_layer: int = field(whole(0, _LAYERS), default=0)
    n_expert: int | None = field(one_of(None) | whole(1, 10_000), default=None)
    experts_per_token: int | None = field(_COUNT, default=None)
    d_expert: int | None = field(_COUNT, default=None)
    n_shared_expert: int = field(whole(0, _LAYERS), default=0)
    d_shared_expert: int | None = field(_COUNT, default=None)
    shared_expert_gate: bool = field(_BOOL, default=False)
    first_dense: int = field(whole(0, _LAYERS), default=0)
    moe_every: int = field(whole(1, _LAYERS), default=1)
    kv_lora_rank: int | None = field(_COUNT, default=None)
    q_lora_rank: int | None = field(_COUNT, default=None)
    rope_head_dim: int | None = field(_COUNT, default=None)
    v_head_dim: int | None = field(_COUNT, default=None)
    patch_size: int | None = field(_COUNT, default=None)
    image_size: int | None = field(_COUNT, default=None)
    channels: int = field(whole(1, SIZE), default=3)
    adaln: bool = field(_BOOL, default=False)
    dtype: str = field(DTYPE, default="fp32")
    unverified: bool = field(_BOOL, default=False)

    def __post_init__(self) -> None:
        for name, needed in NEEDS.items():
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default and not getattr(self, needed):
                raise ValueError(f"Model.{name} is {value!r}, which says nothing without {needed}; give that too")
        for name, all_needed in REQUIRES.items():
            value = getattr(self, name)
            missing = [needed for needed in all_needed if getattr(self, needed) is None]
            if value is not None and missing:
                raise ValueError(f"Model.{name} is {value}, and {missing[0]} is None; give it")
        if self.head_dim is None and self.d_model % self.n_head:
            raise ValueError(
                f"Model.n_head is {self.n_head}, which does not divide d_model {self.d_model}; change one, or give "
                f"head_dim"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"Model.n_kv_head is {self.kv_heads}; it must divide n_head, which is {self.n_head}")
        for name, other in LIMITED_BY.items():
            value, most = getattr(self, name), getattr(self, other)
            if value is not None and most is not None and value > most:
                raise ValueError(f"Model.{name} is {value}, and {other} is {most}; it can be at most that")
        if self.patch_size is not None and self.image_size is not None and self.image_size % self.patch_size:
            raise ValueError(
                f"Model.patch_size is {self.patch_size}, which does not divide image_size {self.image_size}; change one"
            )
        for name, other in EXCLUDED:
            if getattr(self, name) and getattr(self, other):
                raise ValueError(
                    f"Model.{name} is {getattr(self, name)!r} and {other} is {getattr(self, other)!r}; no model that "
                    f"is known here has both: leave one out, or trace a module with model_from_module"
                )

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.n_head

    @property
    def d_value(self) -> int:
        """Width of a head's values."""
        return self.v_head_dim or self.d_head

    @property
    def seq_len_of_image(self) -> int | None:
        """Tokens that an image is: its patches, and ViT's class token; None for a model of text."""
        if self.patch_size is None or self.image_size is None:
            return None
        return (self.image_size // self.patch_size) ** 2 + (not self.adaln)

    @property
    def param_count(self) -> int:
        """Number of parameters. A tied weight counts once; learned positions without a length count as 0 rows."""
        from fsdp_sim.spec.blocks import param_shapes

        return sum(rows * columns for _, rows, columns in param_shapes(self, self.max_seq_len or 0))

    @property
    def active_param_count(self) -> int:
        """Parameters that compute one token: of the routed experts only those that are chosen for it."""
        from fsdp_sim.spec.blocks import param_shapes

        idle = 1 - (self.experts_per_token or 0) / (self.n_expert or 1)
        routed = sum(r * c for name, r, c in param_shapes(self, self.max_seq_len or 0) if name.startswith("experts."))
        return self.param_count - round(routed * idle)

    @classmethod
    def preset(cls, name: str) -> Model:
        """A published model by its name, as it stands in the catalogue or on the Hugging Face Hub.

        Raises:
            ValueError: there is none of that name; gives the nearest.
        """
        presets = _presets()
        name = _known_as().get(_spelled(name), name)
        if name not in presets:
            near = meant(name.rpartition("/")[2], presets)
            if near:
                raise ValueError(f"no model is called {in_brief(name)}; the nearest names are {', '.join(near)}")
            raise ValueError(
                f"no model is called {in_brief(name)}: it is not in the catalogue, so give its dimensions (n_layer, "
                f"d_model, n_head, d_ffn, vocab), or trace it with model_from_module; the catalogue has "
                f"{', '.join(presets)}"
            )
        return presets[name]

    @classmethod
    def from_config(cls, source: str | Path | Mapping[str, Any]) -> Model:
        """A model from a Hugging Face ``config.json``, from a folder that holds one, from what is in one, or from the
        ``[model]`` table of torchtitan's TOML.

        Nothing is downloaded, and transformers is not needed.

        Raises:
            ValueError: its type is not known, or a key that changes the shape is not understood; names the key, its
                value and the remedy.
            OSError: there is no such file.

        Example:
            >>> Model.from_config({"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 8}).kv_heads
            8
        """
        from fsdp_sim.spec.hugging_face import model_of

        return model_of(source)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names in the catalogue."""
        return tuple(_presets())


@functools.lru_cache(maxsize=1024)
def _spelled(name: str) -> str:
    """A name without what does not tell one shape from another: ``Qwen/Qwen2.5-7B-Instruct`` is ``qwen2.57b``."""
    plain = re.sub(r"^meta[-_](?=llama)|([-_](instruct|base|chat|hf|it|pt))+$", "", name.lower().rpartition("/")[2])
    return re.sub(r"[-_ ]", "", plain)


@functools.cache
def _known_as() -> dict[str, str]:
    return {_spelled(name): name for name in _presets()}


@functools.cache
def _presets() -> dict[str, Model]:
    text = files("fsdp_sim.spec").joinpath("models.toml").read_text()
    families = tomllib.loads(text)
    return {
        name: Model(name=name, **(family.get("all", {}) | dims))
        for family in families.values()
        for name, dims in family.items()
        if name != "all"
    }
