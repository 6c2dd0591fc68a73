"""`without_effect`: the settings of a request that change nothing, each with the reason.

Nothing is known here of what a setting does: the request is simulated once more with the setting at its default. Only
why it changes nothing is written down, where that can be told from the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_sim.spec import ONLY_WITH_ACCUMULATION, Cluster, Plan

if TYPE_CHECKING:
    from fsdp_sim.simulation.simulation import Simulation

OF_COMMUNICATION = (  # what is sent, to whom, when, and over what
    "reshard_after_forward", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "sharding_strategy",
    "reduce_dtype", "shard_size", "reduce_scatter_max_input_buffers", "separate_reduce_scatter_group",
    "post_optim_event", "unshard_async_op", "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward",
    "is_last_backward", "gradient_divide_factor", "torch", "bucket_cap_mb", "intra", "inter", "bandwidth_gbps",
    "latency_us",
)  # fmt: skip


class Reason(NamedTuple):
    """Why one of some settings changes nothing: in words, with fields of the plan in braces, where that holds."""

    names: tuple[str, ...]
    holds: Callable[[Cluster, Plan], bool]
    words: str


REASONS = (
    Reason(
        ("inter", "bandwidth_gbps", "latency_us", "gpus_per_node"),
        lambda c, p: c.nodes == 1,
        "all GPUs are in one node",
    ),
    Reason(
        ("gpus_per_node",),
        lambda c, p: c.node_size == replace(c, gpus_per_node=None).node_size,
        "a node has as many without it",
    ),
    Reason(
        ("host", "host_memory_gb_per_s"),
        lambda c, p: not (p.cpu_offload or p.activation_offload),
        "nothing is copied to the CPU's memory",
    ),
    Reason(ONLY_WITH_ACCUMULATION, lambda c, p: p.grad_accum == 1, "a step has one micro-batch"),
    Reason(("use_reentrant",), lambda c, p: not (p.freeze or p.lora_rank), "nothing that is computed again is frozen"),
    Reason(("rms_norm",), lambda c, p: p.compile, "a compiler fuses norms in any case"),
    Reason(("rms_norm",), lambda c, p: True, "it is for RMSNorm, in models given by name or dimensions"),
    Reason(("torch",), lambda c, p: p.torch == "2.14", "torch 2.14 issues what 2.13 does"),
    Reason(OF_COMMUNICATION, lambda c, p: c.gpus == 1, "one GPU communicates with no other"),
    Reason(("reduce_dtype",), lambda c, p: True, "gradients are reduced in {reduce_dtype} without it"),
    Reason(("param_dtype",), lambda c, p: True, "parameters are {param_dtype} without it"),
    Reason(("shard_size",), lambda c, p: p.shard_size == c.gpus, "these are all GPUs"),
    Reason(("requires_all_reduce",), lambda c, p: p.shard_size in (None, c.gpus), "there is one replica"),
)


TRACED = (
    Reason(("micro_batch", "seq_len"), lambda c, p: True, "a traced model has that of its example inputs"),
    Reason(
        ("cross_entropy", "loss_metrics", "experts_impl"), lambda c, p: True,
        "a traced model computes what its module and its loss do",
    ),
)  # fmt: skip


def without_effect(
    cluster: Cluster, plan: Plan, again: Callable[[Cluster, Plan], Simulation], *, traced: bool = False
) -> dict[str, str]:
    """A sentence for each setting that changes neither program nor times nor memory.

    Most show an effect in a step of two micro-batches already; the whole step is simulated for those that do not.

    Args:
        plan: as it was asked for.
        again: simulates the model.
        traced: it is a module that was traced.
    """
    usual = vars(Plan(stack=plan.stack)) | {"stack": "plain"}
    asked, asked_in_short = (cache(partial(again, cluster, one)) for one in (plan, in_short(plan)))
    settings: list[tuple[Plan | Cluster, str, Any]] = [(plan, name, usual[name]) for name in plan.unlike_its_stack]
    settings += [
        (cluster, f.name, None) for f in fields(cluster) if f.default is None and getattr(cluster, f.name) is not None
    ]
    reasons = (*TRACED, *REASONS) if traced else REASONS
    found: dict[str, str] = {}
    for of, name, default in settings:
        try:
            other = replace(of, **{name: default})
            of_cluster, of_plan = (cluster, other) if isinstance(other, Plan) else (other, plan)
            same = _same(asked_in_short(), again(of_cluster, in_short(of_plan))) and (
                in_short(plan) == plan or _same(asked(), again(of_cluster, of_plan))
            )
        except ValueError:  # something else that is set needs it
            continue
        if same:
            reason = next((r for r in reasons if name in r.names and r.holds(cluster, plan)), None)
            without = f"of {default!r}" if default is not None else "without it"
            why = reason.words.format_map(vars(plan)) if reason else f"program, time and memory are those {without}"
            found[name] = f"{type(of).__name__}.{name}={_words(getattr(of, name))} changes nothing here: {why}."
    return found


def in_short(plan: Plan) -> Plan:
    """The plan with two micro-batches at most: the others of a step are like the second, and need no less memory."""
    return replace(plan, grad_accum=min(plan.grad_accum, 2))


def _same(sim: Simulation, other: Simulation) -> bool:
    """Whether two simulations have nothing apart. What most settings change, and what needs no replay, comes first."""
    return (
        sim.program.issues_as(other.program)
        and sim.peak_memory_bytes == other.peak_memory_bytes
        and sim.host_memory_bytes == other.host_memory_bytes
        and sim.step_time_s == other.step_time_s
        and sim.exposure == other.exposure  # what communication hides may have changed
        # Of one program and the same tensors the allocator holds as much, unless it is set otherwise
        and (
            (
                sim.plan.expandable_segments == other.plan.expandable_segments
                and sim.memory.changes == other.memory.changes
            )
            or sim.memory.reserved_bytes == other.memory.reserved_bytes
        )
    )


def _words(value: Any) -> str:
    return repr(getattr(value, "name", value))
