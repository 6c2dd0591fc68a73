"""What a run may do unlike its configuration: a `Suspect` is one setting that a log does not show.

Each is a change of the request with the words for it and the line that settles it. How likely each is beforehand was
not counted anywhere: one in ten for what defaults and other layers of software set without being asked, one in twenty
for the rest, one in a hundred for kernels that are gone from new software; where one suspect is tried with several
amounts (a network slower by 2, 4, ...), these share it. What is measured decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from fsdp_sim.spec import Cluster, Gpu, Model, Plan

OFTEN, SELDOM, RARELY = 0.1, 0.05, 0.01
SLOWER_WIRE = (2, 4, 10, 40)
SLOWER_COMPUTE = (1.15, 1.4, 2.0)
RATES = tuple(f.name for f in fields(Gpu) if f.name.endswith(("_flops", "_bytes_per_s")) and "host" not in f.name)


class RunSettings(NamedTuple):
    """A model, a cluster and a plan, to be simulated together."""

    model: Model
    cluster: Cluster
    plan: Plan


class Suspect(NamedTuple):
    """One setting that may be unlike what the configuration says.

    Attributes:
        name: of what differs; two suspects of one name exclude each other.
        what: the difference, in words.
        check: what to print or run to see it.
        prior: how likely it is, before anything is measured.
        run: the run with it.
    """

    name: str
    what: str
    check: str
    prior: float
    run: Callable[[RunSettings], RunSettings]


def _plan(prior: float, name: str, value: Any, what: str, check: str, **more: Any) -> Suspect:
    return Suspect(name, what, check, prior, lambda r: r._replace(plan=replace(r.plan, **{name: value}, **more)))


def suspects(run: RunSettings) -> Iterator[Suspect]:
    """All that could differ from this run. Not all can be: `replace` refuses what does not go together."""
    model, cluster, plan = run
    yield from _of_memory(plan)
    yield from _of_units(plan, cluster)
    yield from _of_numbers(model, plan)
    yield from _of_hardware(cluster)


def _of_memory(plan: Plan) -> Iterator[Suspect]:
    again = "print(model): a checkpointed block shows a CheckpointWrapper, or count the block's forwards in a profile"
    if plan.activation_checkpointing is None:
        yield _plan(OFTEN, "activation_checkpointing", "full", "every block is computed again in backward", again)
        yield _plan(
            SELDOM, "activation_checkpointing", "selective", "blocks are computed again but for attention and every "
            "second matmul", again,
        )  # fmt: skip
    else:
        yield _plan(
            OFTEN, "activation_checkpointing", None, "no block is computed again: checkpointing is off", again,
            use_reentrant=False,
        )  # fmt: skip
        other = "selective" if plan.activation_checkpointing == "full" else "full"
        yield _plan(SELDOM, "activation_checkpointing", other, f"checkpointing is {other}", again)
    scores = "the names of kernels in a profile: softmax beside matmuls, or one flash kernel"
    if plan.attention_impl == "math":
        yield _plan(OFTEN, "attention_impl", "sdpa", "attention is fused", scores)
    else:
        yield _plan(OFTEN, "attention_impl", "math", "attention writes its matrix of scores", scores)
    if plan.attention_impl != "flash1":
        yield _plan(RARELY, "attention_impl", "flash1", "attention is fused by the kernels of 2023", scores)
    if not plan.cpu_offload:
        yield _plan(
            SELDOM, "cpu_offload", True, "shards and the optimizer are in the CPU's memory",
            "print(next(model.parameters()).device)",
        )  # fmt: skip
    else:
        yield _plan(SELDOM, "cpu_offload", False, "nothing is offloaded", "print(next(model.parameters()).device)")
    if plan.optimizer == "adamw":
        yield _plan(SELDOM, "optimizer", "adamw_8bit", "the optimizer keeps its states in 8 bits", "print(optimizer)")


def _of_units(plan: Plan, cluster: Cluster) -> Iterator[Suspect]:
    if cluster.gpus == 1:
        return
    keep = "how often a profile's step gathers each unit: once, or once more in backward"
    if plan.api == "fsdp2":
        if plan.reshard_after_forward is not False:
            yield _plan(OFTEN, "reshard_after_forward", False, "parameters stay whole after forward", keep)
        else:
            yield _plan(OFTEN, "reshard_after_forward", None, "parameters are freed after forward", keep)
    elif plan.api == "fsdp1" and plan.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        other = "SHARD_GRAD_OP" if plan.sharding_strategy == "FULL_SHARD" else "FULL_SHARD"
        what = "stay whole after forward" if other == "SHARD_GRAD_OP" else "are freed after forward"
        yield _plan(OFTEN, "sharding_strategy", other, f"parameters {what} ({other})", keep)
    if plan.api in ("fsdp1", "fsdp2"):
        layers = "print(model): which modules are FSDP's, or count all-gathers in a profile"
        if plan.wrap == "root":
            yield _plan(OFTEN, "wrap", "block", "each block is a unit", layers)
        else:
            yield _plan(
                OFTEN, "wrap", "root", "the whole model is one unit: no policy matched a block", layers,
                forward_prefetch=None, backward_prefetch=None,
            )  # fmt: skip
        if cluster.nodes > 1 and plan.shard_size is None and plan.api == "fsdp2":
            yield _plan(
                SELDOM, "shard_size", cluster.node_size, "each node has a copy of the model (HSDP)",
                "print(next(model.parameters()).device_mesh)",
            )  # fmt: skip
        elif plan.shard_size is not None and plan.api == "fsdp2":
            yield _plan(
                SELDOM, "shard_size", None, "parameters are sharded over all ranks, without HSDP",
                "print(next(model.parameters()).device_mesh)",
            )  # fmt: skip
        whole = "reduce-scatters in a profile: one for each micro-batch, or in the last one only"
        if plan.grad_accum > 1:
            last = plan.requires_gradient_sync is True
            what = "stay whole between micro-batches" if last else "are reduced in every micro-batch"
            yield _plan(OFTEN, "requires_gradient_sync", "last" if last else True, f"gradients {what}", whole)


def _of_numbers(model: Model, plan: Plan) -> Iterator[Suspect]:
    gathered = "the dtype of an all-gather in a profile, or of an activation: print(x.dtype) in a block"
    if plan.param_dtype == "bf16" or (plan.param_dtype is None and model.dtype == "bf16"):
        yield Suspect(
            "param_dtype", "weights are gathered and multiplied in fp32", gathered, OFTEN,
            lambda r: RunSettings(
                replace(r.model, dtype="fp32"), r.cluster, replace(r.plan, param_dtype="fp32", reduce_dtype="fp32")
            ),
        )  # fmt: skip
    else:
        yield _plan(OFTEN, "param_dtype", "bf16", "weights are gathered and multiplied in bf16", gathered)
    kept = "print(next(model.parameters()).dtype)"
    if model.dtype == "fp32":
        yield Suspect(
            "dtype", "weights, gradients and the optimizer's states are kept in bf16", kept, OFTEN,
            lambda r: r._replace(model=replace(r.model, dtype="bf16")),
        )  # fmt: skip
    elif model.dtype == "bf16":
        yield Suspect(
            "dtype", "weights, gradients and the optimizer's states are kept in fp32", kept, OFTEN,
            lambda r: RunSettings(
                replace(r.model, dtype="fp32"), r.cluster, replace(r.plan, param_dtype=r.plan.param_dtype or "bf16")
            ),
        )  # fmt: skip
    compiled = "the names of kernels in a profile: triton_... where blocks are compiled"
    if plan.compile:
        yield _plan(OFTEN, "compile", False, "blocks are not compiled", compiled)
    else:
        yield _plan(SELDOM, "compile", True, "blocks are compiled", compiled)


def _of_hardware(cluster: Cluster) -> Iterator[Suspect]:
    if cluster.gpus > 1:
        between = cluster.nodes > 1
        where = "between nodes" if between else "between the GPUs of the node"
        test = f"the bandwidth of all_gather_perf (nccl-tests) {where}, or of one all-gather in a profile"
        for by in SLOWER_WIRE:
            yield Suspect(
                "wire", f"the network {where} carries 1/{by} of its nominal rate", test,
                OFTEN / len(SLOWER_WIRE), _wire(by),
            )  # fmt: skip
    for factor in SLOWER_COMPUTE:
        yield Suspect(
            "compute", f"the slowest rank computes {factor:g} times as long, and all wait for it",
            "the duration of one block's forward on each rank's profile, and nvidia-smi's clocks",
            SELDOM / len(SLOWER_COMPUTE), _compute(factor),
        )  # fmt: skip


def _wire(by: int) -> Callable[[RunSettings], RunSettings]:
    def slower(run: RunSettings) -> RunSettings:
        name = "inter" if run.cluster.nodes > 1 else "intra"
        link = getattr(run.cluster, f"{name}_link")
        new: dict[str, Any] = {name: replace(link, bytes_per_s=link.bytes_per_s / by)}
        if name == "inter":
            new["bandwidth_gbps"] = None
        return run._replace(cluster=replace(run.cluster, **new))

    return slower


def _compute(factor: float) -> Callable[[RunSettings], RunSettings]:
    def slower(run: RunSettings) -> RunSettings:
        gpu = run.cluster.gpu
        rates = {name: rate / factor for name in RATES if (rate := getattr(gpu, name)) is not None}
        return run._replace(cluster=replace(run.cluster, gpu=replace(gpu, **rates)))

    return slower
