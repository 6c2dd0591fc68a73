"""When ``backward()`` returns the gradients are there, also of units whose pre-backward hook did not run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.mini.models import Matrix, assert_same_grads, assert_same_params, my_part, twin


class ChunkedHead(nn.Module):
    """Norm and head are one unit. Forward ends with the norm; the loss calls the head, once per chunk."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = Matrix(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.norm(self.body(x))

    def backward_in_chunks(self, x):
        """Yields after the backward of each chunk, before that of the body."""
        hidden = self(x)
        detached = hidden.detach().requires_grad_()
        for chunk in detached.chunk(3):
            self.head(chunk).square().sum().backward()
            yield
        hidden.backward(detached.grad)


class Opaque:
    """An object that FSDP cannot look into: no tensor in it is hooked."""

    def __init__(self, value):
        self.value = value


class ReturnsOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.w = Matrix(4, 3), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return Opaque(torch.tanh(self.layer(x)) @ self.w)


def mesh_of(replicas):
    if replicas == 1:
        return None
    return init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard"))


SETTINGS = [("sharded", 3), ("hybrid", 2), ("offloaded", 2)]


def options_of(impl, setting):
    offload = impl.CPUOffloadPolicy(pin_memory=False) if setting == "offloaded" else impl.OffloadPolicy()
    return {"mesh": mesh_of(2 if setting == "hybrid" else 1), "offload_policy": offload}


@pytest.mark.parametrize(("setting", "world_size"), SETTINGS)
def test_a_head_called_per_chunk_has_its_gradient_after_each_chunk(ranks, impl, setting, world_size):
    def run():
        model = ChunkedHead()
        plain = twin(model)
        options = options_of(impl, setting)
        impl.fully_shard([model.norm, model.head], **options)
        impl.fully_shard(model, **options)
        for m in (model, plain):
            m.optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step in range(2):
            whole = torch.randn(6 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(step))
            chunks = zip(*(m.backward_in_chunks(my_part(whole)) for m in (model, plain)), strict=True)
            for _ in chunks:  # both have done the same chunk
                for param in plain.head.parameters():
                    expected = param.grad.clone()
                    dist.all_reduce(expected)
                    ours = getattr(model.head, next(n for n, p in plain.head.named_parameters() if p is param))
                    torch.testing.assert_close(ours.grad.full_tensor(), expected / dist.get_world_size())
            for param in plain.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            assert_same_grads(model, plain)
            for m in (model, plain):
                m.optimizer.step()
                m.optimizer.zero_grad()
        assert_same_params(model, plain)

    ranks(world_size, run)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("setting", "world_size"), SETTINGS)
def test_a_root_that_returns_an_opaque_object_is_trained(ranks, impl, setting, world_size, micro_batches):
    """Its input needs a gradient, so backward comes by; no output is hooked, so nothing announced it."""

    def run():
        model = ReturnsOpaque()
        plain = twin(model)
        options = options_of(impl, setting)
        impl.fully_shard(model, **options)
        before = [p.detach().clone() for p in plain.parameters()]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for number in range(micro_batches):
            whole = torch.randn(2 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(number))
            model.set_requires_gradient_sync(number == micro_batches - 1)
            for m, x in ((model, my_part(whole)), (plain, whole)):
                m(x.requires_grad_()).value.square().mean().backward()
        assert_same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_params(model, plain)
        assert all(not torch.equal(p, b) for p, b in zip(plain.parameters(), before, strict=True))

    ranks(world_size, run)
