"""The simulator plays the pieces of a step in torch's order: what it says follows from what each of them takes."""

import dataclasses

import numpy as np
import pytest
import torch

from fsdp_sim.timeline import Op
from labs.config import TrainConfig
from labs.place import Place
from labs.prediction import predict
from labs.simulated import simulated
from labs.timing import Pieces

CPU = torch.device("cpu")
SMALL = {"n_layer": 2, "seq_len": 32, "global_batch": 4}


def place(ranks):
    return Place(0, ranks, 0, ranks, torchrun=True)


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
        two_machines = Place(0, 4, 0, 2, torchrun=True)
        found = predict(config, config.model_config, two_machines, CPU, one_second_each(config, 2))
        assert "The network to other machines was not measured" in found.sentences[0]

    def test_a_piece_that_was_not_timed_is_named(self):
        config = TrainConfig(api="fsdp2", **SMALL)
        pieces = one_second_each(config, 2)
        del pieces.of_steps[0][Op.BWD, "layers.1"]
        with pytest.raises(ValueError, match=r"nothing was timed for BWD of layers\.1"):
            predict(config, config.model_config, place(2), CPU, pieces)


def test_on_gpus_the_catalogue_is_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda", 0)
    config = TrainConfig(model="gpt2", n_layer=2, seq_len=1024, global_batch=64, param_dtype="bf16")
    two_nodes = Place(0, 16, 0, 8, torchrun=True)
    found = predict(config, config.model_config, two_nodes, device)
    assert 0 < found.exposed_comm_s < found.step_time_s < 1
    assert found.sentences[0] == "Predicted from the catalogue's H200-SXM-141GB, before anything was measured."
    more = predict(dataclasses.replace(config, global_batch=128), config.model_config, two_nodes, device)
    assert more.peak_memory_bytes > found.peak_memory_bytes
