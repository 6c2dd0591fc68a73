"""Which tensors carry the hooks, however they are nested."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from fsdp_sim.mini.autograd import grad_tensors, in_backward, register_post_backward, register_pre_backward

Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    x: torch.Tensor
    name: str


def leaf(value=1.0):
    return torch.tensor([value], requires_grad=True)


def group_that_notes(events):
    return SimpleNamespace(post_backward=lambda: events.append("post_backward"))


def test_nested_tensors_are_found_in_order():
    a, b, c, d = (leaf(float(i)) for i in range(4))
    found = grad_tensors(([a, {"k": b}], Pair(c, torch.ones(1)), Batch(d, "batch"), None, 3))
    assert [t.item() for t in found] == [0, 1, 2, 3]


def test_post_backward_runs_when_the_last_input_has_its_gradient():
    events = []
    x, y = leaf(2.0), leaf(3.0)
    for t in (x, y):
        t.register_hook(lambda g: events.append("gradient of an input"))
    ((batch, same),), kwargs = register_post_backward(group_that_notes(events), ((Batch(x, "x"), "text"),), {"y": y})
    assert same == "text"
    (batch.x * kwargs["y"]).sum().backward()
    assert events == ["post_backward", "gradient of an input", "gradient of an input"]
    assert (x.grad.item(), y.grad.item()) == (3.0, 2.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_inputs_without_gradients_are_passed_on(enabled):
    x = torch.ones(1) if enabled else leaf()
    with torch.set_grad_enabled(enabled):
        (out,), _ = register_post_backward(group_that_notes([]), (x,), {})
    assert out is x


def test_pre_backward_runs_before_the_gradient_of_any_input():
    events = []
    x = leaf()
    x.register_hook(lambda g: events.append("input"))
    output = Pair(x * 2, torch.ones(1))
    register_pre_backward(output, lambda grad: events.append("pre_backward"), "Matrix")
    output.first.sum().backward()
    assert events == ["pre_backward", "input"]


def test_a_view_is_warned_about():
    with pytest.warns(UserWarning, match=r"Matrix returned a view.*x = x \+ y"):
        register_pre_backward((leaf() * 2).view(1, 1), lambda grad: grad, "Matrix")


def test_recomputation_is_told_from_forward():
    assert not in_backward()
    seen = []
    x = leaf()
    x.register_hook(lambda g: seen.append(in_backward()))
    x.sum().backward()
    assert seen == [True]
