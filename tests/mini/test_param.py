"""How one parameter is split and padded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_sim.mini import FSDPParam, ShardedState
from fsdp_sim.mini.hsdp import FSDPMeshInfo

CPU = torch.device("cpu")


def split(shape):
    torch.manual_seed(0)
    owner = nn.Module()
    owner.w = nn.Parameter(torch.randn(shape))
    original = owner.w.detach().clone()
    world_size = torch.distributed.get_world_size()
    p = FSDPParam(owner.w, [(owner, "w")], FSDPMeshInfo(init_device_mesh("cpu", (world_size,))), CPU)
    chunks = original.chunk(world_size)
    rank = torch.distributed.get_rank()
    expected = chunks[rank] if rank < len(chunks) else original[:0]
    torch.testing.assert_close(owner.w.to_local(), expected, rtol=0, atol=0)
    torch.testing.assert_close(owner.w.full_tensor(), original, rtol=0, atol=0)
    assert owner.w.placements == (Shard(0),)
    assert owner.w.shape == original.shape
    (sent,) = p.all_gather_inputs
    assert sent.numel() == chunks[0].numel()
    assert sent[expected.numel() :].eq(0).all(), "padding is zeros"
    return tuple(expected.shape)


@pytest.mark.parametrize(
    ("shape", "world_size", "shards"),
    [
        ((8, 3), 2, [(4, 3), (4, 3)]),
        ((7, 3), 2, [(4, 3), (3, 3)]),
        ((15,), 4, [(4,), (4,), (4,), (3,)]),
        ((17, 2), 4, [(5, 2), (5, 2), (5, 2), (2, 2)]),
        ((5, 2), 4, [(2, 2), (2, 2), (1, 2), (0, 2)]),
        ((1, 6), 3, [(1, 6), (0, 6), (0, 6)]),
        ((6, 2), 1, [(6, 2)]),
    ],
)
def test_shards_are_those_of_torch_chunk(ranks, shape, world_size, shards):
    assert ranks(world_size, split, shape) == shards


def test_the_unsharded_parameter_is_one_object_whose_memory_comes_and_goes(ranks):
    def run():
        owner = nn.Module()
        owner.w = nn.Parameter(torch.ones(5, 2))
        p = FSDPParam(owner.w, [(owner, "w")], FSDPMeshInfo(init_device_mesh("cpu", (2,))), CPU)
        seen = []
        for _ in range(2):
            p.alloc_unsharded_param([(p.local_data.numel(), torch.float32)], 2)
            p.to_unsharded()
            seen.append((id(owner.w), p.sharded_state, owner.w.shape, owner.w.untyped_storage().size()))
            p.to_sharded()
            assert p.unsharded_param.untyped_storage().size() == 0
            assert owner.w is p.sharded_param
        assert seen[0] == seen[1]
        return seen[0][1:]

    padded_bytes = 2 * 3 * 2 * 4  # 2 ranks of 3 rows
    assert ranks(2, run) == [(ShardedState.UNSHARDED, torch.Size([5, 2]), padded_bytes)] * 2


def test_frozen_and_thawed(ranks):
    def run():
        owner = nn.Module()
        owner.w = nn.Parameter(torch.ones(4), requires_grad=False)
        p = FSDPParam(owner.w, [(owner, "w")], FSDPMeshInfo(init_device_mesh("cpu", (2,))), CPU)
        assert not owner.w.requires_grad
        seen = []
        for wanted in (False, True, False):
            p.sharded_param.requires_grad_(wanted)
            p.alloc_unsharded_param([(p.local_data.numel(), torch.float32)], 2)
            p.to_unsharded()
            seen.append(owner.w.requires_grad)
            p.to_sharded()
        return seen

    assert ranks(2, run) == [[False, True, False]] * 2
