"""Where torch raises the mini raises, the same type of exception."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.mini.models import Matrix
from tests.mini.networks import Net
from tests.mini.programs import MARKS, MINI, TORCH, Run, program, sharded, step

pytestmark = MARKS


def tied_across_units(recorder, fsdp):
    model = Net()
    model.layers[1].w = model.layers[0].w
    model = sharded(recorder, fsdp, model)
    model(torch.ones(2, 4))


def a_layer_before_the_root(recorder, fsdp):
    model = sharded(recorder, fsdp)
    model.layers[0](torch.ones(2, 4))
    model(torch.ones(2, 4))


def still_on_meta(recorder, fsdp):
    with torch.device("meta"):
        model = Net()
    sharded(recorder, fsdp, model)(torch.ones(2, 4))


def a_list_as_root(recorder, fsdp):
    model = nn.Sequential(Matrix(), Matrix())
    fsdp.fully_shard([model[0], model[1]])
    model(torch.ones(2, 4))


def not_contiguous(recorder, fsdp):
    model = Matrix()
    model.w = nn.Parameter(torch.ones(4, 6).t())
    fsdp.fully_shard(model)


def a_scalar(recorder, fsdp):
    model = Matrix()
    model.scale = nn.Parameter(torch.ones(()))
    fsdp.fully_shard(model)


def two_trainable_dtypes(recorder, fsdp):
    model = Matrix()
    model.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    fsdp.fully_shard(model)(torch.ones(2, 4))


def on_mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None) -> Run:
    return lambda recorder, fsdp: fsdp.fully_shard(Matrix(), mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))


def on_layer(use: Callable[[Any, Any], object], model: Callable[[], Any] = Net, after_a_step: bool = False) -> Run:
    """``use(fsdp, model)`` of a sharded model."""

    def run(recorder, fsdp):
        sharded_model = sharded(recorder, fsdp, model())
        if after_a_step:
            step(recorder, sharded_model)
        use(fsdp, sharded_model)

    return run


def with_option(**options: Any) -> Run:
    return lambda recorder, fsdp: fsdp.fully_shard(Matrix(), **options)


def on_stream_with_replicas(recorder, fsdp):
    model = fsdp.fully_shard(Matrix(), mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
    model.set_all_reduce_hook(lambda gradient: None, stream=recorder.device.Stream())


ERRORS: dict[str, Run] = {
    "a container without a forward": lambda recorder, fsdp: fsdp.fully_shard(nn.ModuleList([Matrix()])),
    "a dict without a forward": lambda recorder, fsdp: fsdp.fully_shard(nn.ModuleDict({"a": Matrix()})),
    "sharded twice": lambda recorder, fsdp: fsdp.fully_shard(fsdp.fully_shard(Matrix())),
    "tied across units": tied_across_units,
    "a layer before the root": a_layer_before_the_root,
    "still on meta": still_on_meta,
    "a list as root": a_list_as_root,
    "not contiguous": not_contiguous,
    "a scalar parameter": a_scalar,
    "two trainable dtypes": two_trainable_dtypes,
    "a mesh of three dimensions": on_mesh((2, 2, 2), ("a", "b", "c")),
    "a mesh of two without names": on_mesh((2, 4), None),
    "reshard_after_forward 3 of 8": with_option(reshard_after_forward=3),
    "reshard_after_forward 0": with_option(reshard_after_forward=0),
    "reshard_after_forward 16": with_option(reshard_after_forward=16),
    "reshard_after_forward text": with_option(reshard_after_forward="yes"),
    "reshard_after_forward 2.0": with_option(reshard_after_forward=2.0),
    "deepcopy": on_layer(lambda fsdp, model: copy.deepcopy(model)),
    "forward prefetch of a plain module": on_layer(
        lambda fsdp, model: model.set_modules_to_forward_prefetch([Matrix()])
    ),
    "backward prefetch of a plain module": on_layer(
        lambda fsdp, model: model.set_modules_to_backward_prefetch([Matrix()])
    ),
    "0 input buffers": on_layer(lambda fsdp, model: model.set_reduce_scatter_max_input_buffers(0)),
    "input buffers True": on_layer(lambda fsdp, model: model.set_reduce_scatter_max_input_buffers(True)),
    "input buffers as text": on_layer(lambda fsdp, model: model.set_reduce_scatter_max_input_buffers("2")),
    "set_reshard_after_forward int": on_layer(lambda fsdp, model: model.set_reshard_after_forward(2)),
    "all-reduce hook on a stream with replicas": on_stream_with_replicas,
    "a forward method that is not there": on_layer(
        lambda fsdp, model: fsdp.register_fsdp_forward_method(model, "none")
    ),
    "streams shared with a plain module": on_layer(lambda fsdp, model: fsdp.share_comm_ctx([model, Matrix()])),
    "reset_iter_state not on the root": on_layer(
        lambda fsdp, model: model.layers[0].reset_iter_state(), after_a_step=True
    ),
    "a method without its parameters": on_layer(lambda fsdp, model: model.middle(torch.ones(2, 4)) + model.head.w),
    "sharded again in a list": on_layer(lambda fsdp, model: fsdp.fully_shard([model.layers[0], model.layers[1]])),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    errors = [program(ERRORS[name], fsdp) for fsdp in (TORCH, MINI)]
    assert errors[0][0].startswith("raises")
    assert errors[1] == errors[0]
