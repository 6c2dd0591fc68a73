"""What a rank writes in a save: what every rank has is shared out, so that each copies and writes its share only."""

import pytest
import torch

from fsdp_sim.ranks import run
from labs.checkpoint.staging import shared_out

STATE = {"a": torch.zeros(100), "b": torch.zeros(60), "c": torch.zeros(50), "d": torch.zeros(()), "e": torch.zeros(3)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_each_tensor_has_one_writer_whatever_the_order_of_names_on_a_rank(world_size):
    orders = [STATE, dict(reversed(STATE.items()))]
    shares = [shared_out(orders[rank % 2], rank, world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(STATE)
    assert all(tensor is STATE[name] for share in shares for name, tensor in share.items())


def test_ranks_write_about_as_much():
    shares = [shared_out(STATE, rank, 2) for rank in range(2)]
    n_bytes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
    assert n_bytes == [4 * (100 + 3 + 1), 4 * (60 + 50)]


def test_a_background_save_copies_what_the_rank_writes_and_every_byte_comes_back(tmp_path):
    def fn():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from labs.checkpoint import Checkpointer

        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
        alike = {f"alike.{i}": torch.full((10, 10), float(i)) for i in range(6)}
        sharded = {"sharded": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)}
        checkpointer = Checkpointer(tmp_path, group=dist.new_group(backend="gloo"))
        checkpointer.save(1, alike | sharded, {}, {}, asynchronous=True)
        checkpointer.wait()
        copied = checkpointer._buffers.tensors
        assert copied["sharded"].tolist() == list(range(4 * rank, 4 * rank + 4))
        for tensor in [*alike.values(), sharded["sharded"].to_local()]:
            tensor.zero_()
        checkpointer.load(checkpointer.newest(), alike | sharded)
        assert [tensor.mean().item() for tensor in alike.values()] == [0, 1, 2, 3, 4, 5]
        assert sharded["sharded"].full_tensor().tolist() == list(range(8))
        return sorted(copied.keys() - {"sharded"})

    first, second = run(fn, 2, progress=False)
    assert (len(first), len(second)) == (3, 3)
    assert not set(first) & set(second)
