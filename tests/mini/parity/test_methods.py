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


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_forward_uses_an_unshard_that_was_issued_before_it(ranks, impl, reshard_after_forward):
    def run():
        model, plain = sharded_toy(impl, 2, reshard_after_forward=reshard_after_forward)
        counts = []
        for _ in range(2):
            whole = torch.randn(4, 4)
            with Collectives() as before:
                handles = [unit.unshard(async_op=True) for unit in (model, *model.layers)]
            with Collectives() as forward:
                out = model(my_part(whole))
            del handles
            square_loss(out).backward()
            square_loss(plain(whole)).backward()
            assert_same_grads(model, plain)
            counts.append((before.counts, forward.counts))
        return counts

    assert ranks(2, run) == [[((3, 0), (0, 0))] * 2] * 2


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


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_registered_method_gathers_like_forward(ranks, impl, reshard_after_forward):
    def run():
        model = nn.Module()
        model.translator = Translator()
        model.forward = lambda x: model.translator.decode(model.translator.encode(x, scale=0.5))
        plain = twin(model.translator)
        impl.fully_shard(model.translator, reshard_after_forward=reshard_after_forward)
        for name in ("encode", "decode"):
            impl.register_fsdp_forward_method(model.translator, name)
        assert model.translator.encode.__name__ == "encode"
        for _ in range(2):
            whole = torch.randn(4, 4)
            square_loss(model.translator.decode(model.translator.encode(my_part(whole), scale=0.5))).backward()
            square_loss(plain.decode(plain.encode(whole, scale=0.5))).backward()
            assert_same_grads(model.translator, plain)
            for m in (model, plain):
                m.zero_grad()
            square_loss(model.translator(my_part(whole))).backward()
            square_loss(plain(whole)).backward()
            assert_same_grads(model.translator, plain)
            for m in (model, plain):
                m.zero_grad()

    ranks(2, run)


def test_registering_a_method_of_a_plain_module_does_nothing(ranks, impl):
    def run():
        model = Translator()
        impl.register_fsdp_forward_method(model, "encode")
        impl.register_fsdp_forward_method(model, "not there")
        return "encode" in vars(model)

    assert ranks(2, run) == [False, False]


def test_a_registered_method_of_one_part_of_a_model(ranks, impl):
    """The vision tower is called by a name of its own, inside the root's forward."""

    def run():
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.tower = Matrix(), Translator()

            def forward(self, x):
                return self.tower.encode(self.first(x))

        model = Model()
        plain = twin(model)
        impl.fully_shard(model.tower)
        impl.register_fsdp_forward_method(model.tower, "encode")
        impl.fully_shard(model)
        train = []
        for _ in range(2):
            whole = torch.randn(4, 4)
            for m, x in ((model, my_part(whole)), (plain, whole)):
                m.zero_grad()
                square_loss(m(x)).backward()
            assert_same_grads(model, plain)
            train.append(kinds(model))
        return train

    assert ranks(2, run) == [[{"sharded"}] * 2] * 2


# _apply


@pytest.mark.parametrize("moment", ["before the first forward", "after a forward", "after a step"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_apply_reshards_first(ranks, impl, moment, reshard_after_forward):
    """.to, .cpu, .requires_grad_ and their like see shards."""

    def run():
        model, plain = sharded_toy(impl, 2, (5, 3, 1), reshard_after_forward=reshard_after_forward)
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
@pytest.mark.parametrize("reshard_after_forward", [False, None])
@pytest.mark.parametrize("when", ["first step", "later step"])
def test_after_an_exception_a_reset_makes_the_next_step_right(ranks, impl, where, reshard_after_forward, when):
    def run():
        model = Breaks(3)
        plain = twin(model)
        impl.fully_shard(model.head, reshard_after_forward=reshard_after_forward)
        shard(model, impl.fully_shard, reshard_after_forward=reshard_after_forward)
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
def test_a_reset_where_nothing_happened_changes_nothing(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        train_side_by_side(model, plain, steps=1)
        model.reset_iter_state()
        train_side_by_side(model, plain)

    ranks(2, run)


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


def test_setters_before_the_first_forward(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
        model.set_reshard_after_forward(False)
        model.set_unshard_in_backward(True)
        model.set_gradient_divide_factor(2.0)
        model.set_force_sum_reduction_for_comms(True)
        model.set_modules_to_forward_prefetch([model.layers[0]])
        model.set_modules_to_backward_prefetch([model.layers[-1]])
        model._set_unshard_async_op(False)
        train_side_by_side(model, plain)

    ranks(2, run)


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
