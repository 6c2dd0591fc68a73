"""The transforms of `torch.func` go through a sharded model as through torch's, and leave nothing behind."""

import pytest
import torch
import torch.distributed.fsdp
from torch.func import grad, jacrev, jvp, vjp, vmap

import fsdp_sim.mini
from tests.mini.models import Toy, shard
from tests.mini.parity.tools import groups_of, raised, square_loss

TORCH, MINI = torch.distributed.fsdp, fsdp_sim.mini

TRANSFORMS = {
    "grad": lambda f, x: grad(lambda t: f(t).square().sum())(x),
    "vjp": lambda f, x: (lambda out, back: (out, *back(torch.ones_like(out))))(*vjp(f, x)),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "vmap": lambda f, x: vmap(f)(x),
    "grad of vmap": lambda f, x: grad(lambda t: vmap(f)(t).square().sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda t: f(t).square().sum()))(x),
    "backward of jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1].square().sum(),
}


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


def transformed(impl, transform, reshard_after_forward):
    """What the transform gives, and then the shards' gradients of an ordinary step."""
    torch.manual_seed(0)
    model = shard(Toy(2), impl.fully_shard, reshard_after_forward=reshard_after_forward)
    x = torch.randn(3, 4)
    numbers = flat(TRANSFORMS[transform](model, x))
    if transform == "backward of jvp":
        numbers[0].backward()
        numbers += [p.grad.to_local() for p in model.parameters()]
    model.zero_grad()
    for p in (p for group in groups_of(impl, model) for p in group.fsdp_params):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(p.unsharded_param)
    model.reset_iter_state()
    square_loss(model(x)).backward()
    return [t.detach() for t in numbers] + [p.grad.to_local() for p in model.parameters()]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_what_it_gives_with_torchs(ranks, transform, reshard_after_forward):
    def run():
        numbers = []
        for impl in (TORCH, MINI):
            error = raised(lambda impl=impl: numbers.append(transformed(impl, transform, reshard_after_forward)))
            assert error is None, (impl.__name__, error)
        assert len(numbers[0]) == len(numbers[1])
        assert all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))

    ranks(2, run)
