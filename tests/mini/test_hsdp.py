"""Meshes: who shares shards with whom, and what runs after the reduce-scatter."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_sim.mini import fully_shard
from fsdp_sim.mini.hsdp import FSDPMeshInfo, post_forward_mesh_info, set_separate_reduce_scatter_group
from tests.mini.models import Matrix, Toy, shard


def mesh_2x2():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def test_rows_share_shards_and_columns_hold_the_same(ranks):
    def run():
        info = FSDPMeshInfo(mesh_2x2())
        assert info.placements == (Replicate(), Shard(0))
        assert (info.shard_mesh_size, info.replicate_mesh_size) == (2, 2)
        return (
            dist.get_process_group_ranks(info.shard_process_group),
            dist.get_process_group_ranks(info.replicate_process_group),
        )

    assert ranks(4, run) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def test_the_mesh_after_forward(ranks):
    def run():
        info = FSDPMeshInfo(init_device_mesh("cpu", (4,)))
        assert post_forward_mesh_info(True, info) is info
        assert post_forward_mesh_info(False, info) is None
        assert post_forward_mesh_info(4, info) is info
        smaller = post_forward_mesh_info(2, info)
        assert post_forward_mesh_info(2, FSDPMeshInfo(info.mesh)) is smaller, "one set of process groups per mesh"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert post_forward_mesh_info(1, info) is None
        assert "as False does" in str(caught[0].message)
        for n in (0, 3, 8):
            with pytest.raises(ValueError, match=f"divide the number of shards, 4, but is {n}"):
                post_forward_mesh_info(n, info)
        return dist.get_process_group_ranks(smaller.shard_process_group)

    assert ranks(4, run) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_slice_is_what_stays_between_forward_and_backward(ranks):
    def run():
        model = shard(Toy(), reshard_after_forward=2)
        out = model(torch.ones(2, 4))
        layer = model.layers[0].w
        kept = layer.to_local().shape, layer.placements, layer.full_tensor().shape
        out.sum().backward()
        return kept, model.layers[0].w.to_local().shape

    assert ranks(4, run) == [(((2, 4), (Replicate(), Shard(0)), (4, 4)), (1, 4))] * 4


def test_one_reduce_scatter_group_for_all_units_until_it_is_taken_away(ranks):
    def run():
        infos = [FSDPMeshInfo(init_device_mesh("cpu", (2,))) for _ in range(2)]
        set_separate_reduce_scatter_group(infos, True)
        first = infos[0].reduce_scatter_process_group
        assert first is infos[1].reduce_scatter_process_group is not infos[0].shard_process_group
        set_separate_reduce_scatter_group(infos, True)
        assert infos[0].reduce_scatter_process_group is first
        set_separate_reduce_scatter_group(infos, False)
        return infos[0].reduce_scatter_process_group

    assert ranks(2, run) == [None, None]


def test_partial_sums_wait_for_the_one_all_reduce(ranks):
    def run():
        model = fully_shard(Matrix(), mesh=mesh_2x2())
        group = model._get_fsdp_state()._fsdp_param_group
        seen = []
        for last in (False, True):
            model.set_requires_all_reduce(last)
            model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
            seen.append((group._partial_reduce_output is None, model.w.grad is None))
        return seen, model.w.grad.full_tensor()[0, 0].item()

    assert ranks(4, run) == [([(False, True), (True, False)], 2 * 2.5)] * 4
