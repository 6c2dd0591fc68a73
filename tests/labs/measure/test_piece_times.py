"""Real ranks time the pieces of a step, and give every piece that the simulator's program has."""

import pytest
import torch

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.measure.piece_times import measure_pieces
from labs.measure.prediction import predict

CPU = torch.device("cpu")
SMALL = {"n_layer": 2, "seq_len": 32, "global_batch": 4}


def place(ranks):
    return RankPlace(0, ranks, 0, ranks, torchrun=True)


@pytest.mark.parametrize(("api", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("hsdp", 2), ("fsdp1", 2)])
def test_real_ranks_give_every_piece_of_the_program(api, ranks):
    config = TrainConfig(api=api, **SMALL)
    pieces = measure_pieces(config, config.model_config, place(ranks))
    assert all((seconds >= 0).all() and len(seconds) == ranks for s in pieces.of_steps for seconds in s.values())
    found = predict(config, config.model_config, place(ranks), CPU, pieces)
    assert 0 <= found.exposed_comm_s < found.step_time_s
    assert (found.exposed_comm_s > 0) == (api != "single")
    assert f"measured by {ranks} rank" in found.sentences[0]


def test_all_that_is_computed_again_is_in_it():
    config = TrainConfig(api="fsdp2", **SMALL, micro_batch=1, activation_checkpointing="full", param_dtype="bf16")
    found = predict(config, config.model_config, place(2), CPU)
    assert found.step_time_s > 0
