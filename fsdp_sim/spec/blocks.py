"""The blocks of a model, and the shapes of its parameters."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fsdp_sim.spec.model import Model

Shape = tuple[str, int, int]  # name, rows (dimension 0), columns (1 for a vector)
RELATIVE_ROWS = 32  # distances that T5 tells apart (transformers' T5Config.relative_attention_num_buckets)
GATED = ("swiglu", "geglu")  # three matrices in place of two
TIME_WIDTH = 256  # sines and cosines of a time, before two linear layers (Peebles & Xie 2022, DiT's TimestepEmbedder)


class Block(NamedTuple):
    """What distinguishes one block from the others of its model.

    Attributes:
        cross: it attends to the output of an encoder too.
        causal: its attention looks back only.
        moe: its feed-forward has experts.
        window: tokens that its queries see; None is all.
    """

    cross: bool = False
    causal: bool = True
    moe: bool = False
    window: int | None = None


@functools.lru_cache(maxsize=64)
def blocks(model: Model) -> dict[str, Block]:
    """Every block in the order of the forward: ``layers.0`` ..., or ``encoder.0`` ... and ``decoder.0`` ..."""
    n_encoder = model.n_encoder_layer
    found = {f"encoder.{i}": Block(causal=False) for i in range(n_encoder)}
    stack = "decoder" if n_encoder else "layers"
    return found | {f"{stack}.{i}": _block(model, i) for i in range(model.n_layer)}


def _block(model: Model, i: int) -> Block:
    sees_all = model.full_attention_every is not None and (i + 1) % model.full_attention_every == 0
    moe = model.n_expert is not None and i >= model.first_dense and (i + 1) % model.moe_every == 0
    return Block(model.n_encoder_layer > 0, model.causal, moe, None if sees_all else model.window)


def block_shapes(model: Model, block: Block | None = None) -> list[Shape]:
    """Parameters of one block, by default the model's last: norms, attention, (to the encoder,) feed-forward."""
    kind = block or _block(model, model.n_layer - 1)
    return _block_shapes(model, kind.cross, kind.moe)


@functools.lru_cache(maxsize=256)
def _block_shapes(model: Model, cross: bool, moe: bool) -> list[Shape]:
    """Blocks alike share one list."""
    d = model.d_model
    before = model.norm_position in ("pre", "both")
    after = model.norm_position != "pre"

    def around(name: str, shapes: list[Shape]) -> list[Shape]:
        first = norm_shapes(model, f"{name}_norm") if before else []
        return first + shapes + (norm_shapes(model, f"{name}_post_norm") if after else [])

    attention = _latent_shapes(model) if model.kv_lora_rank else attention_shapes(model, "attn")
    shapes = around("attn", attention)
    if cross:
        shapes += around("cross", attention_shapes(model, "cross"))
    feed_forward = moe_shapes(model) if moe else feed_forward_shapes(model, "ffn", model.d_ffn)
    shapes += feed_forward if model.parallel == 1 else around("ffn", feed_forward)
    if model.adaln:  # what shifts, scales and gates attention and feed-forward, from time and class
        shapes += [("modulation.weight", 6 * d, d), ("modulation.bias", 6 * d, 1)]
    return shapes


def norm_shapes(model: Model, name: str, width: int | None = None) -> list[Shape]:
    """What a norm learns."""
    width = width or model.d_model
    with_bias = "weight_bias" if model.bias is True and model.norm == "layernorm" else "weight"
    affine = with_bias if model.norm_affine is None else model.norm_affine
    weight, bias = (f"{name}.weight", width, 1), (f"{name}.bias", width, 1)
    return [weight] * bool(affine) + [bias] * (affine == "weight_bias")


def has_bias(model: Model, part: str) -> bool:
    """Whether the linear layers of a part have biases: ``qkv``, ``proj`` (of attention) or ``ffn``."""
    return model.bias is True or model.bias == {"qkv": "attention", "proj": "attention", "ffn": "ffn"}[part] or (
        part == "qkv" and model.bias == "qkv"
    )  # fmt: skip


def joined_qkv(model: Model) -> bool:
    """Whether queries, keys and values are one matrix."""
    return model.bias is True if model.joined_qkv is None else model.joined_qkv


def attention_shapes(model: Model, name: str) -> list[Shape]:
    """Queries, keys, values and the projection, with norms of queries and keys, and sinks."""
    d, q, kv = model.d_model, model.n_head * model.d_head, model.kv_heads * model.d_head
    bias = has_bias(model, "qkv")
    if joined_qkv(model):
        shapes = _linear(f"{name}.qkv", q + 2 * kv, d, bias)
    else:
        shapes = _linear(f"{name}.wq", q, d, bias) + _linear(f"{name}.wk", kv, d, bias)
        shapes += _linear(f"{name}.wv", kv, d, bias)
    if model.qk_norm in ("head", "projection"):
        by_head = model.qk_norm == "head"
        shapes += [(f"{name}.q_norm.weight", model.d_head if by_head else q, 1)]
        shapes += [(f"{name}.k_norm.weight", model.d_head if by_head else kv, 1)]
    if model.sinks:
        shapes += [(f"{name}.sinks", model.n_head, 1)]
    return shapes + _linear(f"{name}.{'proj' if joined_qkv(model) else 'wo'}", d, q, has_bias(model, "proj"))


def _latent_shapes(model: Model) -> list[Shape]:
    """Multi-head latent attention, as DeepSeek-V3 has it: narrow, a norm, wide; part of the keys is shared by heads."""
    d, heads, rank, rope = model.d_model, model.n_head, model.kv_lora_rank or 0, model.rope_head_dim or 0
    bias = has_bias(model, "proj")
    if model.q_lora_rank:
        shapes = _linear("attn.wq_a", model.q_lora_rank, d, bias)
        shapes += [
            ("attn.q_norm.weight", model.q_lora_rank, 1),
            ("attn.wq_b.weight", heads * model.d_head, model.q_lora_rank),
        ]
    else:
        shapes = [("attn.wq.weight", heads * model.d_head, d)]
    shapes += [*_linear("attn.wkv_a", rank + rope, d, bias), ("attn.kv_norm.weight", rank, 1)]
    shapes += [("attn.wkv_b.weight", heads * (model.d_head - rope + model.d_value), rank)]
    return shapes + _linear("attn.wo", d, heads * model.d_value, bias)


def feed_forward_shapes(model: Model, name: str, width: int) -> list[Shape]:
    """Up (and gate) and down."""
    bias = has_bias(model, "ffn")
    shapes = _linear(f"{name}.up", width, model.d_model, bias)
    if model.ffn_type in GATED:
        shapes += _linear(f"{name}.gate", width, model.d_model, bias)
    return shapes + _linear(f"{name}.down", model.d_model, width, bias)


def moe_shapes(model: Model) -> list[Shape]:
    """A router, the experts, of which dimension 0 counts them, and those that compute every token."""
    experts, d, width = model.n_expert or 0, model.d_model, model.d_expert or model.d_ffn
    ups = width * (2 if model.ffn_type in GATED else 1)
    bias = has_bias(model, "ffn")
    shapes = [("router", experts, d), *[("router_bias", experts, 1)] * bias]  # no nn.Linear in transformers
    shapes += [("experts.up", experts, ups * d), ("experts.down", experts, d * width)]
    if bias:
        shapes += [("experts.up_bias", experts, ups), ("experts.down_bias", experts, d)]
    if model.n_shared_expert:
        shapes += feed_forward_shapes(model, "shared", model.d_shared_expert or model.n_shared_expert * width)
    return [*shapes, ("shared_gate.weight", 1, d)] if model.shared_expert_gate else shapes


def root_shapes(model: Model, seq_len: int) -> list[Shape]:
    """What is in no block: embeddings, the last norm, the head unless it is tied."""
    return (_image_shapes if model.patch_size else _text_shapes)(model, seq_len)


def _text_shapes(model: Model, seq_len: int) -> list[Shape]:
    d = model.d_model
    shapes = [("embed.weight", model.vocab, d)]
    if model.positions == "learned":
        shapes += [("embed.positions", model.max_seq_len or seq_len, d)]
    if model.token_types:
        shapes += [("embed.token_types", model.token_types, d)]
    if model.embed_norm:
        shapes += norm_shapes(model, "embed.norm")
    if model.positions == "relative":
        shapes += [("embed.relative", RELATIVE_ROWS, model.n_head)]
        shapes += [("embed.relative_encoder", RELATIVE_ROWS, model.n_head)] * (model.n_encoder_layer > 0)
    if model.norm_position != "post":
        shapes += norm_shapes(model, "head.encoder_norm") if model.n_encoder_layer else []
        shapes += norm_shapes(model, "head.norm")
    if model.head_transform:
        shapes += [*_linear("head.transform", d, d, True), *norm_shapes(model, "head.transform_norm")]
    shapes += [] if model.tied_embeddings else [("head.weight", model.vocab, d)]
    return [*shapes, ("head.bias", model.vocab, 1)] if model.head_bias else shapes


def _image_shapes(model: Model, seq_len: int) -> list[Shape]:
    """ViT as in Dosovitskiy et al. 2021, DiT as in Peebles & Xie 2022: it predicts noise and its variance."""
    d, patch = model.d_model, (model.patch_size or 0) ** 2 * model.channels
    shapes = _linear("embed.patches", d, patch, True)
    if model.adaln:
        shapes += _linear("embed.time_in", d, TIME_WIDTH, True) + _linear("embed.time_out", d, d, True)
        shapes += [("embed.classes", model.vocab + 1, d)]  # one stands for none (guidance without a classifier)
        return shapes + _linear("head.modulation", 2 * d, d, True) + _linear("head", 2 * patch, d, True)
    shapes += [("embed.class_token", 1, d), ("embed.positions", model.seq_len_of_image or seq_len, d)]
    return shapes + norm_shapes(model, "head.norm") + _linear("head", model.vocab, d, True)


def param_shapes(model: Model, seq_len: int) -> list[Shape]:
    """Every parameter of the model; a tied weight once."""
    return root_shapes(model, seq_len) + [s for block in blocks(model).values() for s in block_shapes(model, block)]


def _linear(name: str, rows: int, columns: int, bias: bool) -> list[Shape]:
    return [(f"{name}.weight", rows, columns)] + ([(f"{name}.bias", rows, 1)] if bias else [])
