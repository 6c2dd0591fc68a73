"""Training: N ranks with a part of the batch each learn exactly what one process with the whole batch learns."""

import warnings
from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tests.mini.models import (
    Matrix,
    Toy,
    Transformer,
    assert_same_grads,
    assert_same_params,
    batches,
    mean_over_ranks,
    my_part,
    shard,
    token_loss,
    twin,
)
from tests.mini.parity.tools import backward_of_both, kind, reshard_all, sharded_toy, square_loss, train_side_by_side


def test_a_transformer_has_the_losses_of_one_process(ranks, impl):
    def run():
        model = Transformer(2)
        plain = twin(model)
        shard(model, impl.fully_shard)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
        losses = []
        for batch in batches(8):
            loss, plain_loss = token_loss(model, my_part(batch)), token_loss(plain, batch)
            for value in (loss, plain_loss):
                value.backward()
            assert_same_grads(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append((mean_over_ranks(loss), plain_loss.item()))
        return losses

    for losses in ranks(3, run):
        for loss, plain_loss in losses:
            assert loss == pytest.approx(plain_loss, rel=1e-5)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("Adam", {"foreach": False}),
        ("AdamW", {"fused": True}),
    ],
    ids=str,
)
def test_optimizers_update_shards(ranks, impl, optimizer, options):
    def run():
        model, plain = sharded_toy(impl, 2, sizes=(5, 3, 1))
        optimizers = [getattr(torch.optim, optimizer)(m.parameters(), lr=0.1, **options) for m in (model, plain)]
        for _ in range(3):
            whole = torch.randn(4, 4)
            backward_of_both(model, plain, whole)
            for optim in optimizers:
                optim.step()
                optim.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        assert_same_params(model, plain, rtol=1e-4, atol=1e-5)
        return {p.dtype for p in model.parameters()}

    assert ranks(2, run) == [{torch.float32}] * 2


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, True), (2.0, False), (1.0, None), (float("inf"), None)])
def test_clip_grad_norm(ranks, impl, norm_type, foreach):
    def run():
        model, plain = sharded_toy(impl, 2, sizes=(5, 3, 2))
        whole = 5 * torch.randn(6, 4)
        backward_of_both(model, plain, whole)
        norms = [
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
            for m in (model, plain)
        ]
        assert norms[1] > 0.1
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        assert_same_grads(model, plain)

    ranks(2, run)


def test_grad_scaler(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        whole = torch.randn(4, 4)
        for m, x, scaler, optimizer in zip((model, plain), (my_part(whole), whole), scalers, optimizers, strict=True):
            scaler.scale(square_loss(m(x))).backward()
            scaler.unscale_(optimizer)
        assert_same_grads(model, plain)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert_same_params(model, plain)
        return scalers[0].get_scale()

    assert ranks(2, run) == [64.0] * 2


# Forwards and backwards of every shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_between_steps(ranks, impl, mode):
    def run():
        model, plain = sharded_toy(impl)
        for _ in range(2):
            train_side_by_side(model, plain, steps=1)
            x = torch.randn(2, 4)
            with mode():
                out = model(x)
            assert not out.requires_grad
            torch.testing.assert_close(out, plain(x).detach())
            reshard_all(model)  # no backward comes that would do it

    ranks(2, run)


def test_backward_to_the_input_alone_frees_what_it_gathered(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        x = torch.randn(2, 4, requires_grad=True)
        square_loss(model(x)).backward(inputs=[x])
        left = [p.grad for p in model.parameters()], {kind(p) for p in model.parameters()}
        train_side_by_side(model, plain)
        return left

    assert ranks(2, run) == [([None] * 5, {"sharded"})] * 2


def test_a_module_with_a_setattr_of_its_own(ranks, impl):
    """Parameters are swapped through it."""

    def run():
        class Watches(Matrix):
            def __setattr__(self, name, value):
                if name == "w" and "seen" in self.__dict__:
                    self.seen.append(kind(value))
                super().__setattr__(name, value)

        model = Watches()
        model.seen = []
        plain = twin(model)
        impl.fully_shard(model)
        train_side_by_side(model, plain, steps=1)
        return model.seen

    assert ranks(2, run) == [["sharded", "unsharded", "sharded"]] * 2


def test_autocast(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        x = torch.randn(2, 4)
        grads = []
        for m in (model, plain):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = m(x)
            assert out.dtype == torch.bfloat16
            square_loss(out.float()).backward()
            grads.append([p.grad for p in m.parameters()])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)

    ranks(2, run)


# Inputs and outputs


@dataclass
class Pair:
    a: torch.Tensor
    b: list = field(default_factory=list)
    name: str = "pair"


Named = namedtuple("Named", "x rest")


class Nested(nn.Module):
    """Tensors come and go inside dataclasses, tuples, lists, dicts and keyword arguments."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, given: Pair, *, scale: torch.Tensor, more: dict | None = None):
        out = (given.a + given.b[0][0]) @ self.w * scale
        if more:
            out = out + more["x"] @ self.w
        return {"pair": Pair(out * 2, [(out, 3)]), "named": Named(out.sum(), None), "text": "left alone"}


class UsesNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = Matrix(), Nested(), Nested()

    def forward(self, x):
        x = self.first(x)
        out = self.one(Pair(x, [(x,)]), scale=x.mean(), more={"x": x})
        out = self.two(Pair(out["pair"].a, [(out["pair"].b[0][0],)]), scale=out["named"].x)
        assert type(out["pair"]) is Pair
        assert type(out["named"]) is Named
        assert out["text"] == "left alone"
        return out


def test_tensors_inside_nested_inputs_and_outputs(ranks, impl):
    def run():
        model = UsesNested()
        plain = twin(model)
        for unit in (model.one, model.two, model):
            impl.fully_shard(unit)
        x = torch.randn(3, 4)
        for _ in range(2):
            for m in (model, plain):
                out = m(x)
                (out["pair"].b[0][0].sum() + out["named"].x).backward()
            assert_same_grads(model, plain)

    ranks(2, run)


def test_a_generator_is_handed_through_unread(ranks, impl):
    def run():
        class Stream(Matrix):
            def forward(self, x):
                y = x @ self.w
                return (y[i] for i in range(2))

        model = impl.fully_shard(Stream())
        out = model(torch.ones(2, 4))
        return [tuple(y.shape) for y in out], [tuple(y.shape) for y in out]

    assert ranks(2, run) == [([(4,), (4,)], [])] * 2


def test_a_unit_that_returns_a_view_warns(ranks, impl):
    """An in-place operation on a view would lose the hook on it."""

    def run():
        class View(Matrix):
            def forward(self, x):
                return (x @ self.w).view(-1)

        model = nn.Sequential(Matrix(), View())
        impl.fully_shard(model[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            impl.fully_shard(model)(torch.randn(2, 4))
        return [(w.category.__name__, "View" in str(w.message)) for w in caught if "view" in str(w.message).lower()]

    for caught in ranks(2, run):
        assert ("UserWarning", True) in caught


@pytest.mark.parametrize(("shape", "bias", "warns"), [((2, 4), True, False), ((2, 3, 4), False, False)])
def test_a_model_that_ends_in_a_linear_warns_only_where_its_output_is_a_view(ranks, impl, shape, bias, warns):
    """With a bias and an input of three dimensions torch computes a view of a matrix."""

    def run():
        model = impl.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3, bias=bias)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = model(torch.randn(shape))
        return out._base is not None, bool([w for w in caught if "view" in str(w.message)])

    assert ranks(2, run) == [(warns, warns)] * 2


# Hooks and optimizers of the user


def test_optimizer_in_backward(ranks, impl):
    """Each parameter is stepped by its own hook, so that no gradient outlives its use."""

    def run():
        model, plain = sharded_toy(impl, 2, sizes=(5, 3, 1))
        for m in (model, plain):
            optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in m.parameters()}

            def step(param, optimizers=optimizers):
                optimizers[param].step()
                optimizers[param].zero_grad()

            for p in m.parameters():
                p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            whole = torch.randn(4, 4)
            backward_of_both(model, plain, whole)
            assert all(p.grad is None for p in model.parameters())
        assert_same_params(model, plain)

    ranks(2, run)


def test_hooks_of_the_user_see_whole_parameters(ranks, impl):
    """Forward hooks registered before sharding run before the parameters are freed; pre-hooks after they are there."""

    def run():
        model, seen = Toy(1), []
        layer = model.layers[0]
        layer.register_forward_pre_hook(lambda m, args: seen.append(("pre-hook, early", kind(m.w))))
        layer.register_forward_hook(lambda m, args, out: seen.append(("hook, early", kind(m.w))))
        shard(model, impl.fully_shard)
        layer.register_forward_pre_hook(lambda m, args: seen.append(("pre-hook, late", kind(m.w))))
        layer.register_forward_hook(lambda m, args, out: seen.append(("hook, late", kind(m.w))))
        model(torch.randn(2, 4))
        return seen

    expected = [
        ("pre-hook, early", "unsharded"),
        ("pre-hook, late", "unsharded"),
        ("hook, early", "unsharded"),
        ("hook, late", "sharded"),
    ]
    assert ranks(2, run) == [expected] * 2


# Lists of modules as one unit


# torch.compile


def test_blocks_compiled_before_sharding(ranks, impl):
    def run():
        model = Toy(2)
        plain = twin(model)
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend="aot_eager")
        shard(model, impl.fully_shard)
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for _ in range(2):
            whole = torch.randn(4, 4)
            backward_of_both(model, plain, whole)
            for compiled, p in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(compiled.grad.full_tensor(), p.grad)
            for optimizer in sgd:
                optimizer.step()
                optimizer.zero_grad()

    ranks(2, run)


def test_modules_compiled_in_place_after_sharding(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2)
        for layer in model.layers:
            layer.compile(backend="eager")
        train_side_by_side(model, plain, steps=2)

    ranks(2, run)
