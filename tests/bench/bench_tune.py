"""``python -m tests.bench.bench_tune [NAME...]``: `tune` beside an exhaustive search, as lines of a table.

Regret is how much longer the plan found takes than the best of all that fit. A plan is simulated unless what it
computes, or what one lane communicates, already takes longer than the plan found: no order of operations makes it
better. Models from 124M to 405B, 1 to 4,096 GPUs, fast and slow networks, cards with little memory, experts; `OTHERS`
were added when the search was done, and nothing was changed for them.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from fsdp_sim import Cluster, Model, Plan, simulate, tune
from fsdp_sim.cost.transformer import NOT_COMPUTED
from fsdp_sim.explore import Space
from fsdp_sim.schedule import state_bytes
from fsdp_sim.schedule.build import NOT_ISSUED
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.timeline import COLLECTIVES, Lane, Op

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
VARY: dict[str, tuple[Any, ...] | None] = {
    "api": None, "shard_size": None, "reshard_after_forward": None,
    "activation_checkpointing": (None, "selective", 2, "full"), "micro_batch": None, "cpu_offload": None,
    "compile": None, "forward_prefetch": None, "requires_gradient_sync": None,
}  # fmt: skip
KEPT = VARY | {"activation_checkpointing": None, "activation_offload": None}  # by operator too, and on the CPU
WORK = (Op.FWD, Op.BWD, Op.RECOMPUTE)


def _case(model: str, gpu: str, gpus: int, sequences: int, seq_len: int, **cluster: Any) -> tuple[Model, Cluster, Plan]:
    plan = Plan(grad_accum=sequences, seq_len=seq_len, **BF16)
    return Model.preset(model), Cluster(gpu, gpus=gpus, **cluster), plan


CASES = {
    "124M, 1 A100": _case("gpt2-124m", "A100-SXM-40GB", 1, 32, 1024),
    "124M, 8 A100": _case("gpt2-124m", "A100-SXM-40GB", 8, 32, 1024),
    "350M, 4 x 4090": _case("gpt2-350m", "4090", 4, 16, 1024),
    "774M, 8 L4": _case("gpt2-774m", "L4", 8, 16, 1024),
    "1.5B, 2 x 4090": _case("gpt2-1.5b", "4090", 2, 16, 1024),
    "1.5B, 64 A100, 25 Gbit/s": _case("gpt2-1.5b", "A100-SXM-40GB", 64, 8, 1024, bandwidth_gbps=25),
    "7B, 8 A100-80": _case("llama2-7b", "A100-SXM-80GB", 8, 8, 2048),
    "7B, 32 A100, 25 Gbit/s": _case("llama2-7b", "A100-SXM-40GB", 32, 8, 2048, bandwidth_gbps=25),
    "7B, 8 x 4090": _case("llama2-7b", "4090", 8, 4, 2048),
    "8B, 8 H100": _case("llama3-8b", "H100", 8, 8, 4096),
    "8B, 64 H100": _case("llama3-8b", "H100", 64, 4, 8192),
    "8B, 512 H100": _case("llama3-8b", "H100", 512, 4, 8192),
    "8B, 64 H200": _case("llama3-8b", "H200", 64, 8, 8192),
    "13B, 16 A100-80": _case("llama2-13b", "A100-SXM-80GB", 16, 8, 4096),
    "47B of experts, 64 H100": _case("mixtral-8x7b", "H100", 64, 4, 4096),
    "70B, 64 H100": _case("llama3-70b", "H100", 64, 4, 4096),
    "70B, 256 H100": _case("llama3-70b", "H100", 256, 4, 8192),
    "70B, 512 H100, 100 Gbit/s": _case("llama3-70b", "H100", 512, 4, 8192, bandwidth_gbps=100),
    "405B, 1024 H100": _case("llama3-405b", "H100", 1024, 2, 8192),
    "405B, 4096 H100": _case("llama3-405b", "H100", 4096, 2, 8192),
}


OTHERS = {
    "Qwen3 32B, 32 H200": _case("qwen3-32b", "H200", 32, 4, 8192),
    "Gemma 3 27B, 16 MI300X": _case("gemma3-27b", "MI300X", 16, 8, 4096),
    "Mistral 7B, 8 L40S": _case("mistral-7b", "L40S", 8, 8, 4096),
    "GPT-OSS 20B, 16 A100-80": _case("gpt-oss-20b", "A100-SXM-80GB", 16, 8, 4096),
    "T5 11B, 24 A100, 50 Gbit/s": _case("t5-11b", "A100-SXM-40GB", 24, 4, 512, bandwidth_gbps=50),
}


ORDERS = frozenset({"forward_prefetch", "backward_prefetch"})  # change when something is communicated, not what
COMPUTE, COLLECTIVE, STATES = (
    NOT_COMPUTED - {"grad_accum"},
    NOT_ISSUED | ORDERS | {"activation_checkpointing"},
    NOT_ISSUED | ORDERS | {"activation_checkpointing", "reshard_after_forward", "grad_accum", "requires_gradient_sync"},
)  # fields of a plan that each of these does not depend on


class Bounds:
    """What a plan takes at least, known of plans before it: all that the compute stream does one after the other, or
    all collectives of a kind; and the bytes of parameters, optimizer states and of what forward keeps.

    While a collective is in flight, compute goes slower by an excess x, or stands still. With the excesses of others in
    flight, one of each kind at most, it is slower by X; so of the d seconds that one takes compute loses at least
    d x / (1 + X), and all of them where nothing can be computed: before the first forward, after the last backward.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def step_s(self, sim: Simulation) -> float:
        computes, communicates = _key(sim.plan, COMPUTE), _key(sim.plan, COLLECTIVE)
        if computes not in self._known or communicates not in self._known:
            lanes: dict[Any, float] = defaultdict(float)
            for i in sim.program.ops:
                lane = "work" if i.op in WORK else i.op if i.op in COLLECTIVES else i.lane
                if i.op not in (Op.ACT_D2H, Op.ACT_H2D):  # which would depend on more
                    lanes[lane] += sim.costs.seconds(i)
            beside_s = lanes.pop(Lane.COMPUTE, 0.0)  # copies and the optimizer
            self._known[computes] = lanes.pop("work")
            lost_s = 0.0 if sim.plan.activation_offload else _lost_s(sim, beside_s)
            self._known[communicates] = beside_s + lost_s, max(lanes.values(), default=0.0)
        beside_s, comm_s = self._known[communicates]
        return max(self._known[computes] + beside_s, comm_s) + sim.between_steps_s

    def bytes(self, sim: Simulation) -> int:
        lasts, keeps = _key(sim.plan, STATES), ("kept", *_key(sim.plan, COMPUTE | {"grad_accum"}))
        if lasts not in self._known:
            self._known[lasts] = sum(state_bytes(sim.workload.units, sim.plan, sim.cluster.gpus).values())
        if keeps not in self._known:
            again, back = sim.program.segments_of(Op.RECOMPUTE), sim.program.segments_of(Op.BWD)
            away = sim.program.segments_of(Op.ACT_D2H)
            kept = [
                sim.workload.work[one].output_bytes if one in again else sim.workload.work[one].saved_bytes
                for one in back
                if one not in away
            ]
            self._known[keeps] = sum(kept)
        return self._known[lasts] + self._known[keeps]


def _key(plan: Plan, without: frozenset[str]) -> tuple[Any, ...]:
    values = [getattr(plan, f.name) for f in fields(Plan) if f.name not in without]
    return without, *values, *map(type, values)  # True is not 1


def _lost_s(sim: Simulation, beside_s: float) -> float:
    """What collectives keep compute from doing, at least. Some are beside copies, which they slow less."""
    seconds, ops, slowdown = sim.costs.seconds, sim.program.ops, sim.costs.collectives.slowdown
    first = next(i for i in ops if i.op is Op.FWD)
    copies = {i.op: i for i in ops if i.lane is Lane.COMPUTE and i.op not in WORK}.values()
    sent = [i for i in ops if i.op in COLLECTIVES and i.group_size > 1]
    excess = {i: slowdown(first, i) - 1.0 for i in sent}
    least = {i: min((slowdown(copy, i) for copy in copies), default=1.0) - 1.0 for i in sent}
    most = {i: max((slowdown(copy, i) for copy in copies), default=1.0) - 1.0 for i in sent}
    kinds = [[i for i in sent if i.op is op] for op in {i.op for i in sent}]
    together = sum(max(excess[i] for i in kind) for kind in kinds)
    beside_s *= 1.0 + sum(max(most[i] for i in kind) for kind in kinds)
    beside_s *= sum(max(excess[i] - least[i] for i in kind) for kind in kinds)
    lost_s = (sum(seconds(i) * excess[i] for i in sent) - beside_s) / (1.0 + together)
    alone = [i for i in ops[: ops.index(first)] if i.op is Op.ALL_GATHER][:1]
    alone += [i for op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE) for i in [i for i in sent if i.op is op][-1:]]
    return max(0.0, lost_s) + sum(seconds(i) * (1.0 - excess[i] / (1.0 + together)) for i in alone)


def plans_of(space: Space) -> list[Plan]:
    """Every plan once; those that issue the same follow one another, so that they share their program."""
    plans = {plan for p in itertools.product(*map(range, space.sizes)) if (plan := space.plan(p)) is not None}
    return sorted(plans, key=lambda plan: repr((_key(plan, NOT_ISSUED)[1:], plan)))


def exhaustive(model: Model, cluster: Cluster, plans: Iterable[Plan], best: Simulation) -> tuple[Simulation, int]:
    """The fastest plan of all that fit, given one that does; and how many had to be simulated to know."""
    bounds, simulated = Bounds(), 0
    for plan in plans:
        try:
            sim = simulate(model, cluster, plan)
            if bounds.bytes(sim) > sim.memory_limit_bytes or (least_s := bounds.step_s(sim)) >= best.step_time_s:
                continue
            simulated += 1
            if sim.peak_memory_bytes > sim.memory_limit_bytes:
                continue
        except ValueError:  # the model or the cluster does not take such a plan
            continue
        assert sim.step_time_s >= least_s * (1 - 1e-9), plan
        assert sim.peak_memory_bytes >= bounds.bytes(sim), plan
        if sim.step_time_s < best.step_time_s and sim.fit is Fit.FITS:
            best = sim
    return best, simulated


SMALL = ("124M, 1 A100", "350M, 4 x 4090", "1.5B, 2 x 4090", "7B, 8 x 4090", "8B, 8 H100")
OF_KEPT = {f"{name}, all that is kept": CASES[name] for name in SMALL}
"""With `KEPT` in place of `VARY`: of few GPUs there are few plans without what `tune` tries anyway."""


def line(name: str, model: Model, cluster: Cluster, start: Plan) -> str:
    found = tune(model, cluster, start, vary=KEPT if name in OF_KEPT else VARY)
    plans = plans_of(found.space)
    share = f"{name:26} {len(plans):6,} {found.simulations:6} {found.simulations / len(plans):6.1%}"
    if found.sim is None:
        return f"{share}  none fits"
    best, simulated = exhaustive(model, cluster, plans, found.sim)
    return f"{share} {simulated:9,} {found.sim.step_time_s / best.step_time_s - 1:8.3%}"


def main(names: list[str]) -> None:
    print(f"{'':26} {'plans':>6} {'tune':>6} {'share':>6} {'simulated':>9} {'regret':>8}")
    for name, case in (CASES | OTHERS | OF_KEPT).items():
        if not names or name in names:
            print(line(name, *case), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
