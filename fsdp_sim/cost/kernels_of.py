"""The kernels of a transformer's pieces, as torch runs them: matmuls, attention, and what is bound by memory.

Counts follow the eager modules (`labs/model/gpt.py`; Llama as published): every pointwise operation reads its inputs
from memory and writes its outputs there. `Kernel.fusable` marks what a compiler fuses. Shapes in comments: T tokens, D
d_model, F d_ffn, V vocab.
"""

from __future__ import annotations

from fsdp_sim.cost.work import Kernel
from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.spec import Model

Kernels = list[Kernel]


def matmul(m: int, n: int, k: int, dtype: str, *, saved: bool = False) -> Kernel:
    """(m, k) @ (k, n)."""
    size = DTYPE_BYTES[dtype]
    return Kernel(
        "matmul", 2.0 * m * n * k, float(size * (m * k + k * n + m * n)), (1, m, n, k), dtype, 1, False, saved
    )


def linear_backward(m: int, n: int, k: int, dtype: str) -> Kernels:
    """The gradients of the input (m, k) and of the weight (n, k), from that of the output (m, n)."""
    return [matmul(m, k, n, dtype), matmul(n, k, m, dtype)]


def pointwise(elements: float, dtype: str, *, fusable: bool = True) -> Kernel:
    """A kernel that is bound by memory and moves this many elements in all, read and written."""
    return Kernel("memory", 0.0, elements * DTYPE_BYTES[dtype], (), dtype, 1, fusable)


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
    model: Model, batch: int, queries: int, keys: int, dtype: str, causal: bool, *, own_keys: bool = True
) -> tuple[Kernels, Kernels]:
    """Queries, keys and values; attention; projection. ``own_keys`` False: they come from the encoder's output."""
    d, q, kv = model.d_model, model.n_head * model.d_head, model.kv_heads * model.d_head
    tokens, key_tokens = batch * queries, batch * keys
    if own_keys and model.bias:  # one matrix
        shapes = [(tokens, q + 2 * kv, d)]
    else:
        shapes = [(tokens, q, d), (key_tokens, kv, d), (key_tokens, kv, d)]
    forward = [matmul(*shape, dtype, saved=i == 0) for i, shape in enumerate(shapes)]
    backward = [k for shape in reversed(shapes) for k in linear_backward(*shape, dtype)]
    if model.positions == "rope" and own_keys:  # cast to fp32, a complex product, cast back
        rotate = pointwise(6.0 * tokens * (q + kv), dtype)
        forward, backward = [*forward, rotate], [rotate, *backward]
    if kv != q:  # keys and values are repeated for the heads that share them
        repeat = pointwise(2.0 * key_tokens * (q + kv), dtype)
        forward, backward = [*forward, repeat], [repeat, *backward]
    core = attention(batch, model.n_head, queries, keys, model.d_head, dtype, causal)
    forward += [core, matmul(tokens, d, q, dtype, saved=True)]
    return forward, [*linear_backward(tokens, d, q, dtype), attention_backward(core), *backward]


def feed_forward(model: Model, tokens: int, dtype: str) -> tuple[Kernels, Kernels]:
    """Up (and gate), activation, down."""
    d, f = model.d_model, model.d_ffn
    ups = 2 if model.ffn_type == "swiglu" else 1
    # gelu and relu read and write (T, F); silu(gate) · up: one such, then a product that reads two and writes one
    act, act_backward = (5.0, 8.0) if ups == 2 else (2.0, 3.0)
    forward = [matmul(tokens, f, d, dtype, saved=i == 0) for i in range(ups)]
    forward += [pointwise(act * tokens * f, dtype), matmul(tokens, d, f, dtype)]
    backward = [*linear_backward(tokens, d, f, dtype), pointwise(act_backward * tokens * f, dtype)]
    return forward, backward + linear_backward(tokens, f, d, dtype) * ups


def embedding(model: Model, tokens: int, dtype: str) -> tuple[Kernels, Kernels]:
    """Rows are gathered (and positions added) forward; backward adds into a dense gradient that was set to zero."""
    d, size = model.d_model, DTYPE_BYTES[dtype]
    added = 3.0 * tokens * d if model.positions == "learned" else 0.0
    gather = Kernel("embedding", 0.0, 2.0 * size * tokens * d, (), dtype)
    scatter = Kernel("embedding", 0.0, float(size * (model.vocab * d + 3 * tokens * d)), (), dtype)
    return [gather, *([pointwise(added, dtype)] if added else [])], [scatter]


def head(model: Model, tokens: int, dtype: str, *, fused_loss: bool, metrics: int = 0) -> tuple[Kernels, Kernels]:
    """Last norm, logits (T, V), cross-entropy in fp32."""
    d, v, size = model.d_model, model.vocab, DTYPE_BYTES[dtype]
    norm_forward, norm_backward = norm(model.norm, tokens, d, dtype)
    # torch: cast to fp32 (read logits, write 4 bytes), log-softmax (read, write); backward: read, write, cast back
    # fused: read the logits; backward: read them and write the gradient in their place
    moved, moved_back = (size, 2 * size) if fused_loss else (size + 12, 8 + 4 + size)
    loss = Kernel("cross_entropy", 0.0, float(tokens * v) * moved, (), "fp32")
    forward = [*norm_forward, matmul(tokens, v, d, dtype), loss]
    if metrics:
        forward += [loss._replace(bytes=float(tokens * v) * (size + 12), count=metrics)]
    backward = [loss._replace(bytes=float(tokens * v) * moved_back), *linear_backward(tokens, v, d, dtype)]
    return forward, [*backward, *norm_backward]
