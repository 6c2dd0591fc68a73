"""`workload`: a transformer cut into FSDP units, with the work of every segment, from its dimensions alone."""

from __future__ import annotations

from dataclasses import replace

from fsdp_sim.cost import kernels_of as kernels
from fsdp_sim.cost.activations import Activations, block_activations, embed_activations, head_activations
from fsdp_sim.cost.weights import Weights, weights_of
from fsdp_sim.cost.work import OF_WORK, Kernel, Work, Workload, trained_count_of
from fsdp_sim.cost.wrapping import block_names, units_of
from fsdp_sim.spec import Model, Plan, block_shapes, param_shapes


def workload(model: Model, plan: Plan) -> Workload:
    """The units and the work of one micro-batch on one rank.

    The segments are ``embed``, the blocks (``layers.0`` ..., of an encoder-decoder ``encoder.0`` ... and
    ``decoder.0`` ...) and ``head``, which holds the last norm, the logits and the loss.

    Raises:
        ValueError: ``plan.seq_len`` is longer than the model's table of learned positions, or ``plan.wrap`` names
            modules that the model does not have.
    """
    if model.positions == "learned" and model.max_seq_len is not None and plan.seq_len > model.max_seq_len:
        raise ValueError(
            f"Plan.seq_len is {plan.seq_len}, but {model.name} has learned positions for {model.max_seq_len} tokens; "
            f"make it at most {model.max_seq_len}, or give Model.max_seq_len"
        )
    weights = weights_of(model, plan)
    units = units_of(model, plan)
    tokens = plan.micro_batch * plan.seq_len
    fused_norm = model.norm != "composed_rmsnorm" or plan.compile
    encoder, decoder = block_names(model)
    trained = {segment: unit.trains(segment) for unit in units for segment in unit.names_of_segments}
    streams = 2 if encoder else 1  # source and target tokens are both embedded
    work = {
        "embed": _work(
            *kernels.embedding(model, streams * tokens, weights), embed_activations(model, plan, fused_norm=fused_norm)
        )
    }
    grad = trained["embed"]  # whether what comes next needs the gradient of its input
    alike: dict[tuple[object, ...], Work] = {}
    for name in (*encoder, *decoder):
        own, decodes = weights.of_block(name), name in decoder
        cross, causal = decodes and bool(encoder), decodes and model.causal
        names = [of for of, *_ in block_shapes(model, cross_attention=cross)] if weights.freeze else []
        key = (cross, causal, grad, *map(own.trains, names))
        if key not in alike:
            activations = block_activations(
                model, plan, cross_attention=cross, fused_norm=fused_norm, name=name, grad=grad
            )
            alike[key] = _block(model, plan, own, activations, causal=causal, cross=cross, grad=grad)
        work[name] = alike[key]
        grad = grad or trained[name]
    head_kernels = kernels.head(
        model, tokens, weights, fused_loss=plan.cross_entropy == "fused", metrics=plan.loss_metrics, grad=grad
    )
    work["head"] = _work(*head_kernels, head_activations(model, plan, fused_norm=fused_norm, grad=grad))
    trained_count = trained_count_of(units)
    param_count = sum(rows * columns for _, rows, columns in param_shapes(model, plan.seq_len))
    param_count += trained_count if plan.lora_rank else 0  # the adapters
    blocks, attended = len(encoder) + len(decoder), model.n_head * model.d_head * plan.seq_len
    return Workload(
        name=model.name,
        units=units,
        work=work,
        param_count=param_count,
        # of a frozen weight there is no gradient: 4 N in place of 6 N
        model_flops_per_token=4.0 * param_count + 2.0 * trained_count + 12.0 * blocks * attended,
        tokens=tokens,
        dtype=weights.compute_dtype,
        attention_impl=plan.attention_impl,
        written_for={name: getattr(plan, name) for name in OF_WORK},
    )


def _block(
    model: Model, plan: Plan, weights: Weights, activations: Activations, *, causal: bool, cross: bool, grad: bool
) -> Work:
    """Norm, attention, addition, (the same over the encoder's output,) norm, feed-forward, addition."""
    batch, seq, tokens, d = plan.micro_batch, plan.seq_len, plan.micro_batch * plan.seq_len, model.d_model
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    for name in ("attn", "cross", "ffn") if cross else ("attn", "ffn"):
        norm, norm_back = kernels.norm(model.norm, tokens, d, weights.compute_dtype)
        needed = grad or weights.trains(f"{name}_norm.weight")
        if name == "ffn":
            layer, layer_back = kernels.feed_forward(model, tokens, weights, grad=needed)
        else:
            layer, layer_back = kernels.attention_layer(
                model, batch, seq, seq, weights, causal and name == "attn", name=name, grad=needed
            )
        add, add_back = kernels.residual(tokens, d, weights.compute_dtype)
        forward += norm + layer + add
        backward = add_back * grad + layer_back + norm_back * needed + backward
        grad = grad or bool(layer_back)
    return replace(_work(forward, backward, activations), is_block=True)


def _work(forward: list[Kernel], backward: list[Kernel], activations: Activations) -> Work:
    return Work(tuple(forward), tuple(backward), **activations._asdict())
