"""What `fully_shard` takes, what it refuses with which words, and the methods a module gains."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_module

from fsdp_sim.mini import FSDPModule, fully_shard, register_fsdp_forward_method
from tests.mini.models import Collectives, Matrix, Toy, assert_same_grads, my_part, shard, twin


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 5).t())


def twice():
    module = fully_shard(Matrix())
    fully_shard(module)


def tied_across_groups():
    model = Toy()
    model.layers[1].w = model.embed.w
    shard(model)(torch.randn(2, 4))


def layer_before_root():
    model = shard(Toy())
    model.layers[0](torch.randn(2, 4))
    model(torch.randn(2, 4))


def list_as_root():
    first, _ = fully_shard([Matrix(), Matrix()])
    first(torch.randn(2, 4))


def on_meta():
    with torch.device("meta"):
        model = Toy()
    shard(model)(torch.randn(2, 4))


def two_dtypes():
    model = Toy()
    model.head.to(torch.float64)
    fully_shard(model)(torch.randn(2, 4))


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


ERRORS = {
    "scalar parameter": (lambda: fully_shard(Scalar()), ValueError, "change Scalar.scale to a 1D tensor"),
    "not contiguous": (
        lambda: fully_shard(Transposed()),
        NotImplementedError,
        "Transposed.w has shape (5, 3) and stride (1, 5)",
    ),
    "twice": (twice, AssertionError, "already been applied to this FSDPMatrix"),
    "no forward": (lambda: fully_shard(nn.ModuleList([Matrix()])), ValueError, "a ModuleList would never gather"),
    "two groups": (tied_across_groups, ValueError, "already managed by unit 'root'"),
    "layer first": (layer_before_root, RuntimeError, "already been lazily initialized for 'layers.0'"),
    "list as root": (list_as_root, RuntimeError, "a single root module"),
    "meta": (on_meta, RuntimeError, "still on the meta device: ['embed.w', 'head.w']; call fsdp_sim.mini.init_weights"),
    "two dtypes": (two_dtypes, AssertionError, "parameters of one unit must have one dtype"),
    "2-D mesh without names": (
        lambda: fully_shard(Matrix(), mesh=init_device_mesh("cpu", (1, 2))),
        AssertionError,
        'mesh_dim_names=("replicate", "shard")',
    ),
    "3-D mesh": (lambda: fully_shard(Matrix(), mesh=mesh_of(1, 1, 2)), ValueError, "1 or 2 dimensions, but got 3"),
    "smaller mesh": (
        lambda: fully_shard(Matrix(), reshard_after_forward=3),
        ValueError,
        "must divide the number of shards, 2, but is 3",
    ),
    "no bool": (lambda: fully_shard(Matrix(), reshard_after_forward="yes"), ValueError, "not 'yes'"),
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
    "no such method": (
        lambda: register_fsdp_forward_method(fully_shard(Matrix()), "generate"),
        ValueError,
        "FSDPMatrix does not have a method 'generate'",
    ),
    "K = 0": (lambda: fully_shard(Matrix()).set_reduce_scatter_max_input_buffers(0), ValueError, "positive int, got 0"),
    "K = True": (lambda: fully_shard(Matrix()).set_reduce_scatter_max_input_buffers(True), TypeError, "got bool"),
    "no modules": (lambda: fully_shard([]), IndexError, "given no modules"),
    "deepcopy": (lambda: copy.deepcopy(fully_shard(Matrix())), AssertionError, "hooks of FSDPMatrix"),
    "prefetch of a plain module": (
        lambda: fully_shard(Matrix()).set_modules_to_forward_prefetch([Matrix()]),
        ValueError,
        "only modules given to fully_shard",
    ),
    "setter": (
        lambda: fully_shard(Matrix()).set_reshard_after_forward(2),
        ValueError,
        "should be a bool here, not 2",
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


def test_the_module_is_changed_in_place_and_keeps_its_names(ranks):
    def run():
        model = Toy()
        names = [n for n, _ in model.named_parameters()]
        assert shard(model) is model
        assert isinstance(model, Toy)
        assert isinstance(model, FSDPModule)
        assert [n for n, _ in model.named_parameters()] == names
        sliced = fully_shard(nn.Sequential(Matrix(), Matrix(), Matrix()))[:2]
        return type(model).__name__, type(model.layers[0]).__name__, type(sliced).__name__, len(sliced)

    assert ranks(2, run) == [("FSDPToy", "FSDPMatrix", "Sequential", 2)] * 2


def test_ignored_parameters_stay_as_they_are(ranks):
    def run():
        model = Toy()
        fully_shard(model, ignored_params={model.head.w})
        model(torch.randn(2, 4)).sum().backward()
        return type(model.head.w).__name__, type(model.head.w.grad).__name__, type(model.embed.w).__name__

    assert ranks(2, run) == [("Parameter", "Tensor", "DTensor")] * 2


def test_unshard_by_hand(ranks):
    """Before the first forward, with and without a handle; the forward then has nothing to gather."""

    def run():
        model = Toy()
        weights = [layer.w.detach().clone() for layer in model.layers]
        shard(model)
        handle = model.layers[0].unshard(async_op=True)
        assert model.layers[1].unshard() is None
        torch.testing.assert_close(model.layers[1].w.data, weights[1])
        handle.wait()
        torch.testing.assert_close(model.layers[0].w.data, weights[0])
        with Collectives() as mode:
            model(torch.randn(2, 4))
        without_parameters = fully_shard(nn.ReLU())
        without_parameters.unshard(async_op=True).wait()
        return mode.counts

    assert ranks(2, run) == [(4 - 2, 0)] * 2


def test_keeping_parameters_after_backward_spares_the_next_gathers(ranks):
    def run():
        model = Toy()
        plain = twin(model)
        shard(model, reshard_after_forward=False)
        whole, counts = torch.randn(4, 4), []
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            with Collectives() as mode:
                model(my_part(whole)).pow(2).mean().backward()
            plain(whole).pow(2).mean().backward()
            counts.append(mode.counts)
        assert_same_grads(model, plain)
        return counts

    assert ranks(2, run) == [[(4, 0), (0, 4)]] * 2


def test_meta_device_then_materialized_and_another_dtype(ranks):
    def run():
        with torch.device("meta"):
            model = Toy(sizes=(8, 3, 1))
        shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        plain = Toy(sizes=(8, 3, 1))
        for p in plain.parameters():
            nn.init.constant_(p, 0.5)
        whole = torch.randn(4, 4, dtype=torch.float64)
        for m, x in ((model.double(), my_part(whole)), (plain.double(), whole)):
            m(x).pow(2).mean().backward()
        assert_same_grads(model, plain)

    ranks(4, run)
