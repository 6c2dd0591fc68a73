"""An interval widens with what is not known of a request."""

import math

import pytest

from fsdp_sim.cost.intervals import Z80, Shares, Spread, belongs_to, deviation, fitted_spread, interval_s
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.spec.gpus import gpu

H100 = Cluster("H100", gpus=8)
PLAN = {"param_dtype": "bf16", "micro_batch": 1, "seq_len": 2048}


def test_it_lies_around_the_step_time_and_is_printed() -> None:
    sim = simulate("llama2-7b", H100, Plan(**PLAN))
    low, high = sim.step_time_interval_s

    assert low < sim.step_time_s < high
    assert low * high == pytest.approx(sim.step_time_s**2)
    assert f"80%: {low * 1e3:.1f} to {high * 1e3:.1f} ms" in repr(sim)


def test_it_is_that_of_the_stack_and_of_the_gpu() -> None:
    def width(stack: str = "plain", name: str = "H100") -> float:
        low, high = interval_s(1.0, stack, Cluster(name, gpus=8), Shares())
        return high / low

    assert width("llm-foundry") < width("torchtitan") == width("hf-trainer") < width(name="B200")
    assert [belongs_to("plain", gpu(name)) for name in ("A100", "H200", "MI300X", "RTX-3090")] == [
        "other_stacks", "other_stacks", "other_gpus", "other_gpus",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "shares"),
    [
        (H100, Shares(waiting=0.5)),
        (H100, Shares(between=0.5)),
        (H100, Shares(gaps=0.5)),
        (Cluster("H100", gpus=4096), Shares()),
    ],
)
def test_it_widens_with_waiting_between_steps_with_gaps_and_with_nodes(cluster: Cluster, shares: Shares) -> None:
    spread = Spread({"other_stacks": 0.1}, waiting=0.2, between=0.4, gaps=0.3, doubling=0.01)

    found = deviation(spread, "other_stacks", cluster, shares)

    assert found > 0.1 == deviation(spread, "other_stacks", H100, Shares())
    parts = [0.1, 0.2 * shares.waiting, 0.4 * shares.between, 0.3 * shares.gaps, 0.01 * math.log2(cluster.nodes)]
    assert found == pytest.approx(math.hypot(*parts))


def test_small_models_of_other_stacks_are_less_certain() -> None:
    """What a kernel loses beside its work is known of llm-foundry's runs alone."""

    def width(model: str, stack: str) -> float:
        low, high = simulate(
            model, H100, Plan(stack=stack, param_dtype="bf16", micro_batch=8, seq_len=1024)
        ).step_time_interval_s
        return high / low

    assert width("gpt2-124m", "hf-trainer") > width("llama2-7b", "hf-trainer")
    assert width("gpt2-124m", "plain") > width("llama2-7b", "plain")


def test_a_slow_network_is_less_certain() -> None:
    def width(inter: str) -> float:
        low, high = simulate("llama2-7b", Cluster("H100", gpus=16, inter=inter), Plan(**PLAN)).step_time_interval_s
        return high / low

    assert width("10 Gb/s per node") > width("3200 Gb/s per node")


def test_the_file_holds_every_kind_of_prediction() -> None:
    assert set(fitted_spread().residual) == {"llm-foundry", "other_stacks", "other_gpus"}
    assert math.exp(Z80 * fitted_spread().residual["llm-foundry"]) < 1.05
