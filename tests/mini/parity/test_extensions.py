"""Parameters that say themselves what is gathered of them: the mini does with them what torch does."""

import types
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

import fsdp_sim.mini
from tests.mini.parity.tools import Issued, raised

TORCH, MINI = torch.distributed.fsdp, fsdp_sim.mini
KEEPS_CLASS = {"detach", "new_zeros", "split", "slice", "view", "as_strided", "_to_copy", "clone", "alias"}


class Wrapped(torch.Tensor):
    """A wrapper subclass that computes with the tensor in it."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=data.device,
        )  # fmt: skip

    def __init__(self, data):
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = tree_map(lambda t: t._data if isinstance(t, cls) else t, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return (
            tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, out)
            if func._opname in KEEPS_CLASS
            else out
        )

    def __repr__(self):
        return f"{type(self).__name__}({self._data})"


class AsBFloat16(Wrapped):
    """Gathered in bfloat16, computed with in bfloat16."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1
        rows = -(-outer_size[0] // mesh.size())
        assert getattr(module, "weight", None) is not None
        padded = self._data.new_zeros(rows, *outer_size[1:])
        padded[: self._data.size(0)] = self._data
        return (padded.to(torch.bfloat16),), outer_size

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        assert gathered.dtype == torch.bfloat16
        if out is not None:
            assert out.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
            return None
        return gathered, ()


class Quantized(Wrapped):
    """Gathered as one byte per element and a scale per rank; the whole tensor has memory of its own."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self._data.abs().amax().clamp(min=1e-12) / 127
        return ((self._data / scale).round().to(torch.int8), scale.view(1)), len(self._data)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        data, scales = outputs
        whole = (data.view(len(scales), -1) * scales[:, None].to(param_dtype)).view(data.shape)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (whole,)


def wrapped_model(cls, sizes):
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))
    for layer in model:
        layer.weight = nn.Parameter(cls(layer.weight.detach().clone()))
    return model


def trained(impl, cls, sizes, **options):
    """Outputs, shards and their gradients of two steps, and the sizes and dtypes of what was gathered."""
    torch.manual_seed(0)
    model = wrapped_model(cls, sizes)
    for layer in model:
        impl.fully_shard(layer, **options)
    impl.fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = []
    with Issued() as issued:
        for step in range(2):
            x = torch.randn(3, sizes[0], generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            out.float().square().sum().backward()
            grads = [p.grad.to_local() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            numbers += [out.detach(), *grads, *(p.to_local()._data.detach().clone() for p in model.parameters())]
    return numbers, [(c.name, c.numel, c.dtype) for c in issued.log]


CASES = {
    "bfloat16": (2, AsBFloat16, (4, 6, 8), {}),
    "bfloat16, uneven": (2, AsBFloat16, (4, 7, 3), {}),
    "bfloat16, kept": (2, AsBFloat16, (4, 7, 3), {"reshard_after_forward": False}),
    "bfloat16, offloaded": (2, AsBFloat16, (4, 6, 8), {"offload_policy": TORCH.CPUOffloadPolicy(pin_memory=False)}),
    "quantized": (2, Quantized, (4, 6, 8), {}),
    "quantized, mixed": (2, Quantized, (4, 6, 8), {"mp_policy": TORCH.MixedPrecisionPolicy(torch.bfloat16)}),
    "one rank": (1, AsBFloat16, (4, 6, 3), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_torchs_to_the_last_bit(ranks, case):
    world_size, cls, sizes, options = CASES[case]

    def run():
        (torchs, torchs_sent), (minis, minis_sent) = (trained(impl, cls, sizes, **options) for impl in (TORCH, MINI))
        assert len(torchs) == len(minis)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(torchs, minis, strict=True))
        assert torchs_sent == minis_sent
        return minis_sent

    (sent, *_) = ranks(world_size, run)
    if world_size > 1:
        numel = -(-sizes[1] // 2) * 2 * sizes[0]
        whole = (numel, torch.bfloat16) if cls is AsBFloat16 else (numel + 2 * 4, torch.uint8)  # two scales of 4 bytes
        assert sent[0] == ("AG", *whole)


def test_on_a_hybrid_mesh_the_extension_is_given_the_mesh_of_its_shards(ranks):
    def run():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        torchs, minis = (trained(impl, AsBFloat16, (4, 6, 8), mesh=mesh)[0] for impl in (TORCH, MINI))
        assert all(torch.equal(a, b) for a, b in zip(torchs, minis, strict=True))

    ranks(2, run)


@pytest.mark.parametrize("impl", [TORCH, MINI], ids=["of_torch", "of_mini"])
def test_methods_given_to_the_shards_after_sharding_are_found(ranks, impl):
    def run():
        model = nn.Linear(4, 6, bias=False)
        impl.fully_shard(model)
        shard = model.weight._local_tensor
        shard.fsdp_pre_all_gather = types.MethodType(lambda self, mesh: ((self.to(torch.bfloat16),), None), shard)

        def post(self, outputs, metadata, param_dtype, *, out=None):
            return (outputs[0], ()) if out is None else None

        shard.fsdp_post_all_gather = types.MethodType(post, shard)
        return model(torch.ones(1, 4, dtype=torch.bfloat16)).dtype

    assert ranks(2, run) == [torch.bfloat16] * 2


class OneMethodOnly(Wrapped):
    def fsdp_pre_all_gather(self, mesh):
        raise NotImplementedError


class OtherArguments(AsBFloat16):
    def fsdp_pre_all_gather(self, mesh, outer_size):
        raise NotImplementedError


class Unpadded(AsBFloat16):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self._data.to(torch.bfloat16),), None


@pytest.mark.parametrize("impl", [TORCH, MINI], ids=["of_torch", "of_mini"])
@pytest.mark.parametrize(
    ("cls", "rows", "words"),
    [
        (OneMethodOnly, 4, ("fsdp_pre_all_gather and fsdp_post_all_gather",)),
        (OtherArguments, 4, ("mesh", "outer_size", "mp_policy")),
        (Unpadded, 3, ("padded", "[2, 4]")),
    ],
)
def test_an_extension_that_does_not_keep_to_the_protocol(ranks, impl, cls, rows, words):
    def run():
        def wrong():
            model = wrapped_model(cls, (4, rows))
            impl.fully_shard(model)
            if cls is Unpadded and dist.get_rank() == 0:
                raise AssertionError("padded [2, 4]: only the rank whose shard is short can see it")
            model(torch.randn(1, 4))

        return raised(wrong)

    for kind, text in ranks(2, run):
        assert kind == "AssertionError"
        assert all(word in text.replace("(2, 4)", "[2, 4]") for word in words)


def test_a_smaller_mesh_after_forward_is_refused(ranks):
    def run():
        model = wrapped_model(AsBFloat16, (4, 8, 8))
        MINI.fully_shard(model[0], reshard_after_forward=2)
        MINI.fully_shard(model)
        return raised(lambda: model(torch.ones(1, 4, dtype=torch.bfloat16)))

    for kind, text in ranks(4, run):
        assert kind == "NotImplementedError"
        assert "0.weight has an all-gather extension" in text
