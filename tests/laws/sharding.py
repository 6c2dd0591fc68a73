"""Laws of what FSDP and its siblings do with parameters and gradients: prefetch, reshard, offload, units, buckets."""

from __future__ import annotations

from tests.laws.draws import by, of_several, over_nodes, whole
from tests.laws.law import after, laws, model, plan, times
from tests.laws.outcomes import (
    ALL,
    ALL_REDUCED,
    COMM,
    COMPUTE,
    COPYING,
    FLOPS,
    GATHERED,
    GATHERING,
    GATHERS,
    GRADIENTS,
    KEPT,
    OPTIMIZER,
    ORDER,
    PARAMS,
    PEAK,
    REDUCING,
    REDUCTION_COUNT,
    SCATTERED,
    SENT,
    SENT_GATHERED,
    SENT_REDUCED,
    SHARDS,
    STATES,
    STEP,
    TO_HOST,
    WHOLE,
)

SAME_TRAFFIC = [SENT, GATHERS, REDUCTION_COUNT, COMPUTE, COMM, COPYING, OPTIMIZER, KEPT]
blocks = after(over_nodes, by("fsdp2", wrap="block"))
one_by_one = after(blocks, plan(grad_accum=1))
as_names = lambda r: tuple(f"layers.{i}" for i in range(r.model.n_layer))  # noqa: E731

LAWS = [
    laws(
        "a list of one unit to prefetch in forward",
        after(one_by_one, plan(forward_prefetch=None)),
        plan(forward_prefetch=1),
        stays=SAME_TRAFFIC,
        never_falls=[WHOLE],
    ),
    *[
        laws(
            f"a list of three units in place of one in {phase}",
            after(one_by_one, plan(**{f"{phase}_prefetch": 1})),
            plan(**{f"{phase}_prefetch": 3}),
            stays=SAME_TRAFFIC,
            never_falls=[WHOLE],
        )
        for phase in ("forward", "backward")
    ],
    *[
        laws(
            f"a list as long as any in {phase}",
            after(one_by_one, plan(**{f"{phase}_prefetch": 9})),
            plan(**{f"{phase}_prefetch": 99}),
            stays=ALL,
        )
        for phase in ("forward", "backward")
    ],
    laws(
        "prefetching in backward as FSDP1 does",
        after(of_several, by("fsdp1", sharding_strategy="FULL_SHARD", backward_prefetch="none")),
        plan(backward_prefetch="BACKWARD_PRE"),
        stays=SAME_TRAFFIC,
        never_falls=[WHOLE],
        never_grows=[STEP],
    ),
    laws(
        "prefetching later in backward",
        after(of_several, by("fsdp1", sharding_strategy="FULL_SHARD", backward_prefetch="BACKWARD_PRE")),
        plan(backward_prefetch="BACKWARD_POST"),
        stays=SAME_TRAFFIC,
    ),
    laws(
        "no rate limiter",
        after(of_several, by("fsdp1", limit_all_gathers=True)),
        plan(limit_all_gathers=False),
        stays=SAME_TRAFFIC,
        never_grows=[STEP],
    ),
    laws(
        "parameters kept after forward",
        after(blocks, plan(reshard_after_forward=True)),
        plan(reshard_after_forward=False),
        stays=[COMPUTE, SENT_REDUCED, KEPT, SHARDS, STATES, OPTIMIZER],
        never_grows=[SENT_GATHERED, GATHERS, GATHERING, COMM, STEP],
        never_falls=[WHOLE],
    ),
    laws(
        "the root kept after forward",
        after(blocks, plan(reshard_after_forward=True)),
        plan(reshard_after_forward=None),
        stays=[COMPUTE, SENT_REDUCED, KEPT],
        never_grows=[SENT_GATHERED, GATHERS, STEP],
        never_falls=[WHOLE],
    ),
    laws(
        "FSDP1 keeping parameters after forward",
        after(over_nodes, by("fsdp1", sharding_strategy="FULL_SHARD")),
        plan(sharding_strategy="SHARD_GRAD_OP"),
        stays=[COMPUTE, SENT_REDUCED, KEPT, SHARDS, STATES],
        never_grows=[SENT_GATHERED, GATHERS, STEP],
        never_falls=[WHOLE],
    ),
    laws(
        "FSDP1 that shards nothing",
        after(over_nodes, by("fsdp1", sharding_strategy="SHARD_GRAD_OP", cpu_offload=False, optimizer="adamw")),
        plan(sharding_strategy="NO_SHARD"),
        vanishes=[SENT_GATHERED, SCATTERED],
        stays=[COMPUTE, KEPT, FLOPS],
        grows=[ALL_REDUCED, SHARDS, STATES],
    ),
    laws(
        "offload",
        after(whole, of_several, by("fsdp2", cpu_offload=False)),
        plan(cpu_offload=True),
        vanishes=[SHARDS, STATES],
        stays=[COMPUTE, SENT, COMM, GATHERS, KEPT, PARAMS],
        grows=[TO_HOST, COPYING, OPTIMIZER],
        never_falls=[STEP],
        never_grows=[PEAK],
    ),
    laws(
        "FSDP1's offload",
        after(whole, of_several, by("fsdp1", cpu_offload=False)),
        plan(cpu_offload=True),
        vanishes=[SHARDS, STATES],
        stays=[COMPUTE, SENT, KEPT],
        grows=[TO_HOST],
        never_falls=[STEP],
    ),
    laws(
        "three inputs of reduce-scatters alive",
        after(blocks, plan(reduce_scatter_max_input_buffers=1)),
        plan(reduce_scatter_max_input_buffers=3),
        stays=[ORDER, *SAME_TRAFFIC],
        never_falls=[GRADIENTS, PEAK],
        never_grows=[STEP],
    ),
    laws(
        "a communicator of their own for reduce-scatters",
        after(blocks, plan(separate_reduce_scatter_group=False)),
        plan(separate_reduce_scatter_group=True),
        stays=[*SAME_TRAFFIC, PEAK, WHOLE, GRADIENTS],
    ),
    laws(
        "gathers that wait for the optimizer",
        after(blocks, plan(post_optim_event=False)),
        plan(post_optim_event=True),
        stays=[ORDER, *SAME_TRAFFIC, PEAK],
        never_grows=[STEP],
    ),
    laws(
        "asynchronous all-gathers",
        after(blocks, plan(unshard_async_op=False)),
        plan(unshard_async_op=True),
        stays=[SENT, GATHERS, COMPUTE, COMM, KEPT, OPTIMIZER],
    ),
    laws("torch 2.14 in place of 2.13", by("fsdp2", torch="2.13"), plan(torch="2.14"), stays=ALL),
    laws(
        "torch 2.15 reducing half-precision gradients",
        after(over_nodes, whole, by("fsdp2", torch="2.14", param_dtype="fp16", reduce_dtype=None), model(dtype="fp32")),
        plan(torch="2.15"),
        stays=[GATHERED, COMPUTE, KEPT],
        doubles=[SCATTERED, SENT_REDUCED],
        never_falls=[REDUCING],
    ),
    laws(
        "another divisor of the gradients",
        blocks,
        plan(gradient_divide_factor=3.0),
        stays=[GATHERED, SENT_GATHERED, COMPUTE, KEPT, PEAK, SENT_REDUCED],
        never_falls=[COPYING],
    ),
    laws(
        "the whole model as one unit",
        after(over_nodes, by("fsdp2", wrap="block", reshard_after_forward=True)),
        plan(wrap="root"),
        stays=[PARAMS, FLOPS, KEPT, COMPUTE, SENT_REDUCED],
        never_grows=[GATHERS, REDUCTION_COUNT, GATHERED],
        never_falls=[WHOLE],
    ),
    laws("blocks of one parameter or more wrapped, which are all", blocks, plan(wrap=1), stays=ALL),
    laws(
        "blocks of 10^15 parameters wrapped, of which there are none",
        after(over_nodes, by("fsdp2", wrap="root")),
        plan(wrap=10**15),
        stays=ALL,
    ),
    laws(
        "all blocks wrapped by name",
        after(blocks, model(n_encoder_layer=0)),
        lambda r: plan(wrap=as_names(r))(r),
        stays=ALL,
    ),
    laws(
        "twice the bucket",
        after(over_nodes, by("ddp", bucket_cap_mb=4.0)),
        plan(bucket_cap_mb=times(2)),
        stays=[ALL_REDUCED, SENT, COMPUTE, OPTIMIZER, KEPT, SHARDS],
        never_grows=[REDUCTION_COUNT],
    ),
    laws("buckets that hold all", after(over_nodes, by("ddp", bucket_cap_mb=1e6)), plan(bucket_cap_mb=1e7), stays=ALL),
    laws(
        "ZeRO-1 in place of DDP",
        after(over_nodes, by("ddp", bucket_cap_mb=25.0)),
        by("zero1"),
        stays=[COMPUTE, SHARDS, KEPT, PARAMS],
        never_grows=[STATES, OPTIMIZER],
        never_falls=[COMM, SENT],
    ),
    laws(
        "ZeRO-2 in place of ZeRO-1",
        after(over_nodes, by("zero1", bucket_cap_mb=25.0)),
        by("zero2"),
        stays=[COMPUTE, SHARDS, STATES, KEPT, OPTIMIZER, SENT_GATHERED],
        never_grows=[SENT],
    ),
    laws(
        "FSDP2 in place of FSDP1",
        after(
            over_nodes,
            by(
                "fsdp1",
                sharding_strategy="FULL_SHARD",
                reduce_dtype=None,
                forward_prefetch=None,
                backward_prefetch=None,
                cpu_offload=False,
                grad_accum=1,
            ),
        ),
        by("fsdp2", forward_prefetch=None, backward_prefetch=None),
        stays=[COMPUTE, FLOPS, KEPT, PARAMS],
    ),
]
