"""Laws of what is computed: batches, sequences, precision, recomputation, and the model's dimensions."""

from __future__ import annotations

import dataclasses

from tests.laws.draws import by, of_several, on, whole
from tests.laws.law import Request, after, laws, model, plan, times
from tests.laws.outcomes import (
    ACTIVATIONS,
    AGAIN,
    ALL,
    ALL_REDUCED,
    BACKWARD,
    COMM,
    COMPUTE,
    COPYING,
    FLOPS,
    FORWARD,
    GATHERED,
    GATHERING,
    GATHERS,
    ISSUING,
    KEPT,
    OPS,
    OPTIMIZER,
    ORDER,
    PARAMS,
    PEAK,
    PROGRAM,
    RECOMPUTATIONS,
    REDUCING,
    SCATTERED,
    SENT,
    SENT_GATHERED,
    SENT_REDUCED,
    SHARDS,
    STATES,
    STEP,
    THROUGHPUT,
    TOKENS,
    UNITS,
    WHOLE,
    WHOLE_GRADIENTS,
)

OPERATORS = ("mm", "addmm", "scaled_dot_product_attention")
FIXED = [PROGRAM, COMM, COPYING, OPTIMIZER, ISSUING, SHARDS, STATES, WHOLE, PARAMS]  # what the batch has no part in
no_table = model(positions="rope")  # learned positions are parameters, one for each place in a sequence
of_blocks = plan(wrap="block")
every_time = plan(grad_accum=2, requires_gradient_sync=True)
in_fp32 = after(whole, by("fsdp2", param_dtype=None, reduce_dtype=None, cpu_offload=False), model(dtype="fp32"))
in_half = after(in_fp32, lambda r: plan(param_dtype="bf16" if r.cluster.gpu.supports_bf16 else "fp16")(r))


def of_known_fp32(request: Request) -> Request:
    """On a GPU whose rate in fp32, in which such scores are computed, somebody says."""
    gpu = request.cluster.gpu
    gpu = dataclasses.replace(gpu, fp32_flops=gpu.fp32_flops or (gpu.bf16_flops or gpu.fp16_flops) / 8)
    return request._replace(cluster=dataclasses.replace(request.cluster, gpu=gpu))


def as_fast_in_fp16(request: Request) -> Request:
    """On a GPU whose fp16 is its bf16."""
    gpu = request.cluster.gpu
    rate = gpu.bf16_flops or gpu.fp16_flops
    gpu = dataclasses.replace(gpu, bf16_flops=rate, fp16_flops=rate)
    return in_fp32(request._replace(cluster=dataclasses.replace(request.cluster, gpu=gpu)))


def unshifted(request: Request) -> Request:
    """Without a loss that copies the logits of several sequences, but not of one."""
    return plan(cross_entropy="torch")(request) if request.plan.cross_entropy.startswith("shifted") else request


LAWS = [
    laws(
        "twice the micro-batch",
        unshifted,
        plan(micro_batch=times(2)),
        stays=FIXED,
        doubles=[FLOPS, TOKENS],
        at_most_doubles=[COMPUTE, FORWARD, BACKWARD, STEP, KEPT, PEAK],
        never_falls=[THROUGHPUT],
    ),
    laws(
        "twice the sequence",
        no_table,
        plan(seq_len=times(2)),
        stays=FIXED,
        doubles=[TOKENS],
        more_than_doubles=[FLOPS],
        at_most_quadruples=[KEPT, COMPUTE, PEAK, STEP],
    ),
    laws(
        "twice the sequence under fused attention",
        after(no_table, plan(attention_impl="sdpa")),
        plan(seq_len=times(2)),
        at_most_doubles=[KEPT, PEAK],
    ),
    laws(
        "two sequences in place of one twice as long",
        after(no_table, unshifted, plan(seq_len=times(2))),
        after(plan(seq_len=lambda n: n // 2), plan(micro_batch=times(2))),
        stays=[*FIXED, TOKENS],
        never_grows=[FLOPS, COMPUTE, KEPT, STEP, PEAK],
    ),
    laws(
        "twice the micro-batches of a step",
        every_time,
        plan(grad_accum=4),
        doubles=[COMPUTE, FORWARD, BACKWARD, AGAIN],
        stays=[KEPT, FLOPS, OPTIMIZER, SHARDS, STATES, PARAMS, TOKENS],
        never_falls=[STEP, COMM, PEAK, ISSUING, OPS],
    ),
    laws(
        "gradients reduced with the last micro-batch only",
        after(by("fsdp2", cpu_offload=False), plan(grad_accum=3, requires_gradient_sync=True)),
        plan(requires_gradient_sync="last"),
        stays=[SENT_GATHERED, GATHERS, COMPUTE, KEPT, OPTIMIZER],
        never_grows=[SENT_REDUCED, REDUCING, COMM],
        never_falls=[WHOLE_GRADIENTS],
    ),
    laws(
        "DDP reducing with the last micro-batch only",
        after(by("ddp"), plan(grad_accum=3, requires_gradient_sync=True)),
        plan(requires_gradient_sync="last"),
        stays=[COMPUTE, KEPT, OPTIMIZER],
        never_grows=[SENT, ALL_REDUCED, COMM],
    ),
    laws(
        "all-reducing with the last micro-batch only",
        after(
            by("fsdp2"),
            on(2),
            lambda r: plan(
                shard_size=r.cluster.node_size, reshard_after_forward=None, grad_accum=3, requires_all_reduce=True
            )(r),
        ),
        plan(requires_all_reduce="last"),
        stays=[SCATTERED, GATHERED, COMPUTE, OPTIMIZER],
        never_grows=[ALL_REDUCED, REDUCING],
    ),
    laws(
        "parameters kept between micro-batches",
        after(
            by("fsdp2", reshard_after_forward=False, is_last_backward=True),
            plan(grad_accum=3, reshard_after_backward=True),
        ),
        plan(reshard_after_backward="last"),
        stays=[SENT_REDUCED, COMPUTE],
        never_grows=[SENT_GATHERED, GATHERS],
        never_falls=[WHOLE],
    ),
    *(
        laws(
            f"{flag} with the last micro-batch of one",
            by("fsdp2", grad_accum=1, **{flag: True}),
            plan(**{flag: "last"}),
            stays=ALL,
        )
        for flag in ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "is_last_backward")
    ),
    laws(
        "gathers and compute in half precision",
        in_fp32,
        in_half,
        halves=[GATHERED, SENT_GATHERED, SCATTERED, SENT_REDUCED],
        stays=[SHARDS, STATES, FLOPS, OPTIMIZER, PARAMS, GATHERS],
        never_grows=[COMPUTE, FORWARD, BACKWARD, COMM, KEPT, PEAK, WHOLE],
    ),
    laws(
        "reductions in fp32 beside half precision",
        in_half,
        plan(reduce_dtype="fp32"),
        doubles=[SCATTERED, SENT_REDUCED],
        stays=[GATHERED, COMPUTE, KEPT, SHARDS, STATES, WHOLE],
        never_falls=[REDUCING],
    ),
    laws("the parameters' own dtype said", in_fp32, plan(param_dtype="fp32"), stays=ALL),
    laws("the gradients' own dtype said", in_fp32, plan(reduce_dtype="fp32"), stays=ALL),
    laws(
        "fp16 in place of bf16",
        after(as_fast_in_fp16, plan(param_dtype="bf16")),
        plan(param_dtype="fp16"),
        stays=[COMPUTE, COMM, KEPT, SENT, SHARDS, STATES],
        never_falls=[COPYING],
    ),
    laws(
        "parameters in half precision",
        in_fp32,
        lambda r: model(dtype="bf16" if r.cluster.gpu.supports_bf16 else "fp16")(r),
        halves=[SHARDS, STATES, GATHERED, SCATTERED],
        stays=[FLOPS, PARAMS, GATHERS, UNITS],
        never_grows=[COMPUTE, COMM, KEPT, PEAK],
    ),
    laws(
        "every block recomputed",
        after(whole, plan(activation_checkpointing=None)),
        plan(activation_checkpointing="full"),
        stays=[FORWARD, BACKWARD, SENT, GATHERS, OPTIMIZER, STATES, SHARDS, COMM, FLOPS],
        grows=[AGAIN, COMPUTE, RECOMPUTATIONS],
        falls=[KEPT],
        never_grows=[PEAK, ACTIVATIONS],
        never_falls=[STEP, ISSUING],
    ),
    laws(
        "every block recomputed selectively",  # beside what a relu keeps it would keep what that was given
        after(whole, plan(activation_checkpointing=None), model(ffn_type="gelu")),
        plan(activation_checkpointing="selective"),
        stays=[FORWARD, BACKWARD, SENT, GATHERS],
        grows=[AGAIN, RECOMPUTATIONS],
        never_grows=[KEPT, PEAK, ACTIVATIONS],
        never_falls=[STEP],
    ),
    *(
        laws(
            f"recomputing all in place of {fewer}",
            plan(activation_checkpointing=kept),
            plan(activation_checkpointing=kept_less),
            stays=[RECOMPUTATIONS, FORWARD, BACKWARD, ISSUING],
            never_falls=[AGAIN, STEP],
            never_grows=[KEPT, PEAK],
        )
        for fewer, kept, kept_less in (
            ("some", "selective", "full"),
            ("all but matmuls and attention", OPERATORS, "full"),
            ("all but matmuls and attention, but for every second", OPERATORS, "selective"),
            ("all but attention", OPERATORS, OPERATORS[-1:]),
        )
    ),
    laws(
        "every block in place of every second one recomputed",
        after(whole, plan(activation_checkpointing=2, cpu_offload=False)),
        plan(activation_checkpointing="full"),
        grows=[RECOMPUTATIONS, AGAIN],
        never_falls=[STEP, ISSUING],
        never_grows=[KEPT, PEAK],
        stays=[FORWARD, BACKWARD, SENT],
    ),
    laws(
        "every first block recomputed, which is every block",
        plan(activation_checkpointing="full"),
        plan(activation_checkpointing=1),
        stays=ALL,
    ),
    laws(
        "every 99th block recomputed, of fewer",
        plan(activation_checkpointing=None),
        plan(activation_checkpointing=99),
        stays=ALL,
    ),
    laws(
        "momentum in place of AdamW",
        by("fsdp2", optimizer="adamw", cpu_offload=False),
        plan(optimizer="sgd_momentum"),
        halves=[STATES],
        falls=[OPTIMIZER],
        stays=[ORDER, COMM, COMPUTE, SHARDS, KEPT],
        never_grows=[STEP, PEAK],
    ),
    laws(
        "plain SGD in place of momentum",
        by("fsdp2", optimizer="sgd_momentum", cpu_offload=False),
        plan(optimizer="sgd"),
        vanishes=[STATES],
        falls=[OPTIMIZER],
        stays=[ORDER, COMM, COMPUTE, SHARDS, KEPT],
        never_grows=[STEP, PEAK],
    ),
    laws(
        "torch.compile",
        after(whole, plan(compile=False)),
        plan(compile=True),
        stays=[ORDER, COMM, SENT, FLOPS, SHARDS, STATES, PARAMS],
        falls=[COMPUTE, ISSUING],
        never_grows=[STEP, KEPT],
    ),
    laws(
        "scores that are written",
        plan(attention_impl="sdpa", activation_checkpointing=None),
        plan(attention_impl="math"),
        stays=[ORDER, COMM, SHARDS, FLOPS, PARAMS],
        grows=[KEPT],
    ),
    laws(
        "scores that are written in half precision",
        after(of_known_fp32, in_half, plan(attention_impl="sdpa", activation_checkpointing=None)),
        plan(attention_impl="math"),
        never_falls=[COMPUTE, STEP, KEPT],
    ),
    laws(
        "FlashAttention of 2023",
        plan(attention_impl="sdpa"),
        plan(attention_impl="flash1"),
        stays=[PROGRAM, FORWARD, COMM, PEAK, KEPT],
        never_falls=[BACKWARD, STEP],
    ),
    laws(
        "a fused loss",
        plan(cross_entropy="torch"),
        plan(cross_entropy="fused"),
        stays=[PROGRAM, COMM, FLOPS],
        falls=[COMPUTE],
        never_grows=[STEP],
    ),
    laws(
        "the loss once more for logging",
        plan(loss_metrics=0),
        plan(loss_metrics=1),
        stays=[PROGRAM, COMM, BACKWARD, KEPT, PEAK],
        grows=[FORWARD],
        never_falls=[STEP],
    ),
    laws(
        "attention that looks back only",
        model(causal=False),
        model(causal=True),
        stays=[PROGRAM, COMM, PARAMS, COPYING],
        falls=[FLOPS],
        never_grows=[COMPUTE, STEP, KEPT],
    ),
    laws(
        "as many key heads as heads said",
        model(n_kv_head=None),
        lambda r: model(n_kv_head=r.model.n_head)(r),
        stays=ALL,
    ),
    laws(
        "one key head for all heads",
        after(of_several, by("fsdp2"), model(n_kv_head=None, bias=False)),
        model(n_kv_head=1),
        falls=[PARAMS, FLOPS],
        stays=[UNITS],
        never_grows=[COMM, GATHERED],
    ),
    laws(
        "the heads' width said",
        model(head_dim=None),
        lambda r: model(head_dim=r.model.d_model // r.model.n_head)(r),
        stays=ALL,
    ),
    laws(
        "no biases",
        after(whole, model(bias=True, n_kv_head=None)),
        model(bias=False),
        falls=[PARAMS],
        stays=[UNITS, FLOPS],
    ),
    laws(
        "a head of its own",
        model(tied_embeddings=True),
        model(tied_embeddings=False),
        grows=[PARAMS],
        stays=[FLOPS, COMPUTE, UNITS],
        never_falls=[OPTIMIZER],
    ),
    laws(
        "twice the vocabulary",
        by("fsdp2"),
        model(vocab=times(2)),
        grows=[PARAMS, FLOPS],
        stays=[UNITS],
        never_falls=[COMPUTE, STEP, KEPT, GATHERING],
    ),
    laws(
        "twice the feed-forward's width",
        by("fsdp2"),
        model(d_ffn=times(2)),
        grows=[PARAMS, FLOPS],
        stays=[UNITS],
        never_falls=[COMPUTE, STEP, KEPT, GATHERING],
    ),
    laws(
        "SwiGLU in place of GELU",
        after(by("fsdp2", activation_checkpointing=None, wrap="block", optimizer="adamw"), model(ffn_type="gelu")),
        model(ffn_type="swiglu"),
        grows=[PARAMS, FLOPS, KEPT],
        stays=[UNITS, GATHERS],
        never_falls=[COMPUTE],
    ),
    laws(
        "ReLU in place of GELU",
        model(ffn_type="gelu"),
        model(ffn_type="relu"),
        stays=[PROGRAM, PARAMS, FLOPS, COMPUTE],
        never_grows=[KEPT, PEAK],
    ),
    laws(
        "a composed norm in place of a fused one",
        after(plan(compile=False, rms_norm="fused"), model(norm="rmsnorm")),
        plan(rms_norm="composed"),
        stays=[PARAMS, FLOPS, PROGRAM],
        grows=[COMPUTE],
        never_falls=[KEPT, STEP],
    ),
]
