"""The copies around the collectives, without modules."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_sim.mini import FSDPParam
from fsdp_sim.mini.collectives import (
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    foreach_reduce_finish,
)


def make(*shapes):
    owner = nn.Module()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    originals, params = [], []
    for i, shape in enumerate(shapes):
        param = nn.Parameter(torch.randn(shape))
        owner.register_parameter(f"p{i}", param)
        originals.append(param.detach().clone())
        params.append(FSDPParam(param, [(owner, f"p{i}")], mesh))
    return params, originals, mesh.get_group()


def test_gather_gives_back_the_original_parameters(ranks):
    def run():
        params, originals, group = make((7, 3), (1,), (4, 2, 5))
        result = foreach_all_gather(params, group, "unit")
        foreach_all_gather_copy_out(result, params)
        for p, original in zip(params, originals, strict=True):
            torch.testing.assert_close(p.unsharded_param.detach(), original, rtol=0, atol=0)
        return None if result.output is None else result.output.numel()

    assert ranks(3, run) == [3 * (3 * 3 + 1 + 2 * 10)] * 3
    assert ranks(1, run) == [None], "one rank has nothing to gather"


def test_reduce_gives_each_rank_the_mean_of_its_rows(ranks):
    def run():
        params, originals, group = make((7, 3), (1,))
        rank, world_size = group.rank(), group.size()
        grads = [original * (rank + 1) for original in originals]
        for _ in range(2):  # the second time accumulates
            state = foreach_reduce(params, list(grads), group, "unit")
            foreach_reduce_finish(state)
        mean = sum(range(1, world_size + 1)) / world_size
        for p, original in zip(params, originals, strict=True):
            torch.testing.assert_close(p.sharded_param.grad.full_tensor(), 2 * mean * original)

    ranks(3, run)
    ranks(1, run)


def test_the_gradients_given_to_reduce_are_freed(ranks):
    def run():
        params, originals, group = make((4, 4))
        grads = [originals[0] * 2]
        foreach_reduce_finish(foreach_reduce(params, grads, group, "unit"))
        return len(grads)

    assert ranks(2, run) == [0, 0]
