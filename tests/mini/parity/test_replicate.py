"""`fully_shard` beside torch's `replicate`, old (DDP) and new (on FSDP's own machinery): each passes the other's by."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.tensor import DTensor

from tests.mini.models import Matrix, Toy, my_part, twin
from tests.mini.parity.tools import kind, raised

REPLICATES = {"ddp": replicate_with_ddp, "fsdp": replicate_with_fsdp}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, plain):
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        batch = torch.randn(2 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(step))
        for m, x in ((model, my_part(batch)), (plain, batch)):
            m(x).pow(2).mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach())


@pytest.mark.parametrize("replicate", REPLICATES)
def test_replicate_over_sharded_children(ranks, impl, replicate):
    def run():
        model = Toy(3)
        plain = twin(model)
        for layer in model.layers:
            impl.fully_shard(layer)
        REPLICATES[replicate](model)
        train(model, plain)
        return [kind(layer.w) for layer in model.layers]

    assert ranks(2, run) == [["sharded"] * 3] * 2


def test_fully_shard_over_a_replicated_child_leaves_it_whole(ranks, impl):
    def run():
        model = Toy(3)
        plain = twin(model)
        replicate_with_ddp(model.layers[1])
        impl.fully_shard(model.layers[0])
        impl.fully_shard(model)
        train(model, plain)
        return [kind(layer.w) for layer in model.layers]

    assert ranks(2, run) == [["sharded", "unsharded", "sharded"]] * 2


def test_a_replicated_module_is_not_sharded_itself(ranks, impl):
    def run():
        model = replicate_with_ddp(Matrix())
        impl.fully_shard(model)
        return kind(model.w)

    assert ranks(2, run) == ["unsharded"] * 2


def test_replicating_a_sharded_module_is_refused(ranks, impl):
    def run():
        models = [impl.fully_shard(Matrix()) for _ in REPLICATES]
        return [raised(lambda r=r, m=m: r(m)) for r, m in zip(REPLICATES.values(), models, strict=True)]

    for errors in ranks(2, run):
        assert [error[0] for error in errors] == ["RuntimeError"] * 2
        assert all("fully_shard" in error[1] for error in errors)


def test_parts_unsharded_asynchronously_before_they_run_inside_a_replicated_model(ranks, impl):
    """The gathers are issued beside an all-reduce of the model's own, as torch's `test_unshard_async` does."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlps = nn.ModuleList(nn.Sequential(Matrix(4, 6), nn.ReLU(), Matrix(6, 4)) for _ in range(3))

        def forward(self, x, works):
            for mlp, work in zip(self.mlps, works, strict=True):
                if work is not None:
                    work.wait()
                x = mlp(x)
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = nn.ModuleList(Matrix() for _ in range(3))
            self.part = Part()

        def forward(self, x):
            works = []
            for matrix, mlp in zip(self.matrices, self.part.mlps, strict=True):
                x = torch.relu(matrix(x))
                sharded = isinstance(mlp, impl.FSDPModule)
                works.append(dist.all_reduce(x.detach().clone(), async_op=True) if sharded else None)
                if sharded:
                    mlp.unshard(async_op=True)
            return self.part(x, works)

    def run():
        model = Model()
        plain = twin(model)
        for mlp in model.part.mlps:
            impl.fully_shard(mlp, reshard_after_forward=False)
        impl.fully_shard(model.part)
        replicate_with_ddp(model)
        train(model, plain)

    ranks(2, run)
