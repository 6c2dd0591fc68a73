"""How many bytes a transformer keeps from forward to backward, and how many it needs for a moment, by segment.

A segment (the embedding, one block, the head with its loss) is written down as a tape: the operations of its forward
in order, each with the tensors it reads, writes and saves for backward. Walking the tape as autograd does, counting
what is alive, gives every figure: no formula has to be trusted that is not a sum over this list.

The tapes are those of torch on a GPU: fused attention (`F.scaled_dot_product_attention`, which keeps its output and
one number per row and head) unless the plan says ``math``, fused norms, no dropout. Sources: ``derivatives.yaml`` of
torch for what each operator saves; Korthikanti et al. 2022 (arXiv 2205.05198) for the idea. Traces of real modules
(`fsdp_sim.measure.model_from_module`) give the same bytes.
"""

from __future__ import annotations

import functools

from fsdp_sim.cost.tape import Activations, Step, Tape, walk, walk_parts
from fsdp_sim.cost.writer import Writer
from fsdp_sim.schedule import DTYPE_BYTES, ROUTER
from fsdp_sim.spec import GATED, Block, Model, Plan, block_shapes, joined_qkv, root_shapes

SHIFTED = ("shifted", "shifted_uncast")  # of `Plan.cross_entropy`
WHOLE = ("torch", *SHIFTED)  # the log-softmax is a tensor
__all__ = ["SHIFTED", "WHOLE", "Activations", "block_activations", "embed_activations", "head_activations"]


@functools.lru_cache(maxsize=256)
def block_activations(
    model: Model,
    plan: Plan,
    block: Block | None = None,
    *,
    fused_norm: bool = True,
    name: str = "",
    grad: bool = True,
) -> Activations:
    """What one block keeps and needs.

    Args:
        block: None is a plain one: dense, without attention to an encoder.
        fused_norm: an RMS norm is one kernel, as on a GPU; on a CPU torch composes it of eight, and keeps fp32 copies.
        name: of the block, which decides what of it is frozen.
        grad: its input needs a gradient.
    """
    tape = block_tape(model, plan, block, fused_norm=fused_norm, name=name)
    return walk(tape._replace(input_grad=grad))


def activations_of_segments(
    model: Model, plan: Plan, block: Block, *, fused_norm: bool = True, name: str = "", grad: bool = True
) -> dict[str, Activations]:
    """The same of each segment of a block, by what their names end with: several where ranks share out its experts."""
    tape = block_tape(model, plan, block, fused_norm=fused_norm, name=name)
    if len(tape.parts) > 1:
        return walk_parts(tape._replace(input_grad=grad))
    return {"": block_activations(model, plan, block, fused_norm=fused_norm, name=name, grad=grad)}


@functools.lru_cache(maxsize=256)
def embed_activations(model: Model, plan: Plan, *, fused_norm: bool = True) -> Activations:
    """What looking up tokens (and adding positions) keeps and needs.

    Args:
        fused_norm: see `block_activations`.
    """
    return walk(embed_tape(model, plan, fused_norm=fused_norm)._replace(input_grad=False))


@functools.lru_cache(maxsize=256)
def head_activations(model: Model, plan: Plan, *, fused_norm: bool = True, grad: bool = True) -> Activations:
    """What the last norm, the head and the cross-entropy keep and need.

    Args:
        fused_norm, grad: see `block_activations`.
    """
    return walk(head_tape(model, plan, fused_norm=fused_norm)._replace(input_grad=grad))


def block_tape(
    model: Model, plan: Plan, block: Block | None = None, *, fused_norm: bool = True, name: str = ""
) -> Tape:
    """Norm, attention, addition, (the same over the encoder's output,) norm, feed-forward, addition."""
    block = block or Block()
    tape = Writer(model, plan, block_shapes(model, block), fused_norm, name)

    def attend(read: str, source: str = "") -> str:
        return latent_attention(tape, read) if model.kv_lora_rank else self_or_cross_attention(tape, read, source)

    def feed(read: str) -> str:
        return experts(tape, read) if block.moe else feed_forward(tape, read, "ffn", model.d_ffn)

    if model.adaln:
        rows = {"modulation": plan.micro_batch * 6 * model.d_model * tape.number}
        tape.step(Step((), ("modulation",), op="addmm"), rows)
    if model.parallel:
        tape.norm("x", "attn.n", model.d_model, "attn_norm")
        attended = attend("attn.n")
        if model.parallel == 2:
            tape.norm("x", "ffn.n", model.d_model, "ffn_norm")
        tape.add(attended, feed("ffn.n" if model.parallel == 2 else "attn.n"), "both", model.d_model)
        tape.add("x", "both", "y", model.d_model)
        return tape.done()
    stream = "x"
    tape.branch("attn", stream, attend, "attn.y")
    stream = "attn.y"
    if block.cross:
        tape.branch("cross", stream, lambda read: attend(read, "encoded"), "cross.y")
        stream = "cross.y"
    tape.branch("ffn", stream, feed, "y")
    return tape.done()


def self_or_cross_attention(tape: Writer, read: str, source: str = "") -> str:
    """Queries, keys and values; norms and rotations; attention; projection. ``source``: what keys are made of."""
    model = tape.model
    d, q, kv, name = (
        model.d_model,
        model.n_head * model.d_head,
        model.kv_heads * model.d_head,
        "cross" if source else "attn",
    )
    rotated, normed = model.positions == "rope" and not source, model.qk_norm is not None and not source
    one = joined_qkv(model)
    if one and not source:  # one matrix; the gradients of q, k and v are joined into one before it
        tape.linear(read, f"{name}.qkv", d, q + 2 * kv, f"{name}.qkv")
        queries = keys = values = f"{name}.qkv"
        joined = q + 2 * kv
    else:
        queries, keys, values = (f"{name}.{part}" for part in ("q", "k", "v"))
        of_q, of_k, of_v = (f"{name}.{'qkv' if one else of}" for of in ("wq", "wk", "wv"))
        tape.linear(read, queries, d, q, of_q, rotated and not normed)
        tape.linear(source or read, keys, d, kv, of_k, rotated and not normed)
        tape.linear(source or read, values, d, kv, of_v)
        joined, rotated = 0, rotated and normed
    if normed:
        queries, keys = tape.head_norm(queries, q, f"{name}.q_norm"), tape.head_norm(keys, kv, f"{name}.k_norm")
    if rotated:
        queries, keys = tape.rotate(queries, q), tape.rotate(keys, kv)
    in_groups = not tape.math and (tape.number != 4 or tape.on_cpu)  # nor does a GPU's attention in fp32
    if kv != q and not in_groups and not joined:
        keys, values = tape.repeat(keys, q), tape.repeat(values, q)
    tape.attention(tuple(dict.fromkeys((queries, keys, values))), f"{name}.o", q, joined=joined)
    tape.linear(f"{name}.o", f"{name}.p", q, d, f"{name}.{'proj' if one else 'wo'}")
    return f"{name}.p"


def latent_attention(tape: Writer, read: str) -> str:
    """Narrow, norm, wide; the rotated parts are joined to the others, and the values stay a part of what is wide."""
    model = tape.model
    d, heads, rank, rope = model.d_model, model.n_head, model.kv_lora_rank or 0, model.rope_head_dim or 0
    q, wide = heads * model.d_head, heads * (model.d_head - rope + model.d_value)
    if model.q_lora_rank:
        tape.linear(read, "qa", d, model.q_lora_rank, "attn.wq_a")
        tape.norm("qa", "qa.n", model.q_lora_rank, "attn.q_norm")
        tape.linear("qa.n", "q", model.q_lora_rank, q, "attn.wq_b")
    else:
        tape.linear(read, "q", d, q, "attn.wq")
    tape.linear(read, "kva", d, rank + rope, "attn.wkv_a")
    tape.norm("kva", "kva.n", rank, "attn.kv_norm")
    tape.linear("kva.n", "kv", rank, wide, "attn.wkv_b")
    tape.pointwise(("q",), "q.joined", q, saves=())
    tape.pointwise(("kv",), "k.joined", q, saves=())
    tape.attention(("q.joined", "k.joined", "kv"), "o", heads * model.d_value)
    tape.pointwise(("o",), "o.flat", heads * model.d_value, saves=())  # its layout is that of the joined queries
    tape.linear("o.flat", "p", heads * model.d_value, d, "attn.wo")
    return "p"


def feed_forward(tape: Writer, read: str, name: str, width: int) -> str:
    """Up (and gate), activation, down."""
    gate, up, act, inner, down = (f"{name}.{part}" for part in ("gate", "up", "act", "inner", "down"))
    d = tape.model.d_model
    if tape.model.ffn_type in GATED:
        tape.linear(read, gate, d, width, gate)
        tape.pointwise((gate,), act, width, saves=(gate,))
        tape.linear(read, up, d, width, up)
        tape.pointwise((act, up), inner, width, saves=(act, up))
    else:
        tape.linear(read, up, d, width, up)
        tape.pointwise((up,), inner, width, saves=(inner,) if tape.model.ffn_type == "relu" else (up,))
    tape.linear(inner, down, width, d, down)
    return down


def experts(tape: Writer, read: str) -> str:
    """As transformers' ``grouped_mm`` experts (integrations/moe.py): tokens ordered by expert, weighed in fp32.

    Where ranks share out the experts, tokens arrive from all of them, are laid out by expert, and go back (torchtitan
    0.2.2, distributed/expert_parallel.py), which is a segment of its own; meanwhile other experts compute every token.
    """
    model, number, ranks = tape.model, tape.number, tape.expert_parallel
    d, width, rows = model.d_model, model.d_expert or model.d_ffn, tape.tokens * (model.experts_per_token or 1)
    gated = model.ffn_type in GATED

    if tape.weights.looped:
        return _plus_shared(tape, read, _expert_by_expert(tape, read))

    def product(source: str, write: str, features: int, weight: str, of: int) -> None:
        trained = tape.weights.trains(weight)
        grads = tape.trained_bytes(tape.params_of(weight, f"{weight}_bias"))
        grads //= ranks if weight.startswith("experts.") else 1
        op = ROUTER if weight == "router" else "_grouped_mm"
        step = Step((source,), (write,), (source,) * trained, op=op, param_bytes=grads, trains=grads > 0)
        tape.step(step, {write: of * features * number})

    product(read, "router.logits", model.n_expert or 1, "router", tape.tokens)
    chances = 4 * tape.tokens * (model.n_expert or 1)
    tape.step(Step(("router.logits",), ("chances",), ("chances",)), {"chances": chances})
    tape.step(Step(("chances",), ("weights",), ("chosen",)), {"weights": 4 * rows, "chosen": 8 * rows})
    tape.step(Step((read,), ("copies",), ("order",)), {"copies": rows * d * number, "order": 8 * rows})
    tokens, shared, travelling = "copies", "", rows * d * number
    if ranks > 1:
        tape.begin(".experts")
        tape.step(Step(("copies",), ("arrived",)), {"arrived": travelling})
        sizes = {"by.expert": travelling, "by.expert.order": 8 * rows}
        tape.step(Step(("arrived",), ("by.expert",), ("by.expert.order",)), sizes)
        tokens = "by.expert"
    product(tokens, "ups", width * (1 + gated), "experts.up", rows)
    inner = {"acts": rows * width * number, "inners": rows * width * number}
    if gated:
        tape.step(Step(("ups",), ("acts",), ("ups",)), inner)
        tape.step(Step(("acts", "ups"), ("inners",), ("acts", "ups")), {})
    else:
        tape.step(Step(("ups",), ("inners",), ("ups",)), inner)
    product("inners", "outs", d, "experts.down", rows)
    computed = "outs"
    if ranks > 1:
        tape.step(Step(("outs",), ("by.rank",), ("by.expert.order",)), {"by.rank": travelling})
        tape.step(Step(("by.rank",), ("returned",)), {"returned": travelling})
        computed = "returned"
        if model.n_shared_expert:
            tape.begin(".shared")
            shared = shared_experts(tape, read)
        tape.begin(".sum")
    wide = {"weighed": 4 * rows * d, "restored": 4 * rows * d, "back": 8 * rows, "sum": 4 * tape.tokens * d}
    tape.step(Step((computed, "weights"), ("weighed",), (computed, "weights")), wide)
    tape.step(Step(("weighed",), ("restored",), ("back",)), {})
    tape.step(Step(("restored",), ("sum",)), {})
    tape.pointwise(("sum",), "routed", d, saves=())
    return _plus_shared(tape, read, "routed", shared)


def _plus_shared(tape: Writer, read: str, routed: str, shared: str = "") -> str:
    if not tape.model.n_shared_expert:
        return routed
    tape.add(routed, shared or shared_experts(tape, read), "experts", tape.model.d_model)
    return "experts"


def _expert_by_expert(tape: Writer, read: str) -> str:
    """`MixtralSparseMoeBlock` of transformers 4.45: of each expert a copy of its tokens, its layers, times its weights,
    added to the output.
    """
    model, wide, weights, all_tokens = tape.model, tape.width(read), tape.weights, tape.tokens
    d, count, width, k = model.d_model, model.n_expert or 1, model.d_expert or model.d_ffn, model.experts_per_token or 1
    routes = weights.trains("router")
    step = Step((read,), ("router.logits",), (read,) * routes, op="mm", trains=routes)
    step = step._replace(param_bytes=tape.trained_bytes(tape.params_of("router")))
    tape.step(step, {"router.logits": all_tokens * count * wide})
    chances = 4 * all_tokens * count
    tape.step(Step(("router.logits",), ("chances",), ("chances",)), {"chances": chances})
    tape.step(
        Step(("chances",), ("weights",), ("chosen",)), {"weights": 4 * all_tokens * k, "chosen": 8 * all_tokens * k}
    )
    tape.step(Step((), ("sum",)), {"sum": all_tokens * d * wide})
    tape.tokens, total = max(1, round(all_tokens * k / count)), "sum"
    for e in range(count):
        own, ups = f"expert.{e}", ("gate", "up") if model.ffn_type in GATED else ("up",)
        tape.widths |= {f"{own}.{name}": wide for name in ("copy", "gate", "up", "out")}
        copy = {f"{own}.copy": tape.bytes_of(d, wide), f"{own}.order": 8 * tape.tokens}
        tape.step(Step((read,), (f"{own}.copy",), (f"{own}.order",)), copy)
        for name in ups:
            tape.linear(f"{own}.copy", f"{own}.{name}", d, width, f"experts.{name}")
        if len(ups) == 2:
            tape.pointwise((f"{own}.gate",), f"{own}.act", width, saves=(f"{own}.gate",))
            tape.pointwise((f"{own}.act", f"{own}.up"), f"{own}.inner", width, saves=(f"{own}.act", f"{own}.up"))
        else:
            tape.pointwise((f"{own}.up",), f"{own}.inner", width, saves=(f"{own}.up",))
        tape.linear(f"{own}.inner", f"{own}.out", width, d, "experts.down")
        tape.pointwise((f"{own}.out", "weights"), f"{own}.weighed", d, saves=(f"{own}.out", "weights"))
        after = f"{own}.sum"
        tape.step(Step((total, f"{own}.weighed"), (after,), alias=True), {after: all_tokens * d * wide})
        total = after
    tape.tokens = all_tokens
    tape.widths[total] = wide
    return total


def shared_experts(tape: Writer, read: str) -> str:
    """The experts that compute every token, together one feed-forward."""
    model = tape.model
    width = model.d_shared_expert or model.n_shared_expert * (model.d_expert or model.d_ffn)
    shared = feed_forward(tape, read, "shared", width)
    if not model.shared_expert_gate:
        return shared
    tape.linear(read, "share", model.d_model, 1, "shared_gate")
    tape.pointwise((shared, "share"), "shared.weighed", model.d_model, saves=(shared, "share"))
    return "shared.weighed"


def embed_tape(model: Model, plan: Plan, *, fused_norm: bool = True) -> Tape:
    """Rows of a table, and of tables of positions, or what depends on the position alone, which all blocks share.

    The tokens, or an image's pixels, are data, from outside.
    """
    tape = Writer(model, plan, root_shapes(model, plan.seq_len), fused_norm)
    tape.sizes["x"] = 0
    d, last = model.d_model, "normed" if model.embed_norm else "y"
    more = list(tape.params_of("embed.positions", "embed.token_types"))
    sums = [f"e{i}" for i in range(len(more))] + [last]
    # What depends on the position alone: cosines and sines, or the biases of all pairs.
    tables = {
        "rope": 2 * plan.seq_len * (model.rope_head_dim or model.d_head) * tape.number,
        "relative": model.n_head * plan.seq_len**2 * tape.number * (1 + (model.n_encoder_layer > 0)),
    }.get(model.positions, 0)
    tape.sizes |= {"tables": tables, "pixels": 0}
    whole = tape.trained_bytes(tape.params_of("embed.weight", "embed.patches.weight", "embed.patches.bias"))
    # The gradient of a tied table was begun by the head; this part of it is added to that.
    tied = whole if model.tied_embeddings and not model.patch_size else 0
    if model.patch_size:
        tape.sizes["pixels"] = tape.bytes_of(model.patch_size**2 * model.channels)
    table = Step(("x",), (sums[0],), ("tables", "pixels"), scratch=tied, param_bytes=whole - tied, trains=whole > 0)
    tape.widths[sums[0]] = 4 if plan.kbit_training == "peft" else tape.number
    tape.step(table, {sums[0]: tape.bytes_of(d, tape.width(sums[0]))})
    for i, name in enumerate(more):
        trained = tape.weights.trains(name)
        index, picked, grads = f"i{i}", f"p{i}", tape.trained_bytes(tape.params_of(name))
        sizes = {index: 8 * plan.seq_len, picked: plan.seq_len * d * tape.number}
        tape.step(Step((index,), (picked,), (index,), param_bytes=grads, trains=trained), sizes)
        tape.add(sums[i], picked, sums[i + 1], d)
    if model.embed_norm:
        tape.norm(last, "y", d, "embed.norm")
    return tape.done()


def loss_bytes(model: Model, plan: Plan) -> int:
    """Of a number of the logits that the loss is computed of.

    Autocast makes them fp32 in any case (``cross_entropy`` is in torch's list of CUDA operators that autocast to fp32);
    quantised layers are trained beside it.
    """
    computed = plan.param_dtype or model.dtype
    uncast = plan.cross_entropy == "shifted_uncast" and model.dtype == computed and not plan.base_quantization
    return DTYPE_BYTES[computed if uncast else "fp32"]


def head_tape(model: Model, plan: Plan, *, fused_norm: bool = True) -> Tape:
    """Norm, head, conversion of the logits, log-softmax, mean of the losses."""
    tape = Writer(model, plan, root_shapes(model, plan.seq_len), fused_norm)
    d, read = model.d_model, "x"
    if model.norm_position != "post":
        tape.norm("x", "n", d, "head.norm")
        read = "n"
    if model.adaln:
        return _noise_head(tape, read)
    if model.patch_size:  # the class token of each image
        tape.tokens = plan.micro_batch
        tape.pointwise((read,), "class", d, saves=())
        read = "class"
    if model.head_transform:
        tape.linear(read, "transformed", d, d, "head.transform")
        tape.pointwise(("transformed",), "act", d, saves=("transformed",))
        tape.norm("act", "act.n", d, "head.transform_norm")
        read = "act.n"
    table = "head.weight" if "head.weight" in tape.params else "embed.weight"
    trained, grads = tape.weights.trains(table), tape.trained_bytes(tape.params_of(table, "head.bias"))
    tape.matmul(read, "logits", 0, model.vocab, trained, param_bytes=grads, trains=grads > 0)
    if plan.kbit_training == "peft":  # the head in fp32, which autocast casts, and keeps for backward
        tape.steps[-1] = tape.steps[-1]._replace(saves=("table",))
        tape.sizes["table"] = model.vocab * d * tape.number
    name, logits = "logits", tape.tokens * model.vocab
    if model.logit_softcap:
        steps: dict[str, tuple[str, ...]] = {"divided": (), "capped": ("capped",), "grown": ()}  # what a tanh keeps
        for out, saves in steps.items():
            tape.pointwise((name,), out, model.vocab, saves=saves)
            name = out
    if plan.cross_entropy not in WHOLE:  # keeps logits and a number per row; a fused backward writes over the logits
        in_place = plan.cross_entropy == "fused"
        tape.step(Step((name,), ("y",), (name, "y"), alias=in_place), {"y": 4 * tape.tokens})
        return tape.done(logits=frozenset({name, "y"}))
    source, wide = name, loss_bytes(model, plan)
    if wide != tape.number:
        source = "wide"
        tape.step(Step((name,), ("wide",)), {"wide": logits * wide})
    held = {name}
    if plan.cross_entropy in SHIFTED and plan.micro_batch > 1:  # of one sequence it is a view
        held |= {source, "shifted"}
        tape.step(Step((source,), ("shifted",)), {"shifted": logits * wide})
        source = "shifted"
    tape.step(Step((source,), ("logp",), ("logp",)), {"logp": logits * wide})
    tape.step(Step(("logp",), ("y",), ("logp",)), {"y": wide})
    return tape.done(logits=frozenset({"logp", "y"}), held=frozenset(held))


def _noise_head(tape: Writer, read: str) -> Tape:
    """DiT: the noise of each patch and its variance, and a mean square in fp32."""
    model = tape.model
    n = 2 * (model.patch_size or 1) ** 2 * model.channels
    tape.scale(read, "scaled", model.d_model)
    grads = tape.trained_bytes(tape.params_of("head.weight", "head.bias"))
    tape.matmul("scaled", "logits", 0, n, grads > 0, param_bytes=grads)
    tape.step(Step(("logits",), ("wide",), ("wide",)), {"wide": 4 * tape.tokens * n})
    tape.step(Step(("wide",), ("y",)), {"y": 4})
    return tape.done(logits=frozenset({"wide", "y"}))
