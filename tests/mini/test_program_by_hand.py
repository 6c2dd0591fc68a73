"""The mini issues torch's program also where the user steps in: unshard, reshard, prefetch lists, setters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from tests.mini.models import Matrix
from tests.mini.networks import LayerUnused, Net, NoOwnParameters
from tests.mini.programs import MARKS, Run, assert_same_program, sharded, step

pytestmark = MARKS


SCENARIOS: dict[str, Run] = {}


def scenario(run: Run) -> Run:
    SCENARIOS[run.__name__.replace("_", " ")] = run
    return run


@scenario
def unshard_by_hand_before_the_first_forward(recorder, fsdp):
    model = sharded(recorder, fsdp)
    model.unshard()
    for layer in model.layers:
        layer.unshard()
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def unshard_asynchronously_and_wait(recorder, fsdp):
    model = sharded(recorder, fsdp)
    for _ in range(2):
        handles = [module.unshard(async_op=True) for module in (model, *model.layers)]
        for handle in handles:
            handle.wait()
            handle.wait()
        step(recorder, model)
    return model


@scenario
def unshard_asynchronously_and_let_forward_wait(recorder, fsdp):
    model = sharded(recorder, fsdp)
    for _ in range(2):
        for module in (model, *model.layers):
            module.unshard(async_op=True)
        step(recorder, model)
    return model


@scenario
def unshard_what_has_no_parameters(recorder, fsdp):
    model = sharded(recorder, fsdp, NoOwnParameters())
    assert model.unshard() is None
    model.unshard(async_op=True).wait()
    model.reshard()
    step(recorder, model)
    return model


@scenario
def unshard_by_hand_in_backward(recorder, fsdp):
    model = sharded(recorder, fsdp)
    model.layers[2].register_full_backward_pre_hook(lambda *_: model.layers[0].unshard())
    step(recorder, model)
    return model


@scenario
def no_unshard_in_backward(recorder, fsdp):
    """Backward does not read the weight of a layer whose input needs no gradient."""
    model = Net()
    recorder.watch(model.embed, "embed")
    fsdp.fully_shard(model.embed)
    model = sharded(recorder, fsdp, model)
    model.embed.set_unshard_in_backward(False)
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def reshard_by_hand_between_forward_and_backward(recorder, fsdp):
    model = sharded(recorder, fsdp, reshard_after_forward=False)

    def loss(model):
        value = model(torch.ones(2, 4)).sum()
        for module in (model, *model.layers):
            module.reshard()
            module.reshard()
        return value

    step(recorder, model, loss)
    step(recorder, model)
    return model


@scenario
def reshard_what_keeps_a_slice(recorder, fsdp):
    model = sharded(recorder, fsdp, reshard_after_forward=2)

    def loss(model):
        value = model(torch.ones(2, 4)).sum()
        for module in (model, *model.layers):
            module.reshard()
        return value

    step(recorder, model, loss)
    step(recorder, model)
    return model


@scenario
def set_reshard_after_forward_between_steps(recorder, fsdp):
    model = sharded(recorder, fsdp)
    step(recorder, model)
    model.set_reshard_after_forward(True)
    step(recorder, model)
    model.set_reshard_after_forward(False, recurse=False)
    step(recorder, model)
    model.set_reshard_after_forward(False)
    step(recorder, model)
    return model


@scenario
def outputs_in_another_dtype(recorder, fsdp):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    model = sharded(recorder, fsdp, NoOwnParameters(), mp_policy=policy)
    step(recorder, model)
    return model


@scenario
def a_policy_of_the_dtypes_that_are_there(recorder, fsdp):
    """Nothing is cast, and no memory is taken for casts."""
    model = sharded(recorder, fsdp, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32))
    step(recorder, model)
    return model


@scenario
def inputs_that_are_not_cast(recorder, fsdp):
    model = sharded(recorder, fsdp, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
    step(recorder, model, lambda model: model(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    return model


@scenario
def freezing_and_thawing_between_steps(recorder, fsdp):
    model = sharded(recorder, fsdp)
    for frozen_names in (("layers.0.w",), (), ("layers.1.w", "head.w"), ()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen_names)
        step(recorder, model)
    return model


@scenario
def gradients_kept_between_steps(recorder, fsdp):
    model = sharded(recorder, fsdp)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad(set_to_none=False)
    return model


@scenario
def clipped_gradients(recorder, fsdp):
    model = sharded(recorder, fsdp)
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return model


@scenario
def state_dict_between_forward_and_backward(recorder, fsdp):
    model = sharded(recorder, fsdp, reshard_after_forward=False)

    def loss(model):
        value = model(torch.ones(2, 4)).sum()
        recorder.mark("state dict")
        model.state_dict()
        return value

    step(recorder, model, loss)
    step(recorder, model)
    return model


@scenario
def load_state_dict_between_steps(recorder, fsdp):
    model = sharded(recorder, fsdp)
    step(recorder, model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    step(recorder, model)
    return model


@scenario
def another_dtype_before_the_first_forward(recorder, fsdp):
    model = sharded(recorder, fsdp).double()
    step(recorder, model, lambda model: model(torch.ones(2, 4, dtype=torch.float64)).sum())
    return model


@scenario
def moved_between_forward_and_backward(recorder, fsdp):
    model = sharded(recorder, fsdp)
    with torch.no_grad():
        model(torch.ones(2, 4))
    recorder.mark("to")
    model.to("cpu")
    step(recorder, model)
    return model


@scenario
def built_on_meta(recorder, fsdp):
    with torch.device("meta"):
        model = Net()
    model = sharded(recorder, fsdp, model).to_empty(device="cpu")
    step(recorder, model)
    return model


@scenario
def another_method_than_forward(recorder, fsdp):
    model = Net()
    model.encode = lambda x: model.middle(model.embed(x))
    sharded(recorder, fsdp, model)
    fsdp.register_fsdp_forward_method(model, "encode")
    fsdp.register_fsdp_forward_method(torch.nn.Linear(1, 1), "nothing")
    step(recorder, model, lambda model: model.encode(torch.ones(2, 4)).sum())
    step(recorder, model)
    return model


@scenario
def a_forward_prefetch_that_misses(recorder, fsdp):
    """The prefetched unit does not run."""
    model = sharded(recorder, fsdp, LayerUnused())
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def a_backward_prefetch_that_misses(recorder, fsdp):
    """The prefetched unit was already done with its backward."""
    model = sharded(recorder, fsdp)
    model.layers[1].set_modules_to_backward_prefetch([model.layers[2], model.layers[0]])
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def prefetching_everything_from_the_root(recorder, fsdp):
    model = sharded(recorder, fsdp)
    model.set_modules_to_forward_prefetch(list(model.layers))
    model.set_modules_to_backward_prefetch(list(model.layers)[::-1])
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def units_of_different_settings(recorder, fsdp):
    model = Net()
    a, b, c = model.layers
    for layer, options in (
        (a, {"reshard_after_forward": False}),
        (b, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)}),
        (c, {"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": 4}),
    ):
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model)
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def units_on_different_meshes(recorder, fsdp):
    model = Net()
    meshes = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=meshes["shard"])
    fsdp.fully_shard(model, mesh=meshes)
    step(recorder, model)
    step(recorder, model)
    return model


@scenario
def a_slice_of_a_sequential(recorder, fsdp):
    model = nn.Sequential(*(Matrix() for _ in range(3)))
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    part = model[1:]
    assert not isinstance(part, fsdp.FSDPModule)
    part(torch.ones(2, 4)).sum().backward()
    return model


@scenario
def shard_placements_on_dim_0(recorder, fsdp):
    model = sharded(recorder, fsdp, shard_placement_fn=lambda parameter: Shard(0))
    step(recorder, model)
    return model


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    assert_same_program(SCENARIOS[name])
