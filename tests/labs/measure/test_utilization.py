"""Utilisation by the book, memory as the system and torch count it, speed without the first step."""

import mmap

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import run
from labs.measure.utilization import RankMemory, flops_per_token, median_step_s, memory_bytes, mfu, of_ranks, peak_flops
from labs.model import empty, model_config

MIB = 2**20


class TestFlops:
    def test_gpt2_counts_the_tied_head_once_and_no_positions(self):
        params = 124_439_808 - 1024 * 768
        assert flops_per_token(model_config("gpt2"), 1024) == 6 * params + 12 * 12 * 768 * 1024

    def test_attention_grows_with_the_row(self):
        config = model_config("teaching")
        longer = flops_per_token(config, 128) - flops_per_token(config, 64)
        assert longer == 12 * config.n_layer * config.d_model * 64

    def test_a_llama_has_no_learned_positions_to_leave_out(self):
        config = model_config("teaching-llama")
        params = empty(config).num_params()
        assert flops_per_token(config, 64) == 6 * params + 12 * config.n_layer * config.d_model * 64


class TestPeak:
    @pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
    def test_is_the_catalogues_dense_one(self, monkeypatch, name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        assert peak_flops(torch.device("cuda", 0), "bf16") == pytest.approx(989.5e12, rel=1e-3)

    def test_is_unknown_for_a_gpu_that_is_not_in_it(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Voodoo 2")
        assert peak_flops(torch.device("cuda", 0), "bf16") is None

    def test_is_unknown_for_a_cpu(self):
        assert peak_flops(torch.device("cpu"), "fp32") is None

    def test_utilisation_is_over_the_peak_of_all_ranks(self):
        assert mfu(1000.0, 2e9, 1e13, ranks=2) == pytest.approx(0.1)
        assert mfu(1000.0, 2e9, None, ranks=2) is None


class TestMemory:
    def test_the_peak_stays_when_the_memory_is_given_back(self):
        def memories():  # on a rank, whose process has held little yet
            before = memory_bytes(torch.device("cpu"))
            block = mmap.mmap(-1, before.peak_bytes + 64 * MIB)  # not malloc's, which may keep it
            np.frombuffer(block, np.uint8)[:] = 1
            held = memory_bytes(torch.device("cpu"))
            block.close()
            return before, held, memory_bytes(torch.device("cpu"))

        before, held, after = (RankMemory(*numbers) for numbers in run(memories, 1, record=False, progress=False)[0])
        assert held.peak_bytes > before.peak_bytes
        assert after.peak_bytes > held.peak_bytes - 8 * MIB  # threads report to the kernel in batches
        assert after.reserved_bytes < held.reserved_bytes

    def test_every_rank_has_its_own(self):
        def all_memories():
            def gather(mine):
                rows = [torch.zeros_like(mine) for _ in range(2)]
                dist.all_gather(rows, mine)
                return torch.stack(rows)

            return of_ranks(RankMemory(dist.get_rank() + 10, 2**40), gather, torch.device("cpu"))

        found = run(all_memories, 2, record=False, progress=False)
        assert found == [[RankMemory(10, 2**40), RankMemory(11, 2**40)]] * 2

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu_is_torchs_own_count(self):
        device = torch.device("cuda", 0)
        held = torch.ones(64 * MIB // 4, device=device)
        assert memory_bytes(device).peak_bytes >= held.nbytes
        assert memory_bytes(device).reserved_bytes >= held.nbytes


def test_the_first_step_counts_only_when_there_is_no_other():
    assert median_step_s([10.0]) == 10.0
    assert median_step_s([10.0, 1.0, 3.0]) == 2.0
