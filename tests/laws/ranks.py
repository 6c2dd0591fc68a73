"""Laws of how many ranks train, and of how many of them share one copy of the parameters."""

from __future__ import annotations

from tests.laws.draws import alone, by, of_several, on, over_nodes, whole
from tests.laws.law import Change, Request, after, as_drawn, cluster, laws, model, plan, times
from tests.laws.outcomes import (
    ALL,
    ALL_REDUCED,
    BACKWARD,
    COMM,
    COMPUTE,
    COPYING,
    EXPOSED,
    FLOPS,
    FORWARD,
    GATHERED,
    GATHERING,
    GATHERS,
    GRADIENTS,
    ISSUING,
    KEPT,
    OPTIMIZER,
    ORDER,
    PARAMS,
    PEAK,
    PROGRAM,
    REDUCING,
    SCATTERED,
    SENT,
    SENT_GATHERED,
    SENT_REDUCED,
    SHARDS,
    STATES,
    STEP,
    UNITS,
)

twice_the_ranks = cluster(gpus=times(2))
full = by("fsdp2", shard_size=None, reshard_after_forward=None, gradient_divide_factor=None)


def in_groups(nodes: int) -> Change:
    """Sharded within groups of that many nodes."""
    return lambda r: plan(shard_size=nodes * r.cluster.node_size)(r)


def in_one_group(request: Request) -> Request:
    return plan(shard_size=request.cluster.gpus)(request)


def halves(request: Request) -> Request:
    return plan(shard_size=request.cluster.gpus // 2)(request)


def hybrid(request: Request) -> Request:
    """FSDP1's, each copy on half of the ranks."""
    return plan(sharding_strategy="HYBRID_SHARD", shard_size=request.cluster.gpus // 2)(request)


def hybrid_of_all(request: Request) -> Request:
    return plan(sharding_strategy="HYBRID_SHARD", shard_size=request.cluster.gpus)(request)


def kept_in(part: int) -> Change:
    """After forward a slice of 1/n is kept, n being the ranks of a shard group over ``part``."""
    return lambda r: plan(reshard_after_forward=(r.plan.shard_size or r.cluster.gpus) // part)(r)


LAWS = [
    laws(
        "twice the nodes",
        after(over_nodes, full),
        twice_the_ranks,
        stays=[ORDER, KEPT, FLOPS, ISSUING, PARAMS, UNITS, GATHERS],
        never_grows=[SHARDS, STATES, OPTIMIZER],
        never_falls=[COMPUTE, FORWARD, BACKWARD, COMM, GATHERING, REDUCING, SENT, SENT_GATHERED, GATHERED],
    ),
    laws(
        "twice the nodes under DDP",
        after(over_nodes, by("ddp", gradient_divide_factor=None)),
        twice_the_ranks,
        stays=[ORDER, COPYING, OPTIMIZER, PEAK, ALL_REDUCED, SHARDS, STATES, GRADIENTS],
        never_falls=[COMPUTE, STEP, COMM, SENT],
    ),
    *[
        laws(
            f"twice the nodes under ZeRO-{stage}",
            after(over_nodes, by(f"zero{stage}")),
            twice_the_ranks,
            stays=[ORDER, SHARDS],
            never_grows=[STATES, OPTIMIZER],
            never_falls=[COMPUTE, COMM, SENT],
        )
        for stage in (1, 2)
    ],
    laws(
        "twice the nodes, each copy of the parameters on one",
        after(full, on(2), in_groups(1)),
        twice_the_ranks,
        stays=[ORDER, GATHERING, GATHERED, SCATTERED, ALL_REDUCED, SHARDS, STATES, PEAK, OPTIMIZER, COPYING],
        never_falls=[COMPUTE, STEP, COMM, REDUCING, SENT_REDUCED],
    ),
    laws(
        "one GPU in place of several",
        after(full, of_several, plan(cpu_offload=False)),
        alone,
        stays=[FLOPS, KEPT, PARAMS],
        never_grows=[COMPUTE],
        vanishes=[COMM, SENT, EXPOSED, GATHERS],
        never_falls=[SHARDS, STATES, OPTIMIZER],
    ),
    laws(
        "DDP on one GPU in place of several",
        after(by("ddp"), of_several),
        alone,
        stays=[SHARDS, STATES, OPTIMIZER],
        never_grows=[COMPUTE, PEAK],  # one rank has no buckets
        vanishes=[COMM, SENT],
    ),
    laws("the ranks as the shard group's size", full, in_one_group, stays=ALL),
    laws(
        "FSDP1's hybrid strategy with one group of all ranks",
        after(by("fsdp1", sharding_strategy="FULL_SHARD"), of_several),
        hybrid_of_all,
        stays=[SENT, GATHERED, SHARDS, STATES, PEAK, COMPUTE],
    ),
    laws(
        "FSDP1's hybrid strategy with two groups",
        after(on(4), by("fsdp1", sharding_strategy="FULL_SHARD")),
        hybrid,
        stays=[COMPUTE, KEPT, FLOPS],
        never_falls=[SHARDS, STATES, OPTIMIZER],
        never_grows=[GATHERING, GATHERED],
        grows=[ALL_REDUCED],
    ),
    laws(
        "two shard groups in place of one",
        after(whole, on(4), full, plan(requires_all_reduce=True)),
        halves,
        stays=[COMPUTE, KEPT, FLOPS, GATHERS],
        doubles=[OPTIMIZER],
        never_falls=[SHARDS, STATES],
        never_grows=[GATHERED, GATHERING, SENT_GATHERED, SCATTERED],
        grows=[ALL_REDUCED],
    ),
    laws(
        "each rank with a copy of its own",
        after(over_nodes, full, plan(cpu_offload=False)),
        plan(shard_size=1),
        vanishes=[SENT_GATHERED, GATHERS, SCATTERED],
        stays=[COMPUTE, KEPT, FLOPS],
        never_falls=[SHARDS, STATES],
    ),
    laws(
        "a slice kept by half of the shard group",
        after(on(4), full, plan(reshard_after_forward=True, reshard_after_backward=True, cpu_offload=False)),
        kept_in(2),
        stays=[COMPUTE, GATHERS, SENT_REDUCED, STATES, GATHERED, KEPT],
        never_grows=[SENT_GATHERED, GATHERING],
        never_falls=[PEAK],
    ),
    laws(
        "a slice kept by the whole shard group",
        after(over_nodes, full, plan(reshard_after_forward=True)),
        kept_in(1),
        stays=ALL,
    ),
    laws(
        "a slice of the whole, which is what is kept by one rank",
        after(over_nodes, full, plan(reshard_after_forward=True)),
        plan(reshard_after_forward=1),
        stays=[SENT_REDUCED, COMPUTE, KEPT],
    ),
    laws(
        "another name of the model",
        as_drawn,
        model(name="another"),
        stays=ALL,
    ),
    laws(
        "the GPUs of a node said as they are",
        as_drawn,
        lambda r: cluster(gpus_per_node=r.cluster.node_size)(r),
        stays=ALL,
    ),
    laws(
        "the links said as they are",
        as_drawn,
        lambda r: cluster(intra=r.cluster.intra_link, inter=r.cluster.inter_link, host=r.cluster.host_link)(r),
        stays=ALL,
    ),
    laws(
        "the bandwidth between nodes said as it is",
        over_nodes,
        lambda r: cluster(bandwidth_gbps=r.cluster.inter_link.bytes_per_s * 8e-9)(r),
        stays=ALL,
    ),
    laws(
        "the nodes split in two",
        after(over_nodes, full),
        lambda r: cluster(gpus_per_node=r.cluster.node_size // 2)(r) if r.cluster.node_size % 2 == 0 else r,
        stays=[PROGRAM, PEAK, SENT],
        never_falls=[COMPUTE],
    ),
]
