"""The kernels of a transformer's pieces, as torch runs them: matmuls, attention, and what is bound by memory.

Counts follow the eager modules (`labs/model/gpt.py`; Llama as published): every pointwise operation reads its inputs
from memory and writes its outputs there. `Kernel.fusable` marks what a compiler fuses. Shapes in comments: T tokens, D
d_model, F d_ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_sim.cost.linears import Kernels, linear, matmul, pointwise
from fsdp_sim.cost.weights import Weights
from fsdp_sim.cost.work import Kernel
from fsdp_sim.schedule import DTYPE_BYTES, ROUTER, SDPA
from fsdp_sim.spec import GATED, Block, Model, has_bias, joined_qkv


def pairs(queries: int, keys: int, causal: bool, window: int | None, chunked: bool) -> float:
    """How many keys the queries of a sequence see together: half of the square if causal, less within a window."""
    if window is None or window >= keys:
        return queries * keys * (0.5 if causal else 1.0)
    if chunked:
        whole, rest = divmod(keys, window)
        return (whole * window**2 + rest**2) * (0.5 if causal else 1.0)
    return queries * window - window**2 * (0.5 if causal else 0.25)  # fewer at the ends: half of it lies on each side


def attention(model: Model, batch: int, queries: int, keys: int, dtype: str, block: Block) -> tuple[Kernel, Kernel]:
    """Fused attention: scores and weighted sum, then scores again and four products (Dao 2023, FlashAttention-2)."""
    heads, d, d_value = model.n_head, model.d_head, model.d_value
    seen = 2.0 * batch * heads * pairs(queries, keys, block.causal, block.window, model.chunked_window)
    moved = float(DTYPE_BYTES[dtype] * batch * heads * (queries + keys) * (d + d_value))
    shape = (batch, heads, queries, d)
    forward = Kernel("attention", seen * (d + d_value), moved, shape, dtype, 1, False, SDPA)
    return forward, forward._replace(flops=seen * (3 * d + 2 * d_value), bytes=2.0 * moved, op="")


def norm(kind: str, tokens: int, d: int, weights: Weights) -> tuple[Kernels, Kernels]:
    """One kernel: it reads and writes (T, D); backward reads input and gradient and writes one.

    What the norm learns has its gradient from a kernel of its own, which reads both again (torch's
    aten/native/cuda/layer_norm_kernel.cu, for RMS norms too).

    A composed RMS norm is several. In bytes per element of bf16, forward: to fp32 6, square 8, mean 4, times the
    inverse deviation 8, to bf16 6, times the weight 4. Backward: of the weight 14, to fp32 6, of the product 24, of
    mean, root and square 20, added up 12, to bf16 6.
    """
    dtype = weights.stream_dtype
    if kind == "rmsnorm" and weights.composed_norm and dtype == "fp32":  # which is not converted: 28 and 64 bytes
        return [pointwise(7.0 * tokens * d, dtype, count=6)], [pointwise(16.0 * tokens * d, dtype, count=12)]
    if kind == "rmsnorm" and weights.composed_norm:
        return [pointwise(18.0 * tokens * d, dtype, count=8)], [pointwise(41.0 * tokens * d, dtype, count=14)]
    learns = weights.lora_rank is None
    return [pointwise(2.0 * tokens * d, dtype)], [pointwise((3.0 + 2.0 * learns) * tokens * d, dtype, count=1 + learns)]


def residual(tokens: int, d: int, dtype: str) -> tuple[Kernels, Kernels]:
    """Reads two and writes one (T, D), forward, and again where the two gradients meet."""
    return [pointwise(3.0 * tokens * d, dtype)], [pointwise(3.0 * tokens * d, dtype)]


def attention_layer(
    model: Model,
    batch: int,
    queries: int,
    keys: int,
    weights: Weights,
    block: Block,
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
    if model.kv_lora_rank:
        forward, backward = _latent_queries_keys_values(model, tokens, weights, grad=grad)
    else:
        if own_keys and joined_qkv(model):
            shapes = [("qkv", tokens, q + 2 * kv)]
        else:
            of_each = ("qkv",) * 3 if joined_qkv(model) else ("wq", "wk", "wv")
            shapes = list(zip(of_each, (tokens, key_tokens, key_tokens), (q, kv, kv), strict=True))
        forward, backward = joined(
            linear(
                weights, f"{name}.{of}", rows, n_out, d,
                bias=has_bias(model, "qkv"), grad=grad, again=own_keys and i > 0,
            )
            for i, (of, rows, n_out) in enumerate(shapes)
        )  # fmt: skip
        if len(shapes) == 1:  # the gradients of queries, keys and values are joined
            backward = [*[pointwise(2.0 * tokens * (q + 2 * kv), dtype)] * bool(backward), *backward]
    needed = bool(backward) or (model.qk_norm is not None and weights.trains(f"{name}.q_norm.weight"))
    between: list[tuple[float, int]] = []  # numbers that what is bound by memory moves before attention, and kernels
    if model.qk_norm and own_keys:
        between += [(2.0 * tokens * (q + kv), 2)]
    if model.positions == "rope" and own_keys:  # to fp32 (6 bytes of each number), a complex product (8), back (6)
        rotated = (model.n_head + 1) * model.rope_head_dim if model.rope_head_dim else q + kv
        between += [(10.0 * tokens * rotated, 6)]
    if kv != q and not model.kv_lora_rank:  # keys and values are repeated for the heads that share them
        between += [(2.0 * key_tokens * (q + kv), 2)]
    for moved, count in between:
        kernels = pointwise(moved, weights.stream_dtype, count=count)
        forward, backward = [*forward, kernels], [kernels] * needed + backward
    if weights.stream_dtype != dtype and not model.kv_lora_rank:  # attention is in the dtype of compute
        narrow = pointwise(1.5 * (tokens * q + 2 * key_tokens * kv), weights.stream_dtype, count=3)
        forward, backward = [*forward, narrow], [narrow] * needed + backward
    core, core_back = attention(model, batch, queries, keys, dtype, block)
    projection = "proj" if joined_qkv(model) else "wo"
    attended = model.n_head * model.d_value
    out, out_back = linear(
        weights, f"{name}.{projection}", tokens, d, attended, bias=has_bias(model, "proj"), grad=needed
    )
    return [*forward, core, *out], [*out_back, *[core_back] * needed, *backward]


def _latent_queries_keys_values(model: Model, tokens: int, weights: Weights, *, grad: bool) -> tuple[Kernels, Kernels]:
    """Narrow, a norm, wide (DeepSeek); then the parts with and without a position are joined, for queries and keys."""
    d, heads, rank, rope = model.d_model, model.n_head, model.kv_lora_rank or 0, model.rope_head_dim or 0
    q, wide, dtype = heads * model.d_head, heads * (model.d_head - rope + model.d_value), weights.compute_dtype

    def through(narrow: int, more: int, out: int, of: str) -> list[tuple[Kernels, Kernels]]:
        first = linear(weights, f"attn.w{of}_a", tokens, narrow + more, d, grad=grad)
        needed = bool(first[1]) or weights.trains(f"attn.{of}_norm.weight")
        normed = norm("rmsnorm", tokens, narrow, weights)
        return [
            first,
            (normed[0], normed[1] * needed),
            linear(weights, f"attn.w{of}_b", tokens, out, narrow, grad=needed),
        ]

    plain = [linear(weights, "attn.wq", tokens, q, d, grad=grad)]
    parts = through(model.q_lora_rank, 0, q, "q") if model.q_lora_rank else plain
    forward, backward = joined([*parts, *through(rank, rope, wide, "kv")])
    join = pointwise(4.0 * tokens * q + 2.0 * tokens * heads * model.d_value, dtype)  # and the output laid out anew
    return [*forward, join], [join] * bool(backward) + backward


def joined(parts: Iterable[tuple[Kernels, Kernels]]) -> tuple[Kernels, Kernels]:
    """One after the other, and back."""
    made = list(parts)
    return [k for part, _ in made for k in part], [k for _, part in reversed(made) for k in part]


def feed_forward(
    model: Model, tokens: int, weights: Weights, *, name: str = "ffn", width: int | None = None, grad: bool = True
) -> tuple[Kernels, Kernels]:
    """Up (and gate), activation, down."""
    d, f, dtype = model.d_model, width or model.d_ffn, weights.stream_dtype
    names = [f"{name}.up", f"{name}.gate"] if model.ffn_type in GATED else [f"{name}.up"]
    bias = has_bias(model, "ffn")
    up, up_back = joined(
        linear(weights, of, tokens, f, d, bias=bias, grad=grad, again=i > 0) for i, of in enumerate(names)
    )
    needed = bool(up_back)
    act, act_backward = _activation(model)
    gated = model.ffn_type in GATED
    down, down_back = linear(weights, f"{name}.down", tokens, d, f, bias=bias, grad=needed)
    backward = [*down_back, *[pointwise(act_backward * tokens * f, dtype, count=1 + 2 * gated)] * needed, *up_back]
    return [*up, pointwise(act * tokens * f, dtype, count=1 + gated), *down], backward


def _activation(model: Model) -> tuple[float, float]:
    """gelu and relu read and write (T, F); silu(gate) · up: one such, then a product that reads two and writes one."""
    return (5.0, 8.0) if model.ffn_type in GATED else (2.0, 3.0)


def moe_parts(
    model: Model, tokens: int, weights: Weights, *, grad: bool = True, ranks: int = 1
) -> dict[str, tuple[Kernels, Kernels]]:
    """Router and copies of the tokens in the order of their experts (``router``); the experts' matmuls (``experts``);
    back, weighed, and added up (``sum``); the experts that compute every token (``shared``), and their sum with the
    others (``sum_shared``).

    As transformers' ``grouped_mm`` experts do it (integrations/moe.py). Experts are taken to get equally many tokens.
    Their weights are no linear layers: nothing adapts them, and they compute in no fp8. Quantised, they are
    (`Weights.quantises`): see `_expert_by_expert`.

    Args:
        ranks: that share out the experts: each computes 1/ranks of them, for the tokens of all, which it lays out by
            expert, and back (torchtitan 0.2.2, models/moe/utils.py).
    """
    d, experts, width, dtype = model.d_model, model.n_expert or 1, model.d_expert or model.d_ffn, weights.compute_dtype
    rows = tokens * (model.experts_per_token or 1)
    ups = width * (2 if model.ffn_type in GATED else 1)
    trains = {name: weights.trains(name) for name in ("router", "experts.up", "experts.down")}
    act, act_backward = _activation(model)

    def grouped(n: int, k: int, trained: bool, needed: bool) -> tuple[Kernels, Kernels]:
        own = experts // ranks
        each = max(1, round(rows / own))
        moved = float(DTYPE_BYTES[dtype] * (rows * k + own * n * k + rows * n))
        one = Kernel("matmul", 2.0 * rows * n * k, moved, (own, each, n, k), dtype, 1, False, "_grouped_mm")
        of_input, of_weight = (one._replace(shape=(own, *shape), op="") for shape in ((each, k, n), (n, k, each)))
        back = [of_input] * needed + [of_weight] * trained
        return [one], back

    router = [matmul(tokens, experts, d, dtype, op=ROUTER)]
    router_back = [matmul(tokens, d, experts, dtype)] * grad + [
        matmul(experts, d, tokens, dtype, of_weight=True)
    ] * trains["router"]
    chosen, copy = pointwise(8.0 * tokens * experts, "fp32"), pointwise(2.0 * rows * d, dtype)
    up, up_back = grouped(ups, d, trains["experts.up"], grad)
    needed = bool(up_back)
    down, down_back = grouped(d, width, trains["experts.down"], needed)
    weigh, add = copy, pointwise(1.0 * (rows + tokens) * d, dtype)
    any_back = bool(down_back or router_back)
    moves = [copy] * (ranks > 1)
    parts = {
        "router": ([*router, chosen, copy], [copy] * grad + [chosen] * bool(router_back) + router_back),
        "experts": (
            [*moves, *up, pointwise(act * rows * width, dtype), *down, *moves],
            moves * any_back
            + down_back
            + [pointwise(act_backward * rows * width, dtype)] * needed
            + up_back
            + moves * grad,
        ),
        "sum": ([weigh, copy, add], [add, copy, pointwise(5.0 * rows * d, dtype)] * any_back),
    }
    if weights.looped:
        back = [chosen] * bool(router_back) + router_back
        looped = _expert_by_expert(model, tokens, weights, grad=grad)
        parts |= {"router": ([*router, chosen], back), "experts": looped, "sum": ([], [])}
    if model.n_shared_expert:
        shared = model.d_shared_expert or model.n_shared_expert * width
        more, more_back = feed_forward(model, tokens, weights, name="shared", width=shared, grad=grad)
        if model.shared_expert_gate:
            gate, gate_back = linear(weights, "shared_gate", tokens, 1, d, grad=grad)
            more, more_back = [*more, *gate, pointwise(2.0 * tokens * d, dtype)], gate_back + more_back
        added, added_back = residual(tokens, d, dtype)
        parts |= {"shared": (more, more_back), "sum_shared": (added, added_back * bool(more_back or any_back))}
    return parts


def _expert_by_expert(model: Model, tokens: int, weights: Weights, *, grad: bool) -> tuple[Kernels, Kernels]:
    """Experts as linear layers in a loop: `MixtralSparseMoeBlock` of transformers 4.45.

    Of each: which tokens are its own (five small kernels), a copy of them, its layers, times their weights, added to
    the output. Backward of the copy is a tensor of all tokens, zeros but for these, added to that of the others.
    """
    d, experts, width, dtype = model.d_model, model.n_expert or 1, model.d_expert or model.d_ffn, weights.stream_dtype
    each = max(1, round(tokens * (model.experts_per_token or 1) / experts))
    find, copy = pointwise(2.0 * tokens, "fp32", count=5), pointwise(2.0 * each * d, dtype)
    layers, back = feed_forward(model, each, weights, name="experts", width=width, grad=grad)
    forward = [find, copy, *layers, pointwise(2.0 * each * d, dtype), pointwise(3.0 * each * d, dtype)]
    added = [pointwise((1.0 * tokens + 3.0 * each) * d, dtype, count=2), pointwise(3.0 * tokens * d, dtype)]
    backward = [copy, pointwise(5.0 * each * d, dtype, count=3), *back, *added * grad] if grad or back else []
    return forward * experts, backward * experts


def modulation(model: Model, batch: int, tokens: int, weights: Weights) -> tuple[Kernels, Kernels]:
    """Shifts, scales and gates of a block from time and class: a matmul of one row per image, then pointwise."""
    made, made_back = linear(weights, "modulation", batch, 6 * model.d_model, model.d_model, bias=True)
    moves = [pointwise(2.0 * tokens * model.d_model, weights.compute_dtype)] * 6
    return [*made, *moves], [*moves, *made_back]


def embedding(model: Model, tokens: int, weights: Weights) -> tuple[Kernels, Kernels]:
    """Rows are gathered (and positions added) forward; backward adds into a dense gradient that was set to zero."""
    d, dtype = model.d_model, weights.compute_dtype
    size = DTYPE_BYTES[dtype]
    if model.patch_size:  # a convolution without overlap is a matmul; the image needs no gradient
        pixels = model.patch_size**2 * model.channels
        of_weight = [matmul(d, pixels, tokens, dtype, of_weight=True)] * weights.trains("embed.patches.weight")
        return [matmul(tokens, d, pixels, dtype), pointwise(3.0 * tokens * d, dtype)], of_weight
    added = 3.0 * tokens * d * ((model.positions == "learned") + (model.token_types > 0))
    gather = Kernel("embedding", 0.0, 2.0 * size * tokens * d, (), dtype)
    scatter = Kernel("embedding", 0.0, float(size * (model.vocab * d + 3 * tokens * d)), (), dtype)
    trained = weights.trains("embed.weight")
    normed, normed_back = norm(model.norm, tokens, d, weights) if model.embed_norm else ([], [])
    forward = [gather, *([pointwise(added, dtype)] if added else []), *normed]
    return forward, normed_back * trained + [scatter] * trained


def head(
    model: Model,
    tokens: int,
    weights: Weights,
    *,
    fused_loss: bool,
    shifted: bool = False,
    metrics: int = 0,
    grad: bool = True,
    wide: int = 4,
) -> tuple[Kernels, Kernels]:
    """Last norm, logits (T, V), cross-entropy in numbers of ``wide`` bytes.

    The head is never in fp8, and never adapted or quantised.
    """
    d, v, dtype = model.d_model, model.vocab, weights.compute_dtype
    size, trained = DTYPE_BYTES[dtype], weights.trains("embed.weight" if model.tied_embeddings else "head.weight")
    needed, forward, backward = grad, list[Kernel](), list[Kernel]()

    def then(piece: tuple[Kernels, Kernels], trains: bool) -> None:
        nonlocal forward, backward, needed
        needed = needed or trains
        forward, backward = forward + piece[0], piece[1] * needed + backward

    if model.norm_position != "post":
        then(norm(model.norm, tokens, d, weights), weights.trains("head.norm.weight"))
    if model.adaln:  # predicts the noise of each patch and its variance; the loss is a mean square
        v, trained = 2 * (model.patch_size or 1) ** 2 * model.channels, weights.trains("head.weight")
    elif model.patch_size:
        tokens //= model.seq_len_of_image or 1  # the class token of each image
    if model.head_transform:
        transformed, wide_trained = 2.0 * tokens * d, weights.trains("head.transform.weight")
        back = [matmul(tokens, d, d, dtype)] * needed + [matmul(d, d, tokens, dtype, of_weight=True)] * wide_trained
        then(([matmul(tokens, d, d, dtype)], back), wide_trained)
        then(([pointwise(transformed, dtype)], [pointwise(1.5 * transformed, dtype)]), False)
        then(norm(model.norm, tokens, d, weights), weights.trains("head.transform_norm.weight"))
    back = [matmul(tokens, d, v, dtype)] * needed + [matmul(v, d, tokens, dtype, of_weight=True)] * trained
    forward, backward = [*forward, matmul(tokens, v, d, dtype)], back + backward
    if model.logit_softcap:  # a division, a tanh, a product
        forward = [*forward, pointwise(6.0 * tokens * v, dtype)]
        backward = [pointwise(7.0 * tokens * v, dtype), *backward]
    if model.adaln:
        squares = pointwise(6.0 * tokens * v, "fp32")
        return [*forward, squares], [squares, *backward]
    # torch: cast to fp32 (read logits, write 4 bytes), log-softmax (read, write); backward: read, write, cast back
    # fused: read the logits; backward: read them and write the gradient in their place
    # shifted: a copy in fp32; backward: zeros, and the gradient written over them
    cast = size + wide if wide == 4 else 0
    moved, moved_back = (size, 2 * size) if fused_loss else (2 * wide + cast, 2 * wide + cast)
    moved, moved_back = moved + 2 * wide * shifted, moved_back + 3 * wide * shifted
    loss = Kernel("cross_entropy", 0.0, float(tokens * v) * moved, (), "fp32")
    forward += [loss]
    if metrics:
        forward += [loss._replace(bytes=float(tokens * v) * (size + 12), count=metrics)]
    return forward, [loss._replace(bytes=float(tokens * v) * moved_back), *backward]
