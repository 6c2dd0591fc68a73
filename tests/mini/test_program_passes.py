"""The mini issues torch's program for every order of forwards and backwards, also in part or after an exception."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.mini.models import Matrix
from tests.mini.networks import Net
from tests.mini.programs import MARKS, Run, assert_same_program, sharded, step

pytestmark = MARKS


SCENARIOS: dict[str, Run] = {}


def scenario(run: Run) -> Run:
    SCENARIOS[run.__name__.replace("_", " ")] = run
    return run


@scenario
def a_layer_on_its_own_after_the_root(recorder, fsdp):
    model = sharded(recorder, fsdp)
    step(recorder, model)
    recorder.mark("the layer alone")
    model.layers[1](torch.ones(2, 4)).sum().backward()
    model.layers[1](torch.ones(2, 4, requires_grad=True)).sum().backward()
    step(recorder, model)
    return model


@scenario
def evaluation_between_steps(recorder, fsdp):
    model = sharded(recorder, fsdp)
    with torch.no_grad():
        model(torch.ones(2, 4))
    step(recorder, model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    model.train()
    step(recorder, model)
    return model


@scenario
def inference_mode(recorder, fsdp):
    model = sharded(recorder, fsdp)
    with torch.inference_mode():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    return model


@scenario
def a_forward_whose_backward_never_comes(recorder, fsdp):
    model = sharded(recorder, fsdp)
    model(torch.ones(2, 4))
    step(recorder, model)
    model(torch.ones(2, 4))
    step(recorder, model)
    return model


@scenario
def one_forward_one_backward(recorder, fsdp):
    """Micro-batches in the order of a pipeline stage; only the last backward is marked as last."""
    model = sharded(recorder, fsdp)
    losses = [model(torch.ones(2, 4)).sum() for _ in range(2)]
    for number in range(4):
        model.set_is_last_backward(number == 3)
        recorder.mark(f"backward {number}")
        losses.pop(0).backward()
        if number < 2:
            recorder.mark(f"forward {number + 2}")
            losses.append(model(torch.ones(2, 4)).sum())
    return model


@scenario
def pipeline_with_everything_kept_until_the_last(recorder, fsdp):
    model = sharded(recorder, fsdp, reshard_after_forward=False)
    losses = [model(torch.ones(2, 4)).sum() for _ in range(3)]
    for number, loss in enumerate(losses):
        last = number == 2
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last)
        loss.backward()
    return model


@scenario
def two_backwards_of_one_forward(recorder, fsdp):
    model = sharded(recorder, fsdp)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    recorder.mark("again")
    loss.backward()
    return model


@scenario
def the_gradient_of_the_input_alone(recorder, fsdp):
    model = sharded(recorder, fsdp)
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    step(recorder, model)
    return model


@scenario
def two_losses_of_one_model(recorder, fsdp):
    model = sharded(recorder, fsdp)
    (model(torch.ones(2, 4)).sum() + model(torch.ones(3, 4)).sum()).backward()
    return model


@scenario
def gradient_sync_of_the_root_alone_switched_off(recorder, fsdp):
    model = sharded(recorder, fsdp)
    for last in (False, True):
        model.set_requires_gradient_sync(last, recurse=False)
        model.layers[1].set_reshard_after_backward(last)
        model(torch.ones(2, 4)).sum().backward()
    return model


@scenario
def gradient_sync_of_one_layer_switched_off(recorder, fsdp):
    model = sharded(recorder, fsdp, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for last in (False, False, True):
        model.layers[1].set_requires_gradient_sync(last)
        model(torch.ones(2, 4)).sum().backward()
    return model


@scenario
def two_models(recorder, fsdp):
    models = [sharded(recorder, fsdp) for _ in range(2)]
    models[1](models[0](torch.ones(2, 4))).sum().backward()
    return models


@scenario
def two_models_that_share_streams(recorder, fsdp):
    models = [sharded(recorder, fsdp) for _ in range(2)]
    fsdp.share_comm_ctx(models)
    for model in models:  # torch empties the shared context at the lazy init of each of them: after, there is no more
        with torch.no_grad():
            model(torch.ones(2, 4))
    for _ in range(2):
        models[1](models[0](torch.ones(2, 4))).sum().backward()
    return models


@scenario
def an_exception_in_forward(recorder, fsdp):
    model = sharded(recorder, fsdp)
    step(recorder, model)
    fail = model.layers[1].register_forward_hook(raise_error)
    try:
        model(torch.ones(2, 4))
    except ZeroDivisionError:
        recorder.mark("failed")
    fail.remove()
    model.reset_iter_state()
    step(recorder, model)
    return model


@scenario
def an_exception_in_backward(recorder, fsdp):
    model = sharded(recorder, fsdp)
    step(recorder, model)
    output = model.layers[0].register_forward_hook(
        lambda module, args, output: output.register_hook(raise_error) and None
    )
    try:
        model(torch.ones(2, 4)).sum().backward()
    except ZeroDivisionError:
        recorder.mark("failed")
    output.remove()
    model.reset_iter_state()
    step(recorder, model)
    return model


def raise_error(*_):
    raise ZeroDivisionError


class ChunkedLoss(Net):
    """The head is in a list with the last layer, and called by the loss once per chunk, not by the model."""

    def forward(self, x):
        return self.middle(self.embed(x))

    def loss(self, x, whole):
        hidden = self(x)
        if whole:
            return sum(self.head(chunk).sum() for chunk in hidden.chunk(2))
        detached = hidden.detach().requires_grad_()
        for chunk in detached.chunk(2):
            self.head(chunk).sum().backward()
        return (hidden * detached.grad).sum()


def chunked_loss(recorder, fsdp, whole):
    model = ChunkedLoss()
    for name, module in model.named_modules():
        if isinstance(module, Matrix):
            recorder.watch(module, name)
    a, b, c = model.layers
    for unit in (a, b, [c, model.head]):
        fsdp.fully_shard(unit)
    fsdp.fully_shard(model)
    for _ in range(2):
        model.loss(torch.ones(2, 4), whole).backward()
        model.zero_grad()
    return model


@scenario
def a_chunked_loss(recorder, fsdp):
    return chunked_loss(recorder, fsdp, whole=True)


@scenario
def a_chunked_loss_with_a_backward_per_chunk(recorder, fsdp):
    return chunked_loss(recorder, fsdp, whole=False)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    assert_same_program(SCENARIOS[name])
