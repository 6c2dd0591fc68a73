"""Sentences agree with the numbers of the same simulation, whatever was asked."""

import re

import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import Culprit

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
    (sentence,) = [line for line in said(Plan(api="ddp", micro_batch=4)).splitlines() if "units on it" in line]
    shares = [float(share) for share in re.findall(r"; ([\d.]+)% of the step", sentence)]
    assert len(shares) >= 2
    assert sum(shares) <= 100.5
    assert min(shares) < 5 < max(shares)


def test_messages_are_small_for_so_many_ranks() -> None:
    text = said(Plan(param_dtype="bf16", seq_len=128), cluster=Cluster("A100", gpus=256, latency_us=500))
    assert "For a group of 256 ranks messages are so small" in text
