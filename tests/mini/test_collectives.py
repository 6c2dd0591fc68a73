"""The copies around the collectives, without modules."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_sim.mini import FSDPParam
from fsdp_sim.mini.collectives import foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce_scatter
from fsdp_sim.mini.comm_context import FSDPCommContext
from fsdp_sim.mini.hsdp import FSDPMeshInfo
from fsdp_sim.mini.precision import gradient_division

CPU = torch.device("cpu")


def make(*shapes):
    owner = nn.Module()
    torch.manual_seed(3)
    mesh_info = FSDPMeshInfo(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    originals, params = [], []
    for i, shape in enumerate(shapes):
        param = nn.Parameter(torch.randn(shape))
        owner.register_parameter(f"p{i}", param)
        originals.append(param.detach().clone())
        params.append(FSDPParam(param, [(owner, f"p{i}")], mesh_info, CPU))
    ctx = FSDPCommContext(CPU)
    ctx.lazy_init()
    return params, originals, mesh_info.shard_process_group, ctx


def reduce(params, grads, group, ctx):
    division = gradient_division(group.size(), 1, torch.float32, None, force_sum=False, has_premul_sum=False)
    dtypes = (torch.float32, torch.float32)
    foreach_reduce_scatter(params, grads, group, ctx, dtypes, division).finish(ctx)


def test_gather_gives_back_the_original_parameters(ranks):
    def run():
        params, originals, group, ctx = make((7, 3), (1,), (4, 2, 5))
        result = foreach_all_gather(params, group, ctx)
        foreach_all_gather_copy_out(result, params, group.size(), ctx)
        for p, original in zip(params, originals, strict=True):
            p.to_unsharded()
            torch.testing.assert_close(p.unsharded_param.detach(), original, rtol=0, atol=0)
        return None if result.output is None else result.output.numel()

    assert ranks(3, run) == [3 * (3 * 3 + 1 + 2 * 10)] * 3
    assert ranks(1, run) == [None], "one rank has nothing to gather"


def test_reduce_gives_each_rank_the_mean_of_its_rows(ranks):
    def run():
        params, originals, group, ctx = make((7, 3), (1,))
        rank, world_size = group.rank(), group.size()
        grads = [original * (rank + 1) for original in originals]
        for _ in range(2):  # the second time accumulates
            reduce(params, list(grads), group, ctx)
        mean = sum(range(1, world_size + 1)) / world_size
        for p, original in zip(params, originals, strict=True):
            torch.testing.assert_close(p.sharded_param.grad.full_tensor(), 2 * mean * original)

    ranks(3, run)
    ranks(1, run)


def test_the_gradients_given_to_reduce_are_freed(ranks):
    def run():
        params, originals, group, ctx = make((4, 4))
        grads = [originals[0] * 2]
        reduce(params, grads, group, ctx)
        return len(grads)

    assert ranks(2, run) == [0, 0]
