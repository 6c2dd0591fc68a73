"""Timelines that were measured: the mini-FSDP on gloo ranks, torch's own FSDP under its profiler, traces of GPUs."""

import gzip
import json
import random
from itertools import cycle
from pathlib import Path

import pytest
from msgspec import structs

from fsdp_sim import Cluster, Plan, Timeline, simulate
from fsdp_sim.diagnose import Culprit, diagnose
from fsdp_sim.diagnose.look import look
from fsdp_sim.timeline.files import read_timeline
from tests.diagnose.scenarios import idle_by_culprit
from tests.timeline.kineto.gpu_trace import kineto_trace

PLANS = [
    {},
    {"param_dtype": "bf16"},
    {"forward_prefetch": 1},
    {"api": "fsdp1"},
    {"shard_size": 4},
    {"grad_accum": 2},
    {"separate_reduce_scatter_group": True, "reduce_scatter_max_input_buffers": 2},
]
MORE_PLANS = [*PLANS, {"cpu_offload": True}, {"unshard_async_op": True}, {"api": "ddp"}, {"api": "zero2"}]
CLUSTERS = [Cluster("H100-SXM-80GB", gpus=8), Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=20)]


def agreement(one: dict[Culprit, float], other: dict[Culprit, float]) -> float:
    """The part of the idle seconds that has the same culprit in both."""
    return sum(min(seconds, other.get(culprit, 0.0)) for culprit, seconds in one.items()) / sum(one.values())


@pytest.mark.parametrize(("plan", "cluster"), list(zip(PLANS[:5], cycle(CLUSTERS), strict=False)), ids=str)
def test_a_profilers_trace_of_a_step_has_the_culprits_of_the_step(plan, cluster, tmp_path):
    sim = simulate("gpt2-124m", cluster, Plan(micro_batch=4, **plan))
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(kineto_trace(sim.timeline, api=sim.plan.api)).encode(), 1))
    read = read_timeline(path)

    # of the trace's: it begins with the first kernel, the prediction with the CPU that issues it
    assert agreement(idle_by_culprit(read), idle_by_culprit(sim.timeline)) > 0.98
    found = diagnose(read)
    assert found.exposed_s == pytest.approx(sim.exposed_comm_s, rel=0.01)
    assert (found.api, found.device) == (sim.plan.api, "gpu")


def noisy(timeline: Timeline, us: float) -> Timeline:
    """As a profiler sees a device: everything starts some microseconds late, and nothing says what waited for what."""
    rng = random.Random(0)
    events = []
    for e in timeline.events:
        start_s = e.start_s + rng.uniform(0.3, us) * 1e-6
        end_s = max(start_s, e.end_s + rng.uniform(0.0, 0.3 * us) * 1e-6)
        events.append(structs.replace(e, start_s=start_s, end_s=end_s, issue_s=e.issue_s - 4e-6, waits_on=()))
    return Timeline(structs.replace(timeline.header, clock="measured"), events)


@pytest.mark.parametrize(("plan", "cluster"), list(zip(MORE_PLANS, cycle(CLUSTERS), strict=False)), ids=str)
def test_microseconds_of_noise_and_missing_waits_change_little(plan, cluster):
    timeline = simulate("gpt2-1.5b", cluster, Plan(micro_batch=2, **plan)).timeline

    assert agreement(idle_by_culprit(timeline), idle_by_culprit(noisy(timeline, 4.0))) > 0.9


@pytest.mark.parametrize("forward_prefetch", [None, 1])
def test_the_mini_fsdp_on_two_ranks(forward_prefetch):
    """Without prefetch a block's all-gather is issued when it is needed; with it, before the block before computes.

    A busy machine adds waits for the other rank, but none of the other kind.
    """
    from labs.experiments.prefetch import Experiment, training_only

    results = Experiment(world_size=2, batch=8).run(5, forward_prefetch=forward_prefetch, progress=False)
    timeline = training_only(results.timeline)
    after_the_first = ("layers.1", "layers.2", "layers.3", "layers.4")
    waits = [
        wait
        for step in timeline.steps[1:]
        for wait in look(timeline, step=step).idle
        if wait.on and (wait.on.op, wait.on.phase) == ("ALL_GATHER", "forward") and wait.on.unit in after_the_first
    ]
    late = [wait for wait in waits if wait.culprit is Culprit.COMPUTING_THREAD]
    if forward_prefetch is None:
        assert len(late) >= 4
        assert {wait.culprit for wait in waits} <= {Culprit.COMPUTING_THREAD, Culprit.SLOW_RANK}
    else:
        assert len(late) <= 4

    found = diagnose(timeline)
    assert (found.api, found.device, found.ranks) == ("fsdp2", "cpu", [0, 1])
    gathers = [row for row in found.collectives if row.op == "ALL_GATHER" and row.unit.startswith("layers")]
    assert all(0 < row.bus_gbps < 0.17 for row in gathers), "the slow network carries 0.16 Gbit/s"


def profiled(api: str, folder: str) -> None:
    """What a rank runs: three steps of torch's own FSDP under torch's profiler."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    if api == "fsdp2":
        for block in model:
            fully_shard(block)
        fully_shard(model)
    else:
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_torchs_own_fsdp_on_gloo_never_overlaps_and_that_is_said(api, tmp_path):
    from fsdp_sim.ranks import run

    run(profiled, 2, api, str(tmp_path), progress=False)
    timeline = read_timeline(sorted(Path(tmp_path).iterdir()))

    found = diagnose(timeline)
    assert (found.api, found.device, found.ranks) == (api, "cpu", [0, 1])
    assert found.overlap == pytest.approx(0.0, abs=0.02)
    assert {b.culprit for b in found.culprits} <= {Culprit.SYNCHRONOUS, Culprit.SLOW_RANK, Culprit.HOST}
    assert found.culprits
    for blame in found.culprits:  # on a busy machine a late rank may be the culprit of every wait
        assert (blame.culprit is Culprit.SYNCHRONOUS) == ("On GPUs the same program overlaps" in blame.sentence)
