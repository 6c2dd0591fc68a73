"""The simulator is asked what the trainer does, on the machine it does it on; its memory is that of real ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import run
from fsdp_sim.timeline import Op
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.measure.simulated import cluster_of, peak_memory_bytes, plan_of, simulated

CPU = torch.device("cpu")
HOW = {"record": False, "progress": False, "show_output": False, "timeout_s": 120.0}


def place(ranks):
    return RankPlace(0, ranks, 0, ranks, torchrun=True)


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
    from labs.data.loader import Batch
    from labs.loop.optimizer import make_optimizer
    from labs.loop.step import train_step
    from labs.wrapping import wrap

    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrapped = wrap(config, config.model_config, RankPlace(rank, world_size, rank, world_size, torchrun=True), CPU)
    optimizer = make_optimizer(wrapped, config)
    tokens = torch.randint(0, 256, (config.global_batch // world_size, config.plan.seq_len + 1))
    batch = Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), config.global_batch * config.plan.seq_len, 0)
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


class TestOnGpus:
    def test_the_catalogue_knows_the_machine(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        cluster = cluster_of(RankPlace(0, 16, 0, 8, torchrun=True), torch.device("cuda", 0))
        assert (cluster.gpu.name, cluster.gpus, cluster.nodes) == ("H200-SXM-141GB", 16, 2)

    @pytest.mark.parametrize(
        ("name", "capability", "sms", "gib", "like", "bf16_tflops"),
        [
            ("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 16, "0.83 of those of RTX-5080", 93.8),  # datasheet: 87.9
            ("NVIDIA RTX PRO 4500 Blackwell", (12, 0), 82, 32, "0.44 of those of RTX-PRO-6000", 220),
            ("NVIDIA RTX 5000 Ada Generation", (8, 9), 100, 32, "0.70 of those of L40S", 255),  # 261
            ("NVIDIA GeForce RTX 3080", (8, 6), 68, 10, "0.83 of those of RTX-3090", 59.0),  # 59.5
            ("NVIDIA GeForce RTX 4060", (8, 9), 24, 8, "0.52 of those of RTX-4070", 30.4),  # 30.2
            ("NVIDIA RTX A5000", (8, 6), 64, 24, "0.89 of those of A10", 111),  # 111
            ("NVIDIA A30", (8, 0), 56, 24, "0.52 of those of A100-SXM-40GB", 162),  # 165
            ("NVIDIA A30 MIG 1g.6gb", (8, 0), 14, 6, "0.13 of those of A100-SXM-40GB", 40.4),
            ("Tesla P100", (6, 0), 56, 16, "of those of", 0),
        ],
    )
    def test_a_gpu_that_it_lacks_is_estimated_and_said_to_be(
        self, monkeypatch, name, capability, sms, gib, like, bf16_tflops
    ):
        major, minor = capability
        known = {"name": name, "major": major, "minor": minor, "multi_processor_count": sms}
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known, total_memory=gib * 2**30)
        )
        gpu = cluster_of(place(1), torch.device("cuda", 0)).gpu

        assert (gpu.name, gpu.sms, gpu.mem_bytes) == (name, sms, gib * 2**30)
        assert gpu.notes.startswith(f"The catalogue has no {name}: its rates are taken to be ")
        assert like in gpu.notes
        assert "its links to be that part's" in gpu.notes
        assert not bf16_tflops or gpu.bf16_flops == pytest.approx(bf16_tflops * 1e12, rel=0.01)
