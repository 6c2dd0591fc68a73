"""What is left out, or needs this mini's own remedy, is refused with it. The errors that torch has: `parity`."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_module

from fsdp_sim.mini import fully_shard
from tests.mini.models import Matrix, Toy, shard


def on_meta():
    with torch.device("meta"):
        model = Toy()
    shard(model)(torch.randn(2, 4))


ERRORS = {
    "meta": (on_meta, RuntimeError, "still on the meta device: ['embed.w', 'head.w']; call fsdp_sim.mini.init_weights"),
    "pinned without an accelerator": (
        lambda: fully_shard(Matrix(), offload_policy=CPUOffloadPolicy()),
        RuntimeError,
        "CPUOffloadPolicy(pin_memory=False)",
    ),
    "other dimension": (
        lambda: fully_shard(Matrix(), shard_placement_fn=lambda _: Shard(1)),
        NotImplementedError,
        "for Matrix.w of shape (4, 4); this FSDP shards dim 0",
    ),
    "tensor parallelism": (
        lambda: fully_shard(
            distribute_module(Matrix(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))),
            mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
        ),
        NotImplementedError,
        "Matrix.w is a DTensor already, with placements (Replicate(),)",
    ),
    "custom allocator": (
        lambda: fully_shard(Matrix()).set_symm_mem_for_comm(),
        NotImplementedError,
        "custom collectives and allocators are left out",
    ),
}


def raised_by(name):
    call, expected, _ = ERRORS[name]
    with pytest.raises(expected) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_thing_and_what_would_be_right(ranks, name):
    for message in ranks(2, raised_by, name):
        assert ERRORS[name][2] in message
