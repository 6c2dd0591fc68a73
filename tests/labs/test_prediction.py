"""The simulator is asked what the trainer does, on the machine it does it on; its answer is laid beside real ranks."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import run
from fsdp_sim.timeline import Op
from labs.config import TrainConfig
from labs.place import Place
from labs.prediction import (
    Pieces,
    cluster_of,
    measure_pieces,
    peak_memory_bytes,
    plan_of,
    predict,
    simulated,
)

CPU = torch.device("cpu")
SMALL = {"n_layer": 2, "seq_len": 32, "global_batch": 4}
HOW = {"record": False, "progress": False, "show_output": False, "timeout_s": 120.0}


def place(ranks):
    return Place(0, ranks, 0, ranks, torchrun=True)


class TestPlan:
    @pytest.mark.parametrize(
        ("api", "simulated_as"),
        [
            ("single", "ddp"),
            ("ddp", "ddp"),
            ("fsdp2", "fsdp2"),
            ("hsdp", "fsdp2"),
            ("mini", "fsdp2"),
            ("fsdp1", "fsdp1"),
        ],
    )
    def test_every_api_has_a_program(self, api, simulated_as):
        ranks = 1 if api == "single" else 4
        plan = plan_of(TrainConfig(api=api), place(ranks))
        assert (plan.api, plan.micro_batch, plan.grad_accum, plan.seq_len) == (simulated_as, 8 // ranks, 1, 128)
        assert plan.shard_size == (2 if api == "hsdp" else None)

    def test_settings_keep_their_meaning(self):
        config = TrainConfig(
            micro_batch=1, requires_gradient_sync="last", param_dtype="bf16", cpu_offload=True, forward_prefetch=2,
            backward_prefetch=1, reshard_after_forward=False, activation_checkpointing="selective", compile=True,
        )  # fmt: skip
        plan = plan_of(config, place(2))
        assert (plan.micro_batch, plan.grad_accum, plan.requires_gradient_sync) == (1, 4, "last")
        assert (plan.param_dtype, plan.reduce_dtype, plan.cpu_offload) == ("bf16", "fp32", True)
        assert (plan.forward_prefetch, plan.backward_prefetch, plan.reshard_after_forward) == (2, 1, False)
        assert (plan.activation_checkpointing, plan.compile, plan.is_last_backward) == ("selective", True, "last")

    def test_fsdp1_has_its_own_words(self):
        config = TrainConfig(
            api="fsdp1", sharding_strategy="SHARD_GRAD_OP", backward_prefetch="off", limit_all_gathers=False
        )
        plan = plan_of(config, place(2))
        assert (plan.sharding_strategy, plan.backward_prefetch, plan.limit_all_gathers) == (
            "SHARD_GRAD_OP", "none", False,
        )  # fmt: skip

    def test_units_are_those_that_the_trainer_wraps(self):
        config = TrainConfig(n_layer=2, wrap="Attention,MLP")
        units = simulated(config, config.model_config, place(2), CPU).workload.units
        assert [unit.name for unit in units] == [
            "root",
            "layers.0.attn",
            "layers.0.mlp",
            "layers.1.attn",
            "layers.1.mlp",
        ]

    def test_autocast_computes_in_bf16_and_keeps_gradients_in_fp32(self):
        config = TrainConfig(api="ddp", param_dtype="bf16", n_layer=2)
        simulation = simulated(config, config.model_config, place(2), CPU)
        assert simulation.workload.dtype == "bf16"
        reduced = sum(i.bytes for i in simulation.program.ops if i.op is Op.ALL_REDUCE)
        assert reduced == 4 * simulation.workload.param_count


def peak_of_a_step(config):
    """The most bytes of tensors alive in a real step, counted."""
    from fsdp_sim.measure import live_bytes
    from labs.loader import Batch
    from labs.optimizer import make_optimizer
    from labs.step import train_step
    from labs.wrapping import wrap

    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrapped = wrap(config, config.model_config, Place(rank, world_size, rank, world_size, torchrun=True), CPU)
    optimizer = make_optimizer(wrapped, config)
    tokens = torch.randint(0, 256, (config.global_batch // world_size, config.seq_len + 1))
    batch = Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), config.global_batch * config.seq_len, 0)
    train_step(wrapped, optimizer, batch, 0, config)
    with live_bytes(wrapped.model, optimizer) as meter:
        train_step(wrapped, optimizer, batch, 1, config)
    return meter.peak_bytes


class TestMemory:
    @pytest.mark.parametrize(("api", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("mini", 2)])
    def test_the_peak_is_that_of_real_ranks(self, api, ranks):
        config = TrainConfig(api=api, n_layer=2)
        measured = max(run(peak_of_a_step, ranks, config, **HOW))
        simulation = simulated(config, config.model_config, place(ranks), CPU)
        assert peak_memory_bytes(config, simulation) == pytest.approx(measured, rel=0.03)

    def test_a_single_process_has_no_buckets(self):
        config = TrainConfig(api="single", n_layer=2)
        simulation = simulated(config, config.model_config, place(1), CPU)
        assert peak_memory_bytes(config, simulation) < simulation.peak_memory_bytes


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


class TestTimed:
    @pytest.mark.parametrize(("api", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("hsdp", 2), ("fsdp1", 2)])
    def test_real_ranks_give_every_piece_of_the_program(self, api, ranks):
        config = TrainConfig(api=api, **SMALL)
        pieces = measure_pieces(config, config.model_config, place(ranks))
        assert all((seconds >= 0).all() and len(seconds) == ranks for s in pieces.of_steps for seconds in s.values())
        found = predict(config, config.model_config, place(ranks), CPU, pieces)
        assert 0 <= found.exposed_comm_s < found.step_time_s
        assert (found.exposed_comm_s > 0) == (api != "single")
        assert f"measured by {ranks} rank" in found.sentences[0]

    def test_all_that_is_computed_again_is_in_it(self):
        config = TrainConfig(api="fsdp2", **SMALL, micro_batch=1, activation_checkpointing="full", param_dtype="bf16")
        found = predict(config, config.model_config, place(2), CPU)
        assert found.step_time_s > 0


class TestOnGpus:
    def test_the_catalogue_knows_the_machine(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        device = torch.device("cuda", 0)
        config = TrainConfig(model="gpt2", n_layer=2, seq_len=1024, global_batch=64, param_dtype="bf16")
        two_nodes = Place(0, 16, 0, 8, torchrun=True)
        cluster = cluster_of(two_nodes, device)
        assert (cluster.gpu.name, cluster.gpus, cluster.nodes) == ("H200-SXM-141GB", 16, 2)
        found = predict(config, config.model_config, two_nodes, device)
        assert 0 < found.exposed_comm_s < found.step_time_s < 1
        assert found.sentences[0] == "Predicted from the catalogue's H200-SXM-141GB, before anything was measured."
        more = predict(dataclasses.replace(config, global_batch=128), config.model_config, two_nodes, device)
        assert more.peak_memory_bytes > found.peak_memory_bytes

    def test_a_gpu_that_it_lacks_is_named(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Voodoo 2")
        with pytest.raises(ValueError, match="Voodoo"):
            cluster_of(place(1), torch.device("cuda", 0))
