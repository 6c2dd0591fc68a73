"""Process groups cost: they are made once for each mesh, not for each unit."""

import warnings

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_sim.mini.hsdp import FSDPMeshInfo, post_forward_mesh_info, set_separate_reduce_scatter_group


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
