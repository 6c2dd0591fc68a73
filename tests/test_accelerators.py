"""Beside GPUs, ranks and notebooks see none; where one asks for them, each rank has its own. All GPUs are faked."""

import json

import pytest

from fsdp_sim.accelerators import hidden, shown
from tests.faked_gpus import python

SHARD_AND_ASK = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import fsdp_sim.mini
from fsdp_sim.ranks import run

def shard():
    for shard in (fully_shard, fsdp_sim.mini.fully_shard):
        shard(nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()  # without a mesh: torch chooses the device
    child = os.popen(f"{sys.executable} -c 'import torch; print(torch.cuda.device_count())'").read().strip()
    return torch.cuda.device_count(), str(torch.accelerator.current_accelerator()), child

def where():
    return torch.cuda.current_device(), torch.cuda.device_count(), os.environ["LOCAL_RANK"], dist.get_world_size()

def asked(**settings):
    try:
        return run(where, device="cuda", progress=False, **settings)
    except ValueError as error:
        return str(error)

results = run(shard, 2, progress=False)
saw = open(os.environ["FAKED_GPUS_LOG"]).read()
found = {"ranks": list(results), "issued": [record.op for record in results.records[0]], "saw": saw}
for ranks in json.loads(os.environ["RANKS"]):
    results = asked(world_size=ranks)
    found[str(ranks)] = results
    found["hardware"] = getattr(getattr(results, "timeline", None), "header", None) and results.timeline.header.hardware
print(json.dumps(found))
"""
OPS = ["all_gather", "reduce_scatter"] * 2


def asked(tmp_path, gpus, *ranks):
    """What ranks on CPU cores find beside so many GPUs, and what those do that ask for GPUs."""
    found = json.loads(python(SHARD_AND_ASK, gpus, tmp_path / "log", RANKS=json.dumps(ranks)).splitlines()[-1])
    assert found["ranks"] == [[0, "None", "0"]] * 2, "a rank, or what it started, saw a GPU"
    assert found["issued"] == OPS, "torch made a group or a collective more than without GPUs"
    assert found["saw"] == "", "something looked for GPUs and found some"
    return found, (tmp_path / "log").read_text().split("\n")


class TestRanks:
    def test_beside_one_gpu_ranks_see_none_and_with_device_cuda_one_rank_has_it(self, tmp_path):
        found, log = asked(tmp_path, 1, 2, None)

        assert found["2"] == (
            "run(world_size=2, device='cuda'): NCCL takes one rank for each GPU, and here is 1 (NVIDIA H100 80GB "
            "HBM3); use world_size=1, or leave device out to run on CPU cores"
        )
        assert found["None"] == [[0, 1, "0", 1]]
        assert found["hardware"] == "1 x NVIDIA H100 80GB HBM3, NCCL"
        assert (log.count("set_device 0"), log.count("nccl")) == (1, 1)

    @pytest.mark.tail
    def test_beside_three_each_rank_has_its_own(self, tmp_path):
        found, log = asked(tmp_path, 3, 4, None)

        assert "here are 3 (NVIDIA H100" in found["4"]
        assert found["None"] == [[gpu, 3, str(gpu), 3] for gpu in range(3)]
        assert found["hardware"] == "3 x NVIDIA H100 80GB HBM3, NCCL"
        assert sorted(line for line in log if line.startswith("set")) == [f"set_device {gpu}" for gpu in range(3)]
        assert log.count("nccl") == 3

    @pytest.mark.tail
    def test_a_driver_that_cannot_be_used_is_said_in_its_own_words(self, tmp_path):
        found, _ = asked(tmp_path, "broken", None)

        assert found["None"] == (
            "run(device='cuda'): torch 2.13.0+cpu can use no GPU here: The NVIDIA driver on your system is too old "
            "(found version 11040). Please update your GPU driver; fsdp-sim doctor says more; leave device out to run "
            "on CPU cores"
        )


class TestEnvironment:
    @pytest.mark.parametrize("before", [{}, {"CUDA_VISIBLE_DEVICES": "2,3"}, {"ROCR_VISIBLE_DEVICES": "0"}])
    def test_what_was_visible_before_can_be_shown_again_however_often_it_was_hidden(self, before):
        twice = hidden(hidden({"HOME": "/home/x", **before}))

        assert (twice["CUDA_VISIBLE_DEVICES"], twice["HIP_VISIBLE_DEVICES"]) == ("", "-1")
        assert shown(twice) == {"HOME": "/home/x", **before}

    def test_what_somebody_set_after_it_was_hidden_counts(self):
        assert shown(hidden({}) | {"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}
