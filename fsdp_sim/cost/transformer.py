"""`workload`: a transformer cut into FSDP units, with the work of every segment, from its dimensions alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter

from fsdp_sim.cost import kernels_of as kernels
from fsdp_sim.cost.activations import (
    SHIFTED,
    WHOLE,
    Activations,
    activations_of_segments,
    embed_activations,
    head_activations,
    loss_bytes,
)
from fsdp_sim.cost.linears import pointwise
from fsdp_sim.cost.weights import Weights, weights_of
from fsdp_sim.cost.work import OF_WORK, Kernel, Work, Workload, trained_count_of
from fsdp_sim.cost.wrapping import units_of
from fsdp_sim.schedule import DTYPE_BYTES, Unit
from fsdp_sim.spec import Block, Model, Plan, block_shapes, blocks, param_shapes

NOT_COMPUTED = frozenset({
    "reshard_after_forward", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "sharding_strategy",
    "shard_size", "grad_accum", "reduce_scatter_max_input_buffers", "separate_reduce_scatter_group",
    "post_optim_event", "unshard_async_op", "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward",
    "is_last_backward", "gradient_divide_factor", "bucket_cap_mb",
})  # fmt: skip
"""Fields of a plan that change when something is communicated, and not what is computed."""
_computed = attrgetter(*[f.name for f in fields(Plan) if f.name not in NOT_COMPUTED])


class _Computing:
    """A plan, equal to another one under which the same is computed."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._settings = plan, _computed(plan)

    def __hash__(self) -> int:
        return hash(self._settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Computing) and self._settings == other._settings


def workload(model: Model, plan: Plan) -> Workload:
    """The units and the work of one micro-batch on one rank.

    The segments are ``embed``, the blocks (``layers.0`` ..., of an encoder-decoder ``encoder.0`` ... and
    ``decoder.0`` ...) and ``head``, which holds the last norm, the logits and the loss.

    Raises:
        ValueError: ``plan.seq_len`` is longer than the model's table of learned positions, or ``plan.wrap`` names
            modules that the model does not have.
    """
    return _workload(model, _Computing(plan))


@functools.lru_cache(maxsize=128)
def _workload(model: Model, computing: _Computing) -> Workload:
    plan = computing.plan
    if model.positions == "learned" and model.max_seq_len is not None and plan.seq_len > model.max_seq_len:
        raise ValueError(
            f"Plan.seq_len is {plan.seq_len}, but {model.name} has learned positions for {model.max_seq_len} tokens; "
            f"make it at most {model.max_seq_len}, or give Model.max_seq_len"
        )
    sees = model.seq_len_of_image
    if sees is not None and plan.seq_len != sees:
        raise ValueError(
            f"Plan.seq_len is {plan.seq_len}, but an image is {sees} tokens to {model.name}; make it {sees}"
        )
    weights = weights_of(model, plan)
    units = units_of(model, plan)
    tokens = plan.micro_batch * plan.seq_len
    fused_norm = model.norm != "rmsnorm" or plan.rms_norm == "fused" or plan.compile
    trained = {segment: unit.trains(segment) for unit in units for segment in unit.names_of_segments}
    streams = 2 if model.n_encoder_layer else 1  # source and target tokens are both embedded
    work = {
        "embed": _work(
            *kernels.embedding(model, streams * tokens, weights), embed_activations(model, plan, fused_norm=fused_norm)
        )
    }
    grad = trained["embed"]  # whether what comes next needs the gradient of its input
    alike: dict[tuple[object, ...], dict[str, Work]] = {}
    for name, block in blocks(model).items():
        own = weights.of_block(name)
        names = [of for of, *_ in block_shapes(model, block)] if weights.freeze else []
        key = (block, grad, *map(own.trains, names))
        if key not in alike:
            kept = activations_of_segments(model, plan, block, fused_norm=fused_norm, name=name, grad=grad)
            parts = _block(model, plan, own, block, grad=grad)
            if plan.activation_checkpointing:  # of a checkpointed block nothing stays but its input and its output
                last = list(kept)[-1]
                kept = {of: some if of == last else some._replace(output_bytes=0) for of, some in kept.items()}
            alike[key] = {of: replace(_work(*parts[of], kept[of]), is_block=True) for of in parts}
        work |= {f"{name}{of}": done for of, done in alike[key].items()}
        grad = grad or any(trained[f"{name}{of}"] for of in alike[key])
    work["head"] = _head(model, plan, weights, fused_norm=fused_norm, grad=grad)
    if plan.loss_chunks > 1:
        work["head"] = _in_chunks(model, plan, weights, work["head"], fused_norm=fused_norm, grad=grad)
    trained_count = trained_count_of(units)
    param_count = sum(rows * columns for _, rows, columns in param_shapes(model, plan.seq_len))
    param_count += trained_count if plan.lora_rank else 0  # the adapters
    seen = sum(_seen(model, block, plan.seq_len) for block in blocks(model).values())
    idle, idle_trained = _idle(model, units)
    return Workload(
        name=f"{model.name} (unverified dimensions)" if model.unverified else model.name,
        units=units,
        work=work,
        param_count=param_count,
        # of a frozen weight there is no gradient: 4 N in place of 6 N
        model_flops_per_token=4.0 * (param_count - idle)
        + 2.0 * (trained_count - idle_trained)
        + 6.0 * model.n_head * (model.d_head + model.d_value) * seen,
        tokens=tokens,
        dtype=weights.compute_dtype,
        attention_impl=plan.attention_impl,
        written_for={name: getattr(plan, name) for name in OF_WORK},
    )


def _seen(model: Model, block: Block, seq_len: int) -> float:
    """Keys that a query sees, with the half that causal attention leaves out (as PaLM's formula has it)."""
    return kernels.pairs(seq_len, seq_len, False, block.window, model.chunked_window) / seq_len


def _idle(model: Model, units: Sequence[Unit]) -> tuple[float, float]:
    """Parameters of experts that do not compute a token, and of these the ones that train."""
    share = 1 - (model.experts_per_token or 0) / (model.n_expert or 1)
    routed = [p for unit in units for p in unit.params if model.n_expert and "experts." in p.name]
    count, trained = (
        sum(math.prod(p.shape) for p in some) for some in (routed, [p for p in routed if p.requires_grad])
    )
    return share * count, share * trained


def _block(
    model: Model, plan: Plan, weights: Weights, block: Block, *, grad: bool
) -> dict[str, tuple[list[Kernel], list[Kernel]]]:
    """Norm, attention, addition, (the same over the encoder's output,) norm, feed-forward, addition.

    Returns:
        the kernels of its segments, by what their names end with.
    """
    batch, seq, tokens, d = plan.micro_batch, plan.seq_len, plan.micro_batch * plan.seq_len, model.d_model
    shared_out = plan.expert_parallel if block.moe else 1
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    parts: dict[str, tuple[list[Kernel], list[Kernel]]] = {}
    for name in ("attn", "cross", "ffn") if block.cross else ("attn", "ffn"):
        normed, normed_back = kernels.norm(model.norm, tokens, d, weights)
        count = {"both": 2}.get(model.norm_position, 1) if name != "ffn" or model.parallel != 1 else 0
        needed = grad or weights.trains(f"{name}_norm.weight")
        if name != "ffn":
            seen = block if name == "attn" else block._replace(causal=False, window=None)
            layer, layer_back = kernels.attention_layer(model, batch, seq, seq, weights, seen, name=name, grad=needed)
        elif block.moe:
            moe = kernels.moe_parts(model, tokens, weights, grad=needed, ranks=shared_out)
            if shared_out > 1:  # what comes after the experts is a segment of its own
                parts = {".experts": moe.pop("experts")}
                parts |= {".shared": moe.pop("shared")} if "shared" in moe else {}
                rest = kernels.joined(moe.pop(of) for of in ("sum", "sum_shared") if of in moe)
                add, add_back = kernels.residual(tokens, d, weights.stream_dtype)
                parts[".sum"] = [*rest[0], *add], [*add_back * grad, *rest[1]]
            layer, layer_back = kernels.joined(moe.values())
        else:
            layer, layer_back = kernels.feed_forward(model, tokens, weights, grad=needed)
        add, add_back = kernels.residual(tokens, d, weights.stream_dtype)
        if parts:
            add, add_back = [], []
        forward += normed * count + layer + add
        backward = add_back * grad + layer_back + normed_back * (needed * count) + backward
        grad = grad or bool(layer_back)
    if model.adaln:
        moves, moves_back = kernels.modulation(model, batch, tokens, weights)
        forward, backward = moves + forward, backward + moves_back
    return {"": (forward, backward), **parts}


def _head(model: Model, plan: Plan, weights: Weights, *, fused_norm: bool, grad: bool) -> Work:
    tokens, fused_loss = plan.micro_batch * plan.seq_len, plan.cross_entropy not in WHOLE
    shifted = plan.cross_entropy in SHIFTED and plan.micro_batch > 1
    made = kernels.head(
        model, tokens, weights, fused_loss=fused_loss, shifted=shifted, metrics=plan.loss_metrics, grad=grad,
        wide=loss_bytes(model, plan),
    )  # fmt: skip
    held = {None: 0, "fp32": 4, "fp32_in_head": 4, "computed": DTYPE_BYTES[weights.compute_dtype]}[plan.held_logits]
    work = _work(*made, head_activations(model, plan, fused_norm=fused_norm, grad=grad))
    return replace(work, held_bytes=held * tokens * model.vocab)


def _in_chunks(model: Model, plan: Plan, weights: Weights, whole: Work, *, fused_norm: bool, grad: bool) -> Work:
    """The head with forward and backward of each chunk of the sequence before the next: all but the norm is forward.

    Kept are the gradient of the head's input, and that of its weight, to which every chunk adds.

    Raises:
        ValueError: the model's head is not that of a language model.
    """
    if model.patch_size or model.adaln or model.head_transform:
        raise ValueError(
            f"Plan.loss_chunks is {plan.loss_chunks}, but {model.name} has no head of a language model; make it 1"
        )
    n, d = plan.loss_chunks, model.d_model
    chunk = _head(
        model, replace(plan, seq_len=plan.seq_len // n, loss_chunks=1), weights, fused_norm=fused_norm, grad=grad
    )
    norms = int(model.norm_position != "post")
    back = norms * (grad or weights.trains("head.norm.weight"))
    trained = weights.trains("embed.weight" if model.tied_embeddings else "head.weight")
    add = [pointwise(3.0 * model.vocab * d, weights.compute_dtype, fusable=False)] if trained else []
    each = [*chunk.forward[norms:], *chunk.backward[: len(chunk.backward) - back], *add]
    grads = model.vocab * d * DTYPE_BYTES[weights.compute_dtype] * trained
    most = chunk.saved_bytes + max(chunk.forward_temporary_bytes, chunk.backward_temporary_bytes + 2 * grads)
    return replace(
        whole,
        forward=(*whole.forward[:norms], *(k._replace(count=k.count * n) for k in each)),
        backward=whole.backward[len(whole.backward) - back :],
        saved_bytes=whole.input_bytes + grads,
        forward_temporary_bytes=whole.input_bytes + most - grads,
        backward_temporary_bytes=whole.input_bytes - grads,
        logits_bytes=0,
        held_bytes=0,
        tape=None,  # the whole head's has logits that are never made
    )


def _work(forward: list[Kernel], backward: list[Kernel], activations: Activations) -> Work:
    return Work(tuple(forward), tuple(backward), **activations._asdict())
