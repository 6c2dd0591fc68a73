"""The methods that a sharded module gains, and the two functions beside `fully_shard`."""

import pytest
import torch
from torch import nn

from fsdp_sim.mini import versions
from tests.mini.models import Collectives, Matrix, Toy, assert_same_grads, assert_same_params, my_part, shard, twin
from tests.mini.parity.tools import (
    events,
    group_of,
    groups_of,
    kind,
    raised,
    reshard_all,
    sharded_toy,
    square_loss,
    train_side_by_side,
)


def kinds(module):
    return {kind(p) for p in module.parameters()}


# unshard and reshard


def test_unshard_gathers_and_reshard_frees(ranks, impl):
    """Neither goes to units below. Both may be called at any time, and twice."""

    def run():
        model, plain = sharded_toy(impl, 1)
        seen = []
        for _ in range(2):  # before the first forward, and after a step
            with Collectives() as mode:
                assert model.unshard() is None
                assert model.unshard() is None
            torch.testing.assert_close(model.embed.w, plain.embed.w)
            seen.append((mode.counts, kind(model.embed.w), kind(model.layers[0].w)))
            for _ in range(2):
                model.reshard()
            seen.append(kind(model.embed.w))
            train_side_by_side(model, plain, steps=1)
        return seen

    step = [((1, 0), "unsharded", "sharded"), "sharded"]
    assert ranks(2, run) == [step * 2] * 2


@pytest.mark.parametrize("moment", ["before the first forward", "after a step"])
def test_an_asynchronous_unshard_is_done_when_its_handle_is_waited_for(ranks, impl, moment):
    def run():
        model, plain = sharded_toy(impl, 1)
        if moment == "after a step":
            train_side_by_side(model, plain, steps=1)
        group = group_of(impl, model.layers[0])
        handle = model.layers[0].unshard(async_op=True)
        assert isinstance(handle, impl.UnshardHandle)
        pending = (group._all_gather_result is not None, kind(model.layers[0].w))
        handle.wait()
        torch.testing.assert_close(model.layers[0].w, plain.layers[0].w)
        done = (group._all_gather_result is not None, kind(model.layers[0].w))
        handle.wait()
        model.layers[0].reshard()
        train_side_by_side(model, plain, steps=1)
        return pending, done

    assert ranks(2, run) == [((True, "sharded"), (False, "unsharded"))] * 2


def test_parameters_can_be_read_and_written_while_they_are_whole(ranks, impl):
    """What is written there is lost; what is written to the shards stays."""

    def run():
        model = impl.fully_shard(Matrix())
        model.unshard()
        with torch.no_grad():
            model.w.fill_(7)
        model.reshard()
        lost = (model.w.full_tensor() == 7).any().item()
        with torch.no_grad():
            model.w.fill_(3)
        model.unshard()
        kept = (model.w == 3).all().item()
        return lost, kept

    assert ranks(2, run) == [(False, True)] * 2


# Methods other than forward


class Translator(nn.Module):
    """Used through `encode` and `decode` as well as `forward`."""

    def __init__(self):
        super().__init__()
        self.into, self.out = Matrix(), Matrix()

    def encode(self, x, *, scale=1.0):
        return torch.tanh(self.into(x)) * scale

    def decode(self, h):
        return self.out(h)

    def forward(self, x):
        return self.decode(self.encode(x))


def test_a_registered_method_gathers_like_forward(ranks, impl):
    def run():
        model = Translator()
        plain = twin(model)
        impl.fully_shard(model)
        for name in ("encode", "decode"):
            impl.register_fsdp_forward_method(model, name)
        assert model.encode.__name__ == "encode"
        for _ in range(2):
            whole = torch.randn(4, 4)
            for forward in (lambda m, x: m.decode(m.encode(x, scale=0.5)), lambda m, x: m(x)):
                for m, x in ((model, my_part(whole)), (plain, whole)):
                    m.zero_grad()
                    square_loss(forward(m, x)).backward()
                assert_same_grads(model, plain)

    ranks(2, run)


def test_registering_a_method_of_a_plain_module_does_nothing(ranks, impl):
    def run():
        model = Translator()
        impl.register_fsdp_forward_method(model, "encode")
        impl.register_fsdp_forward_method(model, "not there")
        return "encode" in vars(model)

    assert ranks(2, run) == [False, False]


# _apply


@pytest.mark.parametrize("moment", ["before the first forward", "after a forward", "after a step"])
def test_apply_reshards_first(ranks, impl, moment):
    """.to, .cpu, .requires_grad_ and their like see shards."""

    def run():
        model, plain = sharded_toy(impl, 2, (5, 3, 1), reshard_after_forward=False)
        if moment == "after a step":
            train_side_by_side(model, plain, steps=1)
        if moment == "after a forward":
            with torch.no_grad():
                model(torch.randn(2, 4))
        model.cpu()
        assert kinds(model) == {"sharded"}
        model.float()
        assert kinds(model) == {"sharded"}
        sharded = {id(p.sharded_param) for g in groups_of(impl, model) for p in g.fsdp_params}
        assert {id(p) for p in model.parameters()} == sharded
        assert_same_params(model, plain)
        train_side_by_side(model, plain)

    ranks(3, run)


def test_a_model_converted_after_a_forward_has_converted_shards(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2, (5, 3, 1))
        with torch.no_grad():
            model(torch.randn(2, 4))
        model.double()
        plain.double()
        assert_same_params(model, plain)
        fsdp_params = [p for g in groups_of(impl, model) for p in g.fsdp_params]
        return (
            kinds(model),
            {p.sharded_param.dtype for p in fsdp_params},
            {p._sharded_param_data.dtype for p in fsdp_params},
        )

    assert ranks(2, run) == [({"sharded"}, {torch.float64}, {torch.float64})] * 2


def test_shards_changed_in_place_or_through_data_are_what_is_gathered(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2, (5, 3, 1))
        for m in (model, plain):
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(0.5)
        train_side_by_side(model, plain)

    ranks(2, run)


# reset_iter_state


class Breaks(Toy):
    """Raises in the forward or in the backward of its second layer, when told to.

    No unit stops halfway through its gradients then: what it had computed would stay on its unsharded parameters.
    """

    where = None

    def forward(self, x):
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i == 1 and self.where == "forward":
                raise KeyError("on purpose")
            x = layer(x)
            if i == 1 and self.where == "backward":
                x.register_hook(self._raise)
        return self.head(x)

    @staticmethod
    def _raise(grad):
        raise KeyError("on purpose")


@pytest.mark.usefixtures("since_torch_2_13")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", ["first step", "later step"])
def test_after_an_exception_a_reset_makes_the_next_step_right(ranks, impl, where, when):
    def run():
        model = Breaks(3)
        plain = twin(model)
        impl.fully_shard(model.head)
        shard(model, impl.fully_shard)
        if when == "later step":
            train_side_by_side(model, plain, steps=1)
        model.where = where
        result = raised(lambda: square_loss(model(torch.randn(2, 4))).backward())
        model.where = None
        model.reset_iter_state()
        groups = groups_of(impl, model)
        assert all(g.is_sharded and g._all_gather_result is None and not g._post_forward_indices for g in groups)
        assert {g._training_state.name for g in groups} == {"IDLE"}
        assert {impl.fully_shard.state(m)._training_state.name for m in (model, *model.layers)} == {"IDLE"}
        model.zero_grad()
        train_side_by_side(model, plain)
        return result[0]

    assert ranks(2, run) == ["KeyError"] * 2


@pytest.mark.usefixtures("since_torch_2_13")
def test_a_reset_keeps_the_gradients_of_earlier_steps_until_torch_2_15(ranks, impl):
    def run():
        model, _ = sharded_toy(impl)
        square_loss(model(torch.randn(2, 4))).backward()
        model.reset_iter_state()
        return [p.grad is None for p in model.parameters()]

    dropped = versions.RESET_DROPS_SHARDED_GRADS
    assert all(gone == dropped for rank in ranks(2, run) for gone in rank)


@pytest.mark.usefixtures("since_torch_2_13")
def test_a_reset_clears_prefetched_gathers(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 3)
        train_side_by_side(model, plain, steps=1)
        model.layers[2].unshard(async_op=True)
        model.reset_iter_state()
        assert group_of(impl, model.layers[2])._all_gather_result is None
        train_side_by_side(model, plain)

    ranks(2, run)


# Setters in general


def test_prefetch_lists_can_be_emptied(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 3)
        logs = []
        for modules in ([], [model.layers[2]], []):
            model.layers[0].set_modules_to_forward_prefetch(modules)
            with events(impl) as log, torch.no_grad():
                model(torch.randn(2, 4))
            logs.append([name for _, name, _ in log])
            reshard_all(model)
        return logs

    usual, ahead = ["", "layers.0", "layers.1", "layers.2"], ["", "layers.0", "layers.2", "layers.1"]
    assert ranks(2, run) == [[usual, ahead, usual]] * 2
