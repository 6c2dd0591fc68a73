"""Weights that are cast to fp8 before the all-gather: the program is what torch issues for `fsdp_pre_all_gather`.

torchao's `WeightWithDynamicFloat8CastTensor` does it with scales; the stand-in here casts alone, so that the recording
needs torch only.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from fsdp_sim.measure.record import ProgramRecorder, record
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan

aten = torch.ops.aten
STAYS = {  # as in torchao's float8/fsdp_utils.py
    aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor, aten.copy_.default, aten.view.default,
    aten.as_strided.default, aten._to_copy.default, aten._pin_memory.default, aten.split.Tensor, aten.clone.default,
    aten.detach.default,
}  # fmt: skip


def wrapper(cls: type, like: torch.Tensor, dtype: torch.dtype) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=dtype, device=like.device,
        requires_grad=like.requires_grad,
    )  # fmt: skip


class CastBeforeGather(torch.Tensor):
    """A shard that travels in fp8."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return wrapper(cls, inner, inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return CastBeforeGather(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, cls, out) if func in STAYS else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner.to(torch.float8_e4m3fn),), ()

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (Gathered(outputs[0], param_dtype), outputs)


class Gathered(torch.Tensor):
    """A whole weight in fp8, which computes in another dtype."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, dtype: torch.dtype) -> Any:
        return wrapper(cls, data, dtype)

    def __init__(self, data: torch.Tensor, dtype: torch.dtype) -> None:
        self.data_in_fp8, self.computes_in = data, dtype

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in STAYS:
            return cls(func(args[0].data_in_fp8, *args[1:], **(kwargs or {})), args[0].computes_in)
        return func(*tree_map_only(cls, lambda t: t.data_in_fp8.to(t.computes_in), args), **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(CastBeforeGather(torch.ones(8, 4))) for _ in range(2))
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (self.first.sum() + self.second.sum() + self.bias.sum())


def train(recorder: ProgramRecorder) -> object:
    model = nn.Sequential(Layer(), Layer())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name, layer in model.named_children():
        recorder.watch(layer, name)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    recorder.mark("step 0 microbatch 0: forward")
    loss = model(torch.ones(2, 4)).sum()
    recorder.mark("step 0 microbatch 0: backward")
    loss.backward()
    return model


def test_the_program_of_weights_that_travel_in_fp8_is_line_by_line_what_torch_issues() -> None:
    params = (Param("first", (8, 4), gather_dtype="fp8"), Param("second", (8, 4), gather_dtype="fp8"))
    params += (Param("bias", (4,)),)
    units = (Unit("root", segments=(...,)), Unit("0", params), Unit("1", params))
    plan = Plan(
        param_dtype="bf16", reduce_dtype="fp32", fp8="tensorwise", fp8_all_gather=True, fp8_precompute_scale=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = record(train, world_size=4)

    ours = build(units, plan, 4).lines()

    assert ours[: ours.index("--- step 0: optimizer")] == theirs
