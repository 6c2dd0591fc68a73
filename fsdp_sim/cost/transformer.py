"""`workload`: a transformer cut into FSDP units, with the work of every segment, from its dimensions alone."""

from __future__ import annotations

from dataclasses import replace

from fsdp_sim.cost import kernels_of as kernels
from fsdp_sim.cost.activations import Activations, block_activations, embed_activations, head_activations
from fsdp_sim.cost.work import Kernel, Work, Workload
from fsdp_sim.cost.wrapping import block_names, units_of
from fsdp_sim.spec import Model, Plan, param_shapes


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
    dtype = plan.param_dtype or model.dtype
    tokens = plan.micro_batch * plan.seq_len
    fused_norm = model.norm != "composed_rmsnorm" or plan.compile
    encoder, decoder = block_names(model)
    work = dict.fromkeys(encoder, _block(model, plan, dtype, fused_norm, causal=False, cross=False)) if encoder else {}
    work |= dict.fromkeys(decoder, _block(model, plan, dtype, fused_norm, causal=model.causal, cross=bool(encoder)))
    streams = 2 if encoder else 1  # source and target tokens are both embedded
    embed = _work(
        *kernels.embedding(model, streams * tokens, dtype), embed_activations(model, plan, fused_norm=fused_norm)
    )
    head_kernels = kernels.head(
        model, tokens, dtype, fused_loss=plan.cross_entropy == "fused", metrics=plan.loss_metrics
    )
    head = _work(*head_kernels, head_activations(model, plan, fused_norm=fused_norm))
    param_count = sum(rows * columns for _, rows, columns in param_shapes(model, plan.seq_len))
    return Workload(
        name=model.name,
        units=units_of(model, plan.wrap, plan.seq_len),
        work={"embed": embed, **work, "head": head},
        param_count=param_count,
        model_flops_per_token=6.0 * param_count + 12.0 * len(work) * model.n_head * model.d_head * plan.seq_len,
        tokens=tokens,
        dtype=dtype,
        attention_impl=plan.attention_impl,
    )


def _block(model: Model, plan: Plan, dtype: str, fused_norm: bool, *, causal: bool, cross: bool) -> Work:
    batch, seq, tokens, d = plan.micro_batch, plan.seq_len, plan.micro_batch * plan.seq_len, model.d_model
    parts = [kernels.norm(model.norm, tokens, d, dtype), kernels.attention_layer(model, batch, seq, seq, dtype, causal)]
    parts += [kernels.residual(tokens, d, dtype)]
    if cross:
        parts += [kernels.norm(model.norm, tokens, d, dtype)]
        parts += [kernels.attention_layer(model, batch, seq, seq, dtype, causal=False, own_keys=False)]
        parts += [kernels.residual(tokens, d, dtype)]
    parts += [kernels.norm(model.norm, tokens, d, dtype), kernels.feed_forward(model, tokens, dtype)]
    parts += [kernels.residual(tokens, d, dtype)]
    forward = [k for part, _ in parts for k in part]
    backward = [k for _, part in reversed(parts) for k in part]
    activations = block_activations(model, plan, cross_attention=cross, fused_norm=fused_norm)
    return replace(_work(forward, backward, activations), is_block=True)


def _work(forward: list[Kernel], backward: list[Kernel], activations: Activations) -> Work:
    return Work(tuple(forward), tuple(backward), **activations._asdict())
