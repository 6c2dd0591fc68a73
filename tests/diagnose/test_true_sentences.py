"""Sentences agree with the numbers of the same simulation, whatever was asked."""

import re

import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import Culprit
from fsdp_sim.engine import exposure, straggler
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import COLLECTIVES, Phase
from fsdp_sim.words import percent

B = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
NODE = Cluster("A100", gpus=8)


def said(plan: Plan, model: str = "gpt2-124m", cluster: Cluster = NODE) -> str:
    return str(simulate(model, cluster, plan).explain())


def test_the_time_of_an_offloaded_optimizer_is_the_cpus() -> None:
    plans = [Plan(cpu_offload=True, optimizer=name, **B) for name in ("sgd", "adamw")]
    sgd, adam = (simulate("gpt2-350m", NODE, plan) for plan in plans)
    why, less = adam.explain(), sgd.explain()
    more_s = why.optimizer_s - less.optimizer_s
    assert adam.exposure.compute_s == pytest.approx(sgd.exposure.compute_s)
    assert why.gains["compute"] == pytest.approx(less.gains["compute"])
    assert why.critical_s["CPU"] - less.critical_s["CPU"] == pytest.approx(more_s)
    assert why.twice_as_fast_cpu_s - less.twice_as_fast_cpu_s == pytest.approx(more_s / 2)
    assert next(b for b in why.culprits if b.culprit is Culprit.CPU_OPTIMIZER).idle_s == pytest.approx(why.optimizer_s)
    assert "a CPU twice as fast" in str(why)
    assert "CPU twice" not in said(Plan(**B)) + said(Plan(cpu_offload=True), cluster=Cluster("cpu", gpus=2))


@pytest.mark.parametrize(
    ("model", "cluster", "plan"),
    [
        ("gpt2-124m", Cluster("H100", gpus=8), Plan(seq_len=512, **B)),
        ("mistral-7b", Cluster("MI300X", gpus=24), Plan(seq_len=4096, fp8="tensorwise", fp8_all_gather=True, **B)),
        ("gpt2-124m", Cluster("H100", gpus=8), Plan(lora_rank=16, optimizer="muon", **B)),
    ],
    ids=["small kernels", "gathers end late too", "Muon's small matrices"],
)
def test_where_the_cpu_sets_the_pace_compute_is_busy_no_longer_than_beside_a_cpu_without_end(model, cluster, plan):
    """And what a faster network would not shorten is no wait for the network."""
    why = simulate(model, cluster, plan).explain()
    idle_s = {blame.culprit: blame.idle_s for blame in why.culprits}
    free = exposure(why.run.scaled(cpu=1e-3))

    assert why.critical_s["CPU"] > 0.9 * why.step_time_s
    assert 0.8 * free.compute_s < why.compute_s <= free.compute_s
    assert idle_s[Culprit.LAUNCHES] + idle_s[Culprit.CPU_LATE] == pytest.approx(
        why.step_time_s - why.compute_s, rel=0.05
    )


def test_what_an_optimizer_sends_is_no_reduction_of_gradients() -> None:
    plans = [
        Plan(micro_batch=16, seq_len=512, **more, **B) for more in ({}, {"clip_grad_norm": True}, {"optimizer": "muon"})
    ]
    nodes = Cluster("A100", gpus=16)  # where a collective takes longer than the CPU takes to issue it
    plain, clipped, muon = (simulate("bert-base", nodes, plan) for plan in plans)
    idle_s = [{blame.culprit: blame.idle_s for blame in sim.explain().culprits} for sim in (plain, clipped, muon)]

    for of_plan, sim in zip(idle_s, (plain, clipped, muon), strict=True):
        own_s = sum(e.duration_s for e in sim.timeline.ops if e.op in COLLECTIVES and e.phase is Phase.OPTIMIZER)
        assert of_plan.get(Culprit.IN_OPTIMIZER, 0.0) == pytest.approx(own_s, rel=0.02)
        assert of_plan.get(Culprit.LAST_REDUCTIONS, 0.0) <= idle_s[0][Culprit.LAST_REDUCTIONS]
    assert idle_s[1][Culprit.LAST_REDUCTIONS] == pytest.approx(idle_s[0][Culprit.LAST_REDUCTIONS])


def test_what_passes_between_steps_is_named_once() -> None:
    script = B | {"stack": "training-script"}
    assert "for data, clipping and logging" in said(Plan(**script))
    assert "for data and logging" in said(Plan(clip_grad_norm=True, **script))
    assert "for data, checkpoints, clipping and logging" in said(Plan(save_every=10, storage_gb_per_s=1.0, **script))


def test_reductions_take_longer_than_backward_only_where_most_are_waited_for() -> None:
    def buffer(gbps: float) -> tuple[int, str]:
        cluster = Cluster("A100", gpus=16, bandwidth_gbps=gbps)
        why = simulate("gpt2-350m", cluster, Plan(micro_batch=4, **B)).explain().diagnosis
        (blame,) = [b for b in why.culprits if b.culprit is Culprit.RS_BUFFER]
        return blame.times, blame.sentence

    (once, hidden), (often, exposed) = buffer(200), buffer(10)
    assert once < 12 <= often
    assert "longer than backward hides" not in hidden
    assert "longer than backward hides" in exposed


def test_units_are_counted_with_their_share_of_the_step() -> None:
    (sentence,) = [line for line in said(Plan(api="ddp", micro_batch=4)).splitlines() if "buckets on it" in line]
    shares = [float(share) for share in re.findall(r"; ([\d.]+)% of the step", sentence)]
    assert len(shares) >= 2
    assert sum(shares) <= 100.5
    assert min(shares) < 5 < max(shares)


def test_messages_are_small_for_so_many_ranks() -> None:
    text = said(Plan(param_dtype="bf16", seq_len=128), cluster=Cluster("A100", gpus=256, latency_us=500))
    assert "For a group of 256 ranks messages are so small" in text


def test_what_is_no_unit_is_not_counted_as_one() -> None:
    muon, ddp = said(Plan(optimizer="muon", **B)), said(Plan(api="ddp", micro_batch=4))
    assert "Of the 13 units and Muon's 48 matrices on it" in muon
    sim = simulate("gpt2-124m", NODE, Plan(api="ddp", micro_batch=4))
    buckets = {i.unit for i in sim.program.ops if i.unit.startswith("bucket")}
    assert f"Of the {len(sim.explain().bound) - len(buckets)} units and {len(buckets)} buckets on it" in ddp


def test_a_cpu_that_launches_kernels_for_a_device_that_is_done_is_no_host_sync() -> None:
    node = Cluster("B200", gpus=8)
    assert "issued more" in said(Plan(api="ddp", micro_batch=2, activation_checkpointing="selective"), cluster=node)
    assert "host sync" not in said(Plan(api="ddp", micro_batch=2, activation_checkpointing="selective"), cluster=node)
    waits = Plan(micro_batch=4, activation_offload="save_on_cpu", compile=True, **B)  # for each copy, in save_on_cpu
    assert "host sync" in said(waits, cluster=Cluster("H200", gpus=1))


@pytest.mark.parametrize("async_save", [False, True])
def test_what_checkpoints_take_is_part_of_what_faster_hardware_would_save(async_save: bool) -> None:
    """Where the storage is still writing when the next is due, it takes up what anything else saves."""
    plan = Plan(micro_batch=32, save_every=2, storage_gb_per_s=0.1, async_save=async_save, **B)
    sim = simulate("gpt2-124m", NODE, plan)
    why = sim.explain()
    faster_s = sim.run.step_time_s() - why.faster["compute"]().step_time_s()

    assert faster_s > 0.01 * sim.step_time_s
    assert why.gains["compute"] == pytest.approx(0.0 if async_save else faster_s)
    assert ("waits for the storage" in str(why)) is async_save
    assert (f"({percent(faster_s, sim.step_time_s)})" in why.gains_sentence) is not async_save
    assert "logging" not in str(why)  # no loop around the step is assumed


def test_words_agree_with_how_many_there_are() -> None:
    slow = Cluster("A100", gpus=16, inter="100GbE")
    text = said(Plan(api="fsdp1", forward_prefetch=True, micro_batch=8, **B), cluster=slow)
    assert "before ALL_GATHER(root), ALL_GATHER(layers.0) arrive, and" in text
    assert re.search(r"in 1,\d{3} operations", said(Plan(grad_accum=64, seq_len=64, **B)))


def test_a_rank_that_all_wait_for_is_named_with_what_it_costs() -> None:
    def uneven(factor: float) -> Simulation:
        plan = Plan(micro_batch=8, **B)
        return simulate("gpt2-124m", NODE, plan, skew=lambda s, n: straggler(s, n, rank=5, factor=factor))

    slow, even = uneven(1.5), uneven(1.0)
    (sentence,) = [line for line in str(slow.explain()).splitlines() if "is the straggler" in line]
    shorter_ms = float(re.search(r"make the step ([\d.]+) ms", sentence)[1])

    assert "These are the times of rank 5, on which the step ends." in str(slow.explain())
    assert sentence.startswith("Rank 5 is")
    assert shorter_ms == pytest.approx(1e3 * (slow.step_time_s - even.step_time_s), rel=0.1)
    assert "straggler" not in str(even.explain())
