"""What would make a plan fit that does not, and what would make one faster that does: each answer has been simulated.

To make it fit: a `MemoryLever` is one thing that can be changed, as a list of settings from mild to strong. The first
setting that fits is the answer; where no lever is enough alone, they are tried in pairs, then in threes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from fsdp_sim.diagnose import BUSY, TIPS
from fsdp_sim.explore.garbage import seldom_collected
from fsdp_sim.requests import Change
from fsdp_sim.simulation import Fit, Simulation, in_short, simulate
from fsdp_sim.spec import SETTINGS_OF, Cluster, Model, Plan

WORTH = 1.01  # times the tokens a second from which a change is worth telling
MOST_HELP = 4  # changes that are named
LOSS_CHUNKS = 8
MAX_DOUBLINGS = 6  # how often the number of GPUs is doubled at most
MAX_BLOCKS_TRIED = 2_000  # blocks times micro-batches of a step that is tried; each takes a third of a millisecond


class LeverSetting(NamedTuple):
    """New values for fields of the plan and the cluster, and the change in words."""

    set: dict[str, Any]
    what: str


GROWN = LeverSetting({"expandable_segments": True}, "let torch's allocator grow its segments")


class MemoryLever(NamedTuple):
    """One thing that can be changed: its settings from mild to strong."""

    name: str
    settings: tuple[LeverSetting, ...]


def levers(cluster: Cluster, plan: Plan) -> list[MemoryLever]:
    """The changes that save memory and leave the training the same, or nearly so."""
    return [lever for lever in _levers(cluster, plan) if lever.settings]


def _levers(cluster: Cluster, plan: Plan) -> Iterator[MemoryLever]:
    fsdp = plan.api in ("fsdp2", "fsdp1")
    if cluster.kind == "gpu" and not plan.expandable_segments:
        yield MemoryLever("allocator", (GROWN,))
    yield MemoryLever(
        "checkpointing", tuple(LeverSetting(*one) for one in _checkpointing(plan.activation_checkpointing))
    )
    reset = {name: _default(name) for name, apis in SETTINGS_OF.items() if "fsdp2" not in apis}
    as_fsdp = {"api": "fsdp2"} | {name: value for name, value in reset.items() if getattr(plan, name) != value}
    if not fsdp:
        yield MemoryLever("sharding", (LeverSetting(as_fsdp, "shard the parameters too (FSDP)"),))
    elif plan.api == "fsdp1" and (plan.sharding_strategy != "FULL_SHARD"):
        full = {"sharding_strategy": "FULL_SHARD"} | ({"shard_size": None} if plan.shard_size else {})
        yield MemoryLever("sharding", (LeverSetting(full, "shard everything over all GPUs (FULL_SHARD)"),))
    elif plan.shard_size is not None and plan.shard_size < cluster.gpus:
        yield MemoryLever(
            "sharding", (LeverSetting({"shard_size": None}, "shard over all GPUs, not in groups (no HSDP)"),)
        )
    if plan.api == "fsdp2" and plan.reshard_after_forward is not True:
        last = "head" if plan.wrap == "embed_block_head" else "root"
        whose = (
            f"the {last}'s parameters after forward too"
            if plan.reshard_after_forward is None
            else "parameters after forward"
        )
        yield MemoryLever("reshard", (LeverSetting({"reshard_after_forward": True}, f"free {whose}"),))
    if plan.wrap == "root":
        yield MemoryLever(
            "wrap", (LeverSetting({"wrap": "block"}, "make each block a unit, so that one is gathered at a time"),)
        )
    if plan.api == "fsdp2" and plan.wrap == "block":
        ends = "make units of the embedding and of the head, so that neither is whole beside the blocks"
        yield MemoryLever("wrap", (LeverSetting({"wrap": "embed_block_head"}, ends),))
    if fsdp and plan.param_dtype in (None, "fp32") and cluster.kind == "gpu" and cluster.gpu.supports_bf16:
        dtypes = {"param_dtype": "bf16", "reduce_dtype": plan.reduce_dtype or "fp32"}
        yield MemoryLever("dtype", (LeverSetting(dtypes, "gather and compute in bf16"),))
    if plan.attention_impl == "math":
        yield MemoryLever(
            "attention",
            (LeverSetting({"attention_impl": "sdpa"}, "fused attention, which writes no matrix of scores"),),
        )
    if plan.api == "fsdp1" and not plan.limit_all_gathers:
        limit = LeverSetting({"limit_all_gathers": True}, "let FSDP1's rate limiter hold the CPU back")
        yield MemoryLever("limiter", (limit,))
    if plan.loss_chunks == 1 and plan.seq_len % LOSS_CHUNKS == 0:
        cut = f"head and loss in {LOSS_CHUNKS} chunks of the sequence, so that logits are never whole"
        yield MemoryLever("loss", (LeverSetting({"loss_chunks": LOSS_CHUNKS}, cut),))
    if plan.api == "fsdp2" and plan.activation_offload is None and cluster.kind == "gpu":
        copy = "copy to CPU memory what is kept for backward, beside compute (OffloadActivations)"
        yield MemoryLever("activations", (LeverSetting({"activation_offload": "streams"}, copy),))
    deep = {
        name: None
        for name in ("forward_prefetch", "backward_prefetch")
        if type(getattr(plan, name)) is int and getattr(plan, name) > 1
    }
    yield MemoryLever("prefetch", (LeverSetting(deep, "prefetch one unit ahead, not several"),) if deep else ())
    if plan.grad_accum > 1 and plan.requires_gradient_sync is not True:
        sync = LeverSetting(
            {"requires_gradient_sync": True}, "reduce gradients in every micro-batch, so that no whole ones are kept"
        )
        yield MemoryLever("sync", (sync,))
    halves = [plan.micro_batch // 2**k for k in range(1, 20) if plan.micro_batch % 2**k == 0]
    yield MemoryLever("micro-batch", tuple(_smaller(plan, m) for m in halves or ([1] if plan.micro_batch > 1 else [])))
    if cluster.kind == "gpu" and plan.shard_size is None:  # of DDP with FSDP alone
        counts = [cluster.gpus * 2**k for k in range(1, MAX_DOUBLINGS + 1)]
        yield MemoryLever("gpus", tuple(LeverSetting({"gpus": n}, f"{n:,} GPUs") for n in counts))
    if not plan.cpu_offload and cluster.kind == "gpu":
        away = LeverSetting({"cpu_offload": True}, "keep shards, gradients and the optimizer in CPU memory")
        if not fsdp:
            away = LeverSetting(as_fsdp | away.set, f"FSDP, to {away.what}")
        yield MemoryLever("offload", (away,))


def _checkpointing(now: str | int | tuple[str, ...] | None) -> list[tuple[dict[str, Any], str]]:
    full = ({"activation_checkpointing": "full"}, "compute every block again in backward")
    if now is not None:
        return [] if now in ("full", 1) else [full]
    selective = {"activation_checkpointing": "selective"}
    return [(selective, "keep of each block only the outputs of attention and every other matmul"), full]


def _smaller(plan: Plan, micro_batch: int) -> LeverSetting:
    times = plan.micro_batch // micro_batch
    return LeverSetting(
        {"micro_batch": micro_batch, "grad_accum": plan.grad_accum * times},
        f"micro-batch {micro_batch}, {plan.grad_accum * times} of them per step",
    )


def _default(name: str) -> Any:
    return Plan.__dataclass_fields__[name].default


@seldom_collected()
def changes_that_fit(model: Model, cluster: Cluster, plan: Plan, **options: Any) -> list[Change]:
    """Find the changes with which the model fits the cluster, fastest first, as few at a time as will do.

    Args:
        options: of `simulate`.

    Returns:
        one for each lever that is enough alone; where none is, the pairs that are; where none is, the threes. Steps of
        more than `MAX_BLOCKS_TRIED` blocks (layers times micro-batches) are not tried.
    """
    known: dict[tuple[tuple[str, Any], ...], Simulation | None] = {}

    def tried(settings: tuple[LeverSetting, ...]) -> Simulation | None:
        """The simulation with some settings, if it fits."""
        together: dict[str, Any] = {}
        for setting in settings:
            together |= setting.set
        key = tuple(sorted(together.items(), key=lambda one: one[0]))
        if key not in known:
            known[key] = _simulate_if_fits(model, cluster, plan, together, options)
        return known[key]

    layers = _blocks(model)
    if layers * plan.grad_accum > MAX_BLOCKS_TRIED:  # no change has fewer
        return []
    all_levers = [
        lever._replace(
            settings=tuple(s for s in lever.settings if layers * s.set.get("grad_accum", 1) <= MAX_BLOCKS_TRIED)
        )
        for lever in levers(cluster, plan)
    ]
    all_levers = [lever for lever in all_levers if lever.settings]
    for together in (1, 2, 3):
        found = []
        for chosen in itertools.combinations(all_levers, together):
            if tried(tuple(lever.settings[-1] for lever in chosen)) is None and together > 1:
                continue  # not even the strongest of each
            for settings in sorted(itertools.product(*(lever.settings for lever in chosen)), key=_strength(chosen)):
                if (sim := tried(settings)) is not None:
                    found.append(_change(settings, sim))
                    break
        if found:
            return sorted(found, key=lambda change: -change.tokens_per_s_per_gpu)
    return []


@seldom_collected()
def changes_that_help(model: Model, now: Simulation, **options: Any) -> list[Change]:
    """Of what `diagnose` advises against what a step waits for, and of what shortens its compute, what makes training
    faster and fits, the best first.

    Args:
        now: the simulation of the model as it is.
        options: of `simulate`.

    Returns:
        at most `MOST_HELP`, each with at least `WORTH` times as many tokens a second as now. What does not fit as it is
        may with an allocator that grows its segments. Advice that no field of a plan stands for is not tried.
    """
    plan, why = now.plan, now.explain()
    advised: dict[str, dict[str, Any]] = {}  # once, though several culprits advise it
    for blame in why.culprits:
        if blame.idle_s < (WORTH - 1) * why.step_time_s:
            continue  # what all of the wait could save
        for tip in TIPS[blame.culprit]:
            what = tip.by_api.get(plan.api, "")
            if tip.change is None or what not in blame.advice:
                continue
            if (new := tip.change(plan, now.cluster)) not in advised.values():
                advised[what] = new
    for tip in BUSY:
        if tip.change and plan.api in tip.by_api and (new := tip.change(plan, now.cluster)) not in advised.values():
            advised[tip.by_api[plan.api]] = new
    found = []
    for what, advice in advised.items():
        new = {name: value for name, value in advice.items() if getattr(plan, name) != value}
        if not new or _blocks(model) * new.get("grad_accum", plan.grad_accum) > MAX_BLOCKS_TRIED:
            continue
        settings: tuple[LeverSetting, ...] = (LeverSetting(new, what),)
        sim = _simulate(model, now.cluster, plan, new, options)
        if (sim is None or sim.fit is not Fit.FITS) and now.cluster.kind == "gpu" and not plan.expandable_segments:
            grown = _simulate(model, now.cluster, plan, new | GROWN.set, options)
            if grown is not None and (sim is None or grown.fit is Fit.FITS):
                settings, sim = (*settings, GROWN), grown
        if sim is not None and sim.tokens_per_s_per_gpu >= WORTH * now.tokens_per_s_per_gpu:
            found.append(_change(settings, sim))
    return sorted(found, key=lambda change: -change.tokens_per_s_per_gpu)[:MOST_HELP]


def _blocks(model: Model) -> int:
    return model.n_layer + model.n_encoder_layer


def _strength(chosen: tuple[MemoryLever, ...]) -> Callable[[tuple[LeverSetting, ...]], tuple[int, int]]:
    """A sort key: mild combinations before strong ones, more GPUs last of all."""

    def strength(settings: tuple[LeverSetting, ...]) -> tuple[int, int]:
        places = {lever.name: lever.settings.index(s) for lever, s in zip(chosen, settings, strict=True)}
        return places.pop("gpus", 0), sum(places.values())

    return strength


def _simulate_if_fits(
    model: Model, cluster: Cluster, plan: Plan, new: dict[str, Any], options: dict[str, Any]
) -> Simulation | None:
    sim = _simulate(model, cluster, plan, new, options)
    return sim if sim is not None and sim.fit is Fit.FITS else None


def _simulate(
    model: Model, cluster: Cluster, plan: Plan, new: dict[str, Any], options: dict[str, Any]
) -> Simulation | None:
    """The simulation with new settings, if there is room for it, be it on the edge."""
    try:
        of_cluster = replace(cluster, **({"gpus": new["gpus"]} if "gpus" in new else {}))
        of_plan = {name: value for name, value in new.items() if name != "gpus"}
        changed = replace(plan, **of_plan)
        short = simulate(model, of_cluster, in_short(changed), **options)
        all_of_it = short.fit is Fit.DOES_NOT_FIT or in_short(changed) == changed
        sim = short if all_of_it else simulate(model, of_cluster, changed, **options)
        return sim if sim.fit is not Fit.DOES_NOT_FIT else None
    except ValueError:  # a change that this model or cluster does not take is no answer
        return None


def _change(settings: tuple[LeverSetting, ...], sim: Simulation) -> Change:
    together: dict[str, Any] = {}
    for setting in settings:
        together |= setting.set
    return Change(
        set=together, what="; ".join(setting.what for setting in settings), step_time_s=sim.step_time_s,
        tokens_per_s_per_gpu=sim.tokens_per_s_per_gpu, peak_memory_bytes=sim.peak_memory_bytes, fit=str(sim.fit),
    )  # fmt: skip
