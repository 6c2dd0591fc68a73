"""The kernels of a transformer's pieces, as torch runs them: matmuls, attention, and what is bound by memory.

Counts follow the eager modules (`labs/model/gpt.py`; Llama as published): every pointwise operation reads its inputs
from memory and writes its outputs there. `Kernel.fusable` marks what a compiler fuses. Shapes in comments: T tokens, D
d_model, F d_ffn, V vocab.
"""

from __future__ import annotations

from fsdp_sim.cost.linears import Kernels, linear, matmul, pointwise
from fsdp_sim.cost.weights import Weights
from fsdp_sim.cost.work import Kernel
from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.spec import Model


def attention(batch: int, heads: int, queries: int, keys: int, head_dim: int, dtype: str, causal: bool) -> Kernel:
    """Fused attention: scores and weighted sum, 4 · batch · heads · queries · keys · head_dim, half of it if causal."""
    flops = 4.0 * batch * heads * queries * keys * head_dim * (0.5 if causal else 1.0)
    moved = float(DTYPE_BYTES[dtype] * batch * heads * (2 * queries + 2 * keys) * head_dim)
    return Kernel("attention", flops, moved, (batch, heads, queries, head_dim), dtype, 1, False, True)


def attention_backward(forward: Kernel) -> Kernel:
    """Scores again, then four products: 2.5 times the forward's FLOPs (Dao 2023, FlashAttention-2)."""
    return forward._replace(flops=2.5 * forward.flops, bytes=2.0 * forward.bytes, saved=False)


def norm(kind: str, tokens: int, d: int, dtype: str) -> tuple[Kernels, Kernels]:
    """One kernel: it reads and writes (T, D); backward reads input and gradient and writes one.

    A composed RMS norm is several (cast to fp32, square, mean, scale, cast back, weight).
    """
    forward, backward = (7.0, 10.0) if kind == "composed_rmsnorm" else (2.0, 3.0)
    return [pointwise(forward * tokens * d, dtype)], [pointwise(backward * tokens * d, dtype)]


def residual(tokens: int, d: int, dtype: str) -> tuple[Kernels, Kernels]:
    """Reads two and writes one (T, D), forward, and again where the two gradients meet."""
    return [pointwise(3.0 * tokens * d, dtype)], [pointwise(3.0 * tokens * d, dtype)]


def attention_layer(
    model: Model,
    batch: int,
    queries: int,
    keys: int,
    weights: Weights,
    causal: bool,
    *,
    name: str = "attn",
    grad: bool = True,
) -> tuple[Kernels, Kernels]:
    """Queries, keys and values; attention; projection.

    Args:
        name: of the layer; keys and values of ``cross`` come from the encoder's output.
        grad: its input needs a gradient.
    """
    d, q, kv, dtype = model.d_model, model.n_head * model.d_head, model.kv_heads * model.d_head, weights.compute_dtype
    tokens, key_tokens, own_keys = batch * queries, batch * keys, name == "attn"
    if own_keys and model.bias:  # one matrix
        shapes = [("qkv", tokens, q + 2 * kv)]
    else:
        of_each = ("qkv",) * 3 if model.bias else ("wq", "wk", "wv")
        shapes = list(zip(of_each, (tokens, key_tokens, key_tokens), (q, kv, kv), strict=True))
    made = [
        linear(weights, f"{name}.{of}", rows, n_out, d, saved=i == 0, grad=grad, again=own_keys and i > 0)
        for i, (of, rows, n_out) in enumerate(shapes)
    ]
    forward = [k for part, _ in made for k in part]
    backward = [k for _, part in reversed(made) for k in part]
    core = attention(batch, model.n_head, queries, keys, model.d_head, dtype, causal)
    needed = bool(backward)
    if model.positions == "rope" and own_keys:  # cast to fp32, a complex product, cast back
        rotate = pointwise(6.0 * tokens * (q + kv), dtype)
        forward, backward = [*forward, rotate], [rotate] * needed + backward
    if kv != q:  # keys and values are repeated for the heads that share them
        repeat = pointwise(2.0 * key_tokens * (q + kv), dtype)
        forward, backward = [*forward, repeat], [repeat] * needed + backward
    projection = "proj" if model.bias else "wo"
    out, out_back = linear(weights, f"{name}.{projection}", tokens, d, q, saved=True, grad=needed)
    return [*forward, core, *out], [*out_back, *[attention_backward(core)] * needed, *backward]


def feed_forward(model: Model, tokens: int, weights: Weights, *, grad: bool = True) -> tuple[Kernels, Kernels]:
    """Up (and gate), activation, down."""
    d, f, dtype = model.d_model, model.d_ffn, weights.compute_dtype
    names = ["ffn.up", "ffn.gate"] if model.ffn_type == "swiglu" else ["ffn.up"]
    made = [linear(weights, of, tokens, f, d, saved=i == 0, grad=grad, again=i > 0) for i, of in enumerate(names)]
    needed = any(back for _, back in made)
    # gelu and relu read and write (T, F); silu(gate) · up: one such, then a product that reads two and writes one
    act, act_backward = (5.0, 8.0) if len(names) == 2 else (2.0, 3.0)
    down, down_back = linear(weights, "ffn.down", tokens, d, f, grad=needed)
    forward = [*(k for part, _ in made for k in part), pointwise(act * tokens * f, dtype), *down]
    backward = [*down_back, *[pointwise(act_backward * tokens * f, dtype)] * needed]
    return forward, backward + [k for _, part in reversed(made) for k in part]


def embedding(model: Model, tokens: int, weights: Weights) -> tuple[Kernels, Kernels]:
    """Rows are gathered (and positions added) forward; backward adds into a dense gradient that was set to zero."""
    d, dtype = model.d_model, weights.compute_dtype
    size = DTYPE_BYTES[dtype]
    added = 3.0 * tokens * d if model.positions == "learned" else 0.0
    gather = Kernel("embedding", 0.0, 2.0 * size * tokens * d, (), dtype)
    scatter = Kernel("embedding", 0.0, float(size * (model.vocab * d + 3 * tokens * d)), (), dtype)
    return [gather, *([pointwise(added, dtype)] if added else [])], [scatter] * weights.trains("embed.weight")


def head(
    model: Model, tokens: int, weights: Weights, *, fused_loss: bool, metrics: int = 0, grad: bool = True
) -> tuple[Kernels, Kernels]:
    """Last norm, logits (T, V), cross-entropy in fp32. The head is never in fp8, and never adapted or quantised."""
    d, v, dtype = model.d_model, model.vocab, weights.compute_dtype
    size, trained = DTYPE_BYTES[dtype], weights.trains("embed.weight" if model.tied_embeddings else "head.weight")
    norm_forward, norm_backward = norm(model.norm, tokens, d, dtype)
    needed = grad or weights.trains("head.norm.weight")
    # torch: cast to fp32 (read logits, write 4 bytes), log-softmax (read, write); backward: read, write, cast back
    # fused: read the logits; backward: read them and write the gradient in their place
    moved, moved_back = (size, 2 * size) if fused_loss else (size + 12, 8 + 4 + size)
    loss = Kernel("cross_entropy", 0.0, float(tokens * v) * moved, (), "fp32")
    forward = [*norm_forward, matmul(tokens, v, d, dtype), loss]
    if metrics:
        forward += [loss._replace(bytes=float(tokens * v) * (size + 12), count=metrics)]
    backward = [loss._replace(bytes=float(tokens * v) * moved_back)]
    backward += [matmul(tokens, d, v, dtype)] * needed + [matmul(v, d, tokens, dtype)] * trained
    return forward, backward + norm_backward * needed
