"""Laws of one request: bounds, sums, and what is sent by formula."""

from __future__ import annotations

import math
from collections.abc import Callable

from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import COLLECTIVES, Lane, Op, ring_share
from tests.laws import outcomes as o
from tests.laws.draws import by, of_several, on, over_nodes, whole
from tests.laws.law import after, at_least, equals, model, plan, steady
from tests.laws.outcomes import SEGMENTS, busy, count, moved

small_plan = after(over_nodes, whole, by("fsdp2", shard_size=None, cpu_offload=False, torch="2.13"))
each_time = plan(
    requires_gradient_sync=True, requires_all_reduce=True, reshard_after_backward=True, is_last_backward=True
)
formula = after(small_plan, each_time, model(dtype="fp32"))


def lasts(sim: Simulation) -> float:
    """Seconds of all steps of the program."""
    return sim.run.step_ends_s[-1]


def busy_on(lane: Lane) -> Callable[[Simulation], float]:
    return lambda sim: sum(sim.costs.seconds(i) for i in sim.program.ops if i.lane is lane and not i.async_op)


def peak_s(sim: Simulation) -> float:
    """Seconds of the matmuls at the peak of their dtypes."""
    work, gpu = sim.workload.work, sim.cluster.gpu
    kernels = {
        (op, name): work[name].backward if op is Op.BWD else work[name].forward for op in SEGMENTS[:2] for name in work
    }
    spent = {
        key: sum(k.flops * k.count / gpu.peak_flops(k.dtype) for k in some if k.kind == "matmul")
        for key, some in kernels.items()
    }
    return sum(spent[i.op, i.unit] for i in sim.program.ops if (i.op, i.unit) in spent)


def link_s(sim: Simulation) -> float:
    """Seconds of the collectives at the peak of the fastest link."""
    c = sim.cluster
    fastest = max(link.bytes_per_s for link in (c.intra_link, c.inter_link, c.host_link)) * 8  # rails of a node
    return sum(
        ring_share(i.op, i.group_size) * i.bytes / fastest
        for i in sim.program.ops
        if i.op is not Op.ALL_REDUCE and i.op in COLLECTIVES
    )


def param_bytes(sim: Simulation) -> int:
    return sum(p.bytes for unit in sim.workload.units for p in unit.params)


def dtype_bytes(sim: Simulation) -> int:
    return DTYPE_BYTES[sim.plan.param_dtype or "fp32"]


def padded(sim: Simulation, *, without_root: bool = False) -> int:
    """Numbers in the padded parameters of all units."""
    units = sim.workload.units[1:] if without_root else sim.workload.units
    n = sim.cluster.gpus
    return sum(-(-p.shape[0] // n) * n * math.prod(p.shape[1:]) for unit in units for p in unit.params)


def shard_numbers(sim: Simulation) -> int:
    return padded(sim) // sim.cluster.gpus


def reduce_bytes(sim: Simulation) -> int:
    return DTYPE_BYTES[sim.plan.reduce_dtype or sim.plan.param_dtype or "fp32"]


def alive(sim: Simulation) -> list[int]:
    return [min(series) for series in sim.memory.by_category.values() if len(series)]


def gathers_of(sim: Simulation) -> int:
    """Bytes of one gather of each unit, padded."""
    return padded(sim) * dtype_bytes(sim)


LAWS = [
    at_least("a step lasts at least as long as its compute, copies and optimizer", lasts, busy_on(Lane.COMPUTE)),
    *(
        at_least(f"a step lasts at least as long as what is on {lane}", lasts, busy_on(lane))
        for lane in (Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, Lane.AG_COPY_IN)
    ),
    at_least("a step lasts at least as long as the CPU issues it", lasts, o.ISSUING.of),
    at_least("a step lasts at least as long as its matmuls at the peak", lasts, peak_s, whole),
    at_least("computing takes at least as long as the matmuls at the peak", busy(SEGMENTS), peak_s, whole),
    at_least("collectives take at least as long as their bytes on the fastest link", busy(COLLECTIVES), link_s),
    at_least("the time of a step is at least that between steps", o.STEP.of, o.BETWEEN.of),
    equals(
        "the step time is that of operations and that between steps",
        o.STEP.of,
        lambda s: s.run.step_time_s() + s.between_steps_s,
    ),
    equals(
        "throughput times the step time is the tokens of a step",
        lambda s: s.tokens_per_s_per_gpu * s.step_time_s,
        lambda s: s.workload.tokens * s.plan.grad_accum,
    ),
    at_least("exposed communication is at most all communication", lambda s: s.exposure.comm_s, o.EXPOSED.of),
    at_least(
        "exposed communication is at least what compute cannot hide",
        o.EXPOSED.of,
        lambda s: max(0.0, s.exposure.comm_s - s.exposure.compute_s),
    ),
    at_least(
        "communication and compute that do not overlap fit into a step",
        lambda s: s.exposure.step_s,
        lambda s: s.exposure.compute_s + s.exposed_comm_s,
    ),
    equals("exposed communication is the sum of the units'", o.EXPOSED.of, lambda s: sum(s.exposure.by_unit.values())),
    at_least("overlap is at most all", lambda s: 1.0, lambda s: s.exposure.overlap),
    at_least("overlap is at least nothing", lambda s: s.exposure.overlap + 1.0, lambda s: 1.0),
    equals(
        "each segment's forward runs once for each micro-batch and step",
        count({Op.FWD}),
        lambda s: _steps(s) * s.plan.grad_accum * len(s.workload.work),
    ),
    equals("each segment's backward runs once for each micro-batch and step", count({Op.BWD}), count({Op.FWD}), whole),
    equals(
        "recomputing all blocks takes as long as their forward, where no compiler leaves out what nothing needs",
        busy({Op.RECOMPUTE}),
        lambda s: sum(s.costs.seconds(i) for i in s.program.ops if i.op is Op.FWD and s.workload.work[i.unit].is_block),
        whole,
        plan(activation_checkpointing="full", compile=False),
    ),
    equals("the optimizer runs once a step", count({Op.OPTIM}), lambda s: _steps(s), whole),
    at_least(
        "the peak of memory holds what lives through all steps",
        o.PEAK.of,
        lambda s: sum(s.program.state_bytes.values()),
    ),
    at_least(
        "the peak of memory holds states and what one forward keeps",
        o.PEAK.of,
        lambda s: sum(s.program.state_bytes.values()) + o.kept(s),
        whole,
    ),
    at_least(
        "the peak of memory holds states and the largest unit's whole parameters",
        o.PEAK.of,
        lambda s: (
            sum(s.program.state_bytes.values())
            + max(sum(p.padded_bytes(s.cluster.gpus) for p in u.params) // 4 * dtype_bytes(s) for u in s.workload.units)
        ),
        formula,
    ),
    equals("the peak of memory is the sum of its parts", o.PEAK.of, lambda s: sum(s.memory.peak_by_category.values())),
    equals("no category of memory is ever below nothing", lambda s: min([0, *alive(s)]), lambda s: 0),
    equals(
        "what a step allocates it frees",
        lambda s: int(s.memory.bytes[-1]),
        lambda s: sum(s.program.state_bytes.values()),
        by("fsdp2", cpu_offload=False),
    ),
    at_least(
        "what the allocator has active is at least what is alive",
        lambda s: s.memory.active_bytes,
        o.PEAK.of,
        by("fsdp2"),
    ),
    at_least(
        "the allocator holds at least what is active",
        lambda s: s.memory.reserved_bytes,
        lambda s: s.memory.active_bytes,
    ),
    equals("the units' parameters are the model's", lambda s: param_bytes(s) // 4, o.PARAMS.of, formula),
    equals("without sharding a rank keeps all parameters", o.SHARDS.of, param_bytes, whole, by("ddp")),
    equals(
        "AdamW keeps two numbers beside each parameter",
        o.STATES.of,
        lambda s: 2 * param_bytes(s),
        whole,
        by("ddp", optimizer="adamw"),
    ),
    equals("FSDP2 keeps a padded shard of each parameter", o.SHARDS.of, lambda s: 4 * shard_numbers(s), formula),
    at_least(
        "all ranks' shards together hold the parameters",
        lambda s: o.SHARDS.of(s) * s.cluster.gpus,
        param_bytes,
        formula,
    ),
    equals(
        "FSDP2's optimizer states are those of the shards",
        o.STATES.of,
        lambda s: 8 * shard_numbers(s),
        formula,
        plan(optimizer="adamw"),
    ),
    equals(
        "FSDP2 that reshards gathers each unit twice for each micro-batch",
        moved({Op.ALL_GATHER}),
        lambda s: 2 * s.plan.grad_accum * gathers_of(s),
        formula,
        plan(reshard_after_forward=True),
    ),
    equals(
        "FSDP2 that keeps parameters gathers each unit once for each micro-batch",
        moved({Op.ALL_GATHER}),
        lambda s: s.plan.grad_accum * gathers_of(s),
        formula,
        plan(reshard_after_forward=False),
    ),
    equals(
        "FSDP2 by default gathers all but the root twice",
        moved({Op.ALL_GATHER}),
        lambda s: s.plan.grad_accum * (padded(s) + padded(s, without_root=True)) * dtype_bytes(s),
        formula,
        plan(reshard_after_forward=None),
    ),
    equals(
        "FSDP2 reduce-scatters each gradient once for each micro-batch",
        moved({Op.REDUCE_SCATTER}),
        lambda s: s.plan.grad_accum * padded(s) * reduce_bytes(s),
        formula,
    ),
    equals(
        "FSDP2 reduces with the last micro-batch only where it is told to",
        moved({Op.REDUCE_SCATTER}),
        lambda s: padded(s) * reduce_bytes(s),
        formula,
        plan(requires_gradient_sync="last", reduce_dtype=None, param_dtype=None),
    ),
    equals(
        "a rank sends (n-1)/n of what is gathered",
        o.SENT_GATHERED.of,
        lambda s: moved({Op.ALL_GATHER})(s) * (s.cluster.gpus - 1) / s.cluster.gpus,
        formula,
        plan(reshard_after_forward=True),
    ),
    equals(
        "a rank sends 2(n-1)/n of what is all-reduced",
        o.SENT.of,
        lambda s: 2 * moved({Op.ALL_REDUCE})(s) * (s.cluster.gpus - 1) / s.cluster.gpus,
        of_several,
        whole,
        by("ddp"),
    ),
    equals(
        "hybrid sharding all-reduces what a rank has of a reduce-scatter",
        moved({Op.ALL_REDUCE}),
        lambda s: moved({Op.REDUCE_SCATTER})(s) // s.plan.shard_size,
        formula,
        on(2),
        lambda r: plan(shard_size=r.cluster.node_size)(r),
    ),
    equals(
        "DDP all-reduces each gradient once for each micro-batch",
        moved({Op.ALL_REDUCE}),
        lambda s: s.plan.grad_accum * param_bytes(s),
        of_several,
        whole,
        by("ddp", requires_gradient_sync=True, param_dtype=None, reduce_dtype=None),
    ),
    at_least(
        "ZeRO-2 reduce-scatters at least each gradient",
        moved({Op.REDUCE_SCATTER}),
        param_bytes,
        of_several,
        whole,
        by("zero2", requires_gradient_sync=True, param_dtype=None, reduce_dtype=None),
    ),
    at_least(
        "ZeRO gathers at least each parameter after the step",
        moved({Op.ALL_GATHER}),
        param_bytes,
        of_several,
        whole,
        by("zero1", param_dtype=None),
    ),
    equals(
        "FSDP1 that shards nothing all-reduces as many bytes as FSDP2 at least reduce-scatters",
        moved({Op.ALL_REDUCE}),
        lambda s: s.plan.grad_accum * param_bytes(s),
        of_several,
        whole,
        by(
            "fsdp1",
            sharding_strategy="NO_SHARD",
            requires_gradient_sync=True,
            param_dtype=None,
            reduce_dtype=None,
            cpu_offload=False,
            forward_prefetch=False,  # which lets a program have two steps
        ),
    ),
    equals(
        "offload copies each shard to the GPU as often as it is gathered",
        moved({Op.H2D}),
        lambda s: 2 * s.plan.grad_accum * 4 * shard_numbers(s),
        formula,
        plan(cpu_offload=True, reshard_after_forward=True),
    ),
    equals(
        "the timeline has every operation",
        lambda s: sum(e.op not in (Op.ALLOC, Op.FREE) for e in s.timeline.events),
        lambda s: len(s.program.ops),
    ),
    equals(
        "the critical path is as long as the step",
        lambda s: sum(s.explain().critical_s.values()),
        lambda s: s.explain().step_time_s,
    ),
    at_least(
        "what compute waits for is at most the time it stands still",
        lambda s: s.exposure.step_s - s.explain().compute_s,
        lambda s: sum(c.idle_s for c in s.explain().culprits),
    ),
    steady(
        "layer",
        after(by("fsdp2", wrap="block", activation_checkpointing=None), whole),
        model(n_layer=lambda n: n + 1),
        o.PARAMS,
        o.FLOPS,
        o.KEPT,
        o.COMPUTE,
        o.SHARDS,
        o.STATES,
        o.OPTIMIZER,
        o.ISSUING,
        o.OPS,
    ),
    steady(
        "layer",
        after(over_nodes, by("fsdp2", wrap="block", forward_prefetch=None, backward_prefetch=None), whole),
        model(n_layer=lambda n: n + 1),
        o.SENT,
        o.COMM,
        o.GATHERS,
        o.COPYING,
        o.REDUCTION_COUNT,
    ),
    steady(
        "layer of the encoder",
        after(whole, model(n_encoder_layer=1)),
        model(n_encoder_layer=lambda n: n + 1),
        o.PARAMS,
        o.FLOPS,
    ),
    steady(
        "sequence of the batch",
        after(whole, plan(micro_batch=lambda n: n + 1)),  # of one alone, logits without the last need no copy
        plan(micro_batch=lambda n: n + 1),
        o.FLOPS,
        o.KERNEL_BYTES,
        o.KEPT,
        o.TOKENS,
    ),
    steady(
        "micro-batch",
        after(
            by(
                "fsdp2",
                requires_gradient_sync=True,
                requires_all_reduce=True,
                reshard_after_backward=True,
                is_last_backward=True,
            ),
            plan(grad_accum=2),
        ),
        plan(grad_accum=lambda n: n + 1),
        o.COMPUTE,
        o.SENT,
        o.COMM,
        o.ISSUING,
        o.COPYING,
        o.OPS,
    ),
    steady("column of the feed-forward", whole, model(d_ffn=lambda n: n + 16), o.PARAMS, o.FLOPS, o.KEPT),
    steady("row of the vocabulary", whole, model(vocab=lambda n: n + 1), o.PARAMS, o.FLOPS),
    steady("computation of the loss for logging", whole, plan(loss_metrics=lambda n: n + 1), o.FORWARD, o.COMPUTE),
]


def _steps(sim: Simulation) -> int:
    return len(sim.run.step_ends_s)
