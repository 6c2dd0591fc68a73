"""``python -m tests.bench.bench_tune [NAME...]``: what `tune`'s search finds beside a simulation of every plan.

Regret is how much longer the plan found takes than the best of all that fit. Models from 124M to 405B, 1 to 4,096 GPUs,
fast and slow networks, cards with little memory, experts. Takes an hour or more; each case says so far.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.explore import space_of
from fsdp_sim.explore.search import Outcome, Search

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
VARY = (
    "api", "shard_size", "reshard_after_forward", "activation_checkpointing", "micro_batch", "cpu_offload", "compile",
    "forward_prefetch", "requires_gradient_sync",
)  # fmt: skip


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


def main(names: list[str]) -> None:
    print(f"{'':26} {'plans':>6} {'fit':>6} {'looks':>6} {'share':>6} {'regret':>8}")
    for name in names or CASES:
        model, cluster, start = CASES[name]
        space = space_of(cluster, start, vary=VARY)
        outcomes: dict[Plan, Outcome | None] = {}
        limit = 0.0
        for point in itertools.product(*map(range, space.sizes)):
            plan = space.plan(point)
            if plan is not None and plan not in outcomes:
                try:
                    sim = simulate(model, cluster, plan)
                    outcomes[plan] = Outcome(1.0 / sim.tokens_per_s_per_gpu, sim.peak_memory_bytes)
                    limit = 0.9 * sim.memory_limit_bytes
                except ValueError:
                    outcomes[plan] = None
        search = Search(space, outcomes.get)
        search.run(limit)
        best = search.best(limit)
        found = outcomes[best] if best is not None else None
        fitting = [one.seconds for one in outcomes.values() if one is not None and one.bytes <= limit]
        if not fitting:
            least = min(one.bytes for one in outcomes.values() if one is not None)
            end = f"none fits; memory of the nearest {found.bytes / least - 1:+.2%}" if found else "no plan"
        else:
            assert found is not None
            end = f"{found.seconds / min(fitting) - 1:8.3%}" if found.bytes <= limit else "   missed"
        seen = len(search.seen)
        print(f"{name:26} {len(outcomes):6,} {len(fitting):6,} {seen:6} {seen / len(outcomes):6.1%} {end}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
