"""Step times predicted from a calibrated machine, beside steps that are really taken."""

import dataclasses

import pytest

from fsdp_sim.ranks import Network
from fsdp_sim.spec import Cluster, gpu
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments import memory
from labs.experiments.calibrated_times import ROUNDS, STEP, STEPS, _steps, calibrated_rows, step_times_s
from labs.measure.prediction import predict_calibrated

SMALL = TrainConfig(n_layer=2, seq_len=16, global_batch=4)
PART = dataclasses.replace(gpu("cpu"), fp32_flops=8e10, launch_s=3e-5, backward_launch_s=1e-5, collective_s=2e-3)
CLUSTER = Cluster(PART, gpus=2)


def settings(**changed):
    return {api: dataclasses.replace(SMALL, api=api, **changed) for api in ("fsdp2", "ddp")}


def test_each_setting_is_predicted_and_timed():
    asked = settings()
    rows = calibrated_rows(asked, 2, CLUSTER)

    assert [(row.name, row.quantity, row.unit) for row in rows] == [(name, STEP, "ms") for name in asked]
    for row, config in zip(rows, asked.values(), strict=True):
        place = RankPlace(0, 2, 0, 2, torchrun=True)
        assert row.predicted == 1e3 * predict_calibrated(config, config.model_config, place, CLUSTER).step_time_s
        assert row.measured > 0


def test_on_a_slow_network_a_step_takes_at_least_the_wires_time():
    network = Network(bandwidth_gbps=0.5, latency_us=1000)
    params_bytes = 4 * 250_000  # about; all gathered at least once, and the gradients reduced
    wire_s = 2 * network.seconds("all_gather", params_bytes, 2)
    assert step_times_s({"fsdp2": settings()["fsdp2"]}, 2, network)["fsdp2"] > wire_s


@pytest.mark.tail  # the lab's notebook runs it too
def test_the_first_step_of_a_round_does_not_count():
    from fsdp_sim.ranks import run

    (times,) = run(_steps, 1, [dataclasses.replace(SMALL, api="single")], show_output=False, progress=False)[0]
    assert len(times) == ROUNDS * STEPS


def test_a_file_for_another_number_of_ranks_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="--ranks 4"):
        calibrated_rows(settings(), 4, CLUSTER)


@pytest.mark.tail  # the lab's notebook runs it too
def test_lab_2_takes_the_file(tmp_path):
    CLUSTER.to_file(tmp_path / "here.toml")
    asked = memory.settings(dataclasses.replace(SMALL, device="cpu"), 2, 2)
    named = memory.timed(asked, 2)

    assert memory.BASE in named
    assert "wrap=root" in named
    left_out = {"param_dtype=bf16", "activation_checkpointing=full", "cpu_offload=True", "optimizer=sgd", "4 ranks"}
    assert left_out < set(asked)
    assert not left_out & set(named)
    with pytest.raises(ValueError, match="the cluster has 2 ranks"):
        memory.run(ranks=3, rows=2, seq_len=16, cluster=tmp_path / "here.toml")
