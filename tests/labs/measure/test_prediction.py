"""The simulator plays the pieces of a step in torch's order: what it says follows from what each of them takes."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from fsdp_sim.measure import calibrate
from fsdp_sim.ranks import Network, run
from fsdp_sim.spec import Cluster, gpu
from fsdp_sim.timeline import COLLECTIVES, Op
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.data.random_batch import random_batch
from labs.loop.optimizer import make_optimizer
from labs.loop.step import train_step
from labs.measure.piece_times import Pieces
from labs.measure.prediction import predict, predict_calibrated
from labs.measure.simulated import simulated
from labs.model import empty
from labs.wrapping import wrap

CPU = torch.device("cpu")
SMALL = {"n_layer": 2, "seq_len": 32, "global_batch": 4}


def place(ranks):
    return RankPlace(0, ranks, 0, ranks, torchrun=True)


def one_second_each(config, ranks, **changed):
    """Pieces that take a second each, whatever the model."""
    simulation = simulated(config, config.model_config, place(ranks), CPU)
    pieces = {(i.op, i.unit): np.ones(ranks) for i in simulation.program.ops}
    return Pieces(({**pieces, **changed},), rest_s=0.25, wall_s=1.0)


class TestPlayed:
    def test_a_step_is_its_pieces_in_torchs_order_and_the_rest(self):
        config = TrainConfig(api="fsdp2", **SMALL, reshard_after_forward=False)
        pieces = one_second_each(config, 2)
        (seconds,) = pieces.of_steps
        for op, unit in seconds:
            if op not in (Op.FWD, Op.BWD, Op.OPTIM):
                seconds[op, unit] = np.zeros(2)
        found = predict(config, config.model_config, place(2), CPU, pieces)
        # embed, 2 blocks and head, each forward and backward, and the optimizer
        assert found.step_time_s == pytest.approx(4 + 4 + 1 + 0.25)
        assert found.exposed_comm_s == pytest.approx(0.0, abs=1e-9)

    def test_a_piece_that_happens_twice_is_divided(self):
        config = TrainConfig(api="fsdp2", **SMALL)
        pieces = one_second_each(config, 2)
        (seconds,) = pieces.of_steps
        for piece in seconds:
            seconds[piece] = np.ones(2) if piece == (Op.ALL_GATHER, "layers.1") else np.zeros(2)
        found = predict(config, config.model_config, place(2), CPU, pieces)
        assert found.step_time_s == pytest.approx(1.25)  # half a second in forward, half in backward
        assert found.exposed_comm_s == pytest.approx(1.0)

    def test_the_slowest_rank_paces_the_others(self):
        config = TrainConfig(api="fsdp2", **SMALL)
        pieces = one_second_each(config, 2)
        (seconds,) = pieces.of_steps
        for op, unit in seconds:
            seconds[op, unit] = np.array([1.0, 3.0]) if op is Op.BWD else np.zeros(2)
        found = predict(config, config.model_config, place(2), CPU, pieces)
        assert found.step_time_s == pytest.approx(4 * 3 + 0.25)

    def test_accumulation_divides_what_was_timed_over_all_micro_batches(self):
        config = TrainConfig(api="ddp", **SMALL, micro_batch=1)
        pieces = {(Op.FWD, ""): np.ones(2), (Op.BWD, ""): np.full(2, 2.0), (Op.OPTIM, ""): np.full(2, 0.5)}
        simulation = simulated(config, config.model_config, place(2), CPU)
        buckets = {(i.op, i.unit): np.zeros(2) for i in simulation.program.ops if i.op is Op.ALL_REDUCE}
        found = predict(config, config.model_config, place(2), CPU, Pieces((pieces | buckets,), 0.0, 1.0))
        assert found.step_time_s == pytest.approx(3.5)

    def test_more_ranks_than_this_machine_has_are_like_those_it_has(self):
        config = TrainConfig(api="fsdp2", **SMALL)
        two_machines = RankPlace(0, 4, 0, 2, torchrun=True)
        found = predict(config, config.model_config, two_machines, CPU, one_second_each(config, 2))
        assert "The network to other machines was not measured" in found.sentences[0]

    def test_a_piece_that_was_not_timed_is_named(self):
        config = TrainConfig(api="fsdp2", **SMALL)
        pieces = one_second_each(config, 2)
        del pieces.of_steps[0][Op.BWD, "layers.1"]
        with pytest.raises(ValueError, match=r"nothing was timed for BWD of layers\.1"):
            predict(config, config.model_config, place(2), CPU, pieces)


SLOW = Network(bandwidth_gbps=0.16, latency_us=200)


def cores_of(ranks, **changed):
    """Ranks on cores that multiply at 8e10 FLOP/s and take 8 us for each kernel."""
    known = {"fp32_flops": 8e10, "mem_bytes_per_s": 1e10, "launch_s": 8e-6}
    part = dataclasses.replace(gpu("cpu"), **known | changed)
    return Cluster(part, gpus=ranks)


def calibrated(ranks=2, network=None, cluster=None, **changed):
    config = TrainConfig(**(SMALL | changed))
    return predict_calibrated(config, config.model_config, place(ranks), cluster or cores_of(ranks), network)


class TestCalibrated:
    def test_a_single_process_takes_its_kernels_and_python(self):
        once = calibrated(1, api="single")
        assert once.exposed_comm_s == 0.0
        double = calibrated(1, api="single", global_batch=8)
        assert once.step_time_s < double.step_time_s < 2 * once.step_time_s  # Python takes as long for more rows

    def test_the_memory_is_the_one_of_any_prediction(self):
        config = TrainConfig(api="fsdp2", **SMALL)
        other = predict(config, config.model_config, place(2), CPU, one_second_each(config, 2))
        assert calibrated(api="fsdp2").peak_memory_bytes == other.peak_memory_bytes

    def test_on_a_slow_network_all_of_torchs_wire_is_exposed_and_some_of_the_minis(self):
        ops = simulated(TrainConfig(**SMALL), TrainConfig(**SMALL).model_config, place(2), CPU).program.ops
        wire_s = sum(SLOW.seconds(i.op.lower(), i.bytes, i.group_size) for i in ops if i.op in COLLECTIVES)
        torchs, prefetched = (calibrated(network=SLOW, api="fsdp2", forward_prefetch=depth) for depth in (None, 1))
        mini = calibrated(network=SLOW, api="mini")
        assert torchs.exposed_comm_s == pytest.approx(wire_s)
        assert prefetched.exposed_comm_s == pytest.approx(wire_s)  # nothing runs ahead of a call that waits
        assert mini.exposed_comm_s < wire_s
        assert calibrated(network=SLOW, api="mini", forward_prefetch=1).step_time_s < mini.step_time_s

    def test_gloos_threads_slow_what_computes_beside_them_where_no_core_is_left(self, monkeypatch):
        def step_s(cores):
            monkeypatch.setattr(calibrate, "cores", lambda: cores)
            return calibrated(api="mini", n_layer=4).step_time_s

        assert step_s(64) == step_s(4) < step_s(2)

    @pytest.mark.parametrize(("api", "agreements"), [("fsdp2", 2), ("fsdp1", 2), ("mini", 2), ("ddp", 1)])
    def test_what_a_collective_costs_is_paid_for_each(self, api, agreements):
        once_s = 1.0  # so long that nothing hides behind it
        free, dear = (calibrated(api=api, cluster=cores_of(2, collective_s=s)).step_time_s for s in (0.0, once_s))
        config = TrainConfig(**(SMALL | {"api": api}))
        program = simulated(config, config.model_config, place(2), CPU).program
        steps = 1 + max(i.step for i in program.ops)
        collectives = sum(i.op in COLLECTIVES for i in program.ops) / steps
        assert dear - free == pytest.approx(collectives + agreements, abs=0.1)

    def test_norm_and_optimizer_launch_for_each_parameter_and_dtensor_twice(self):
        def launches_s(ranks, api):
            slow, fast = (calibrated(ranks, api=api, cluster=cores_of(ranks, launch_s=s)) for s in (1.0, 0.0))
            return slow.step_time_s - fast.step_time_s

        config = TrainConfig(**SMALL)
        n_params = len(list(empty(config.model_config).parameters()))
        kernels = launches_s(1, "single") - n_params
        assert launches_s(2, "fsdp2") == pytest.approx(kernels + 2 * n_params)

    def test_another_number_of_ranks_or_a_gpu_is_refused(self):
        with pytest.raises(ValueError, match="fsdp-sim calibrate --device cpu --ranks 2"):
            calibrated(cluster=cores_of(4))
        with pytest.raises(ValueError, match="the cluster has 2 ranks on H200-SXM-141GB"):
            calibrated(cluster=Cluster("H200", gpus=2))


def collectives_of_a_step(config):
    """On a rank: three real steps."""
    here = place(2)
    here = dataclasses.replace(here, rank=torch.distributed.get_rank(), local_rank=torch.distributed.get_rank())
    wrapped = wrap(config, config.model_config, here, CPU)
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = random_batch(config, config.model_config, here)
    for step in range(3):
        train_step(wrapped, optimizer, batch, step, config, n_micro_batches=n_micro_batches)


@pytest.mark.parametrize(("api", "waits"), [("fsdp2", True), ("fsdp1", True), ("mini", False)])
def test_on_cpu_cores_torchs_fsdp_waits_for_each_collective_and_the_mini_does_not(api, waits):
    """[Note: collectives on CPU cores] of labs.measure.prediction, on real ranks and a slow network."""
    prefetch = 1 if api == "mini" else None
    config = TrainConfig(api=api, **SMALL, forward_prefetch=prefetch)
    timeline = run(
        collectives_of_a_step, 2, config, network=SLOW, progress=False, show_output=False, timeout_s=120
    ).timeline
    mine = sorted((e for e in timeline.ops if e.rank == 0 and e.op in COLLECTIVES), key=lambda e: e.issue_s)
    assert len(mine) > 12
    assert all(later.issue_s >= earlier.end_s for earlier, later in pairwise(mine)) == waits


def test_on_gpus_the_catalogue_is_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda", 0)
    config = TrainConfig(model="gpt2", n_layer=2, seq_len=1024, global_batch=64, param_dtype="bf16")
    two_nodes = RankPlace(0, 16, 0, 8, torchrun=True)
    found = predict(config, config.model_config, two_nodes, device)
    assert 0 < found.exposed_comm_s < found.step_time_s < 1
    assert found.sentences[0] == "Predicted from the catalogue's H200-SXM-141GB, before anything was measured."
    more = predict(dataclasses.replace(config, global_batch=128), config.model_config, two_nodes, device)
    assert more.peak_memory_bytes > found.peak_memory_bytes
