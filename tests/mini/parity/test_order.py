"""Order: what is registered when, and how many collectives that makes. The whole order of a step: `test_programs`."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.mini.models import Collectives, Matrix, Toy, assert_same_grads, my_part, shard, twin
from tests.mini.parity.tools import (
    Issued,
    called,
    comm_counts,
    events,
    group_of,
    groups_of,
    kind,
    sharded_toy,
    square_loss,
    train_side_by_side,
)


def unshard(name, state):
    return ("unshard", name, state)


def post_backward(name):
    return ("post_backward", name, "POST_BACKWARD")


# What is registered


@pytest.mark.parametrize(
    ("reshard_after_forward", "layers", "root"),
    [(True, "sharded", "sharded"), (False, "unsharded", "unsharded"), (None, "sharded", "unsharded")],
)
def test_registered_parameters_before_and_after_forward_and_backward(ranks, impl, reshard_after_forward, layers, root):
    def run():
        model, _ = sharded_toy(impl, reshard_after_forward=reshard_after_forward)

        def kinds():
            return {kind(layer.w) for layer in model.layers}, {kind(model.embed.w), kind(model.head.w)}

        before = kinds()
        out = model(torch.randn(2, 4))
        between = kinds()
        out.sum().backward()
        return before, between, kinds()

    sharded = ({"sharded"}, {"sharded"})
    assert ranks(2, run) == [(sharded, ({layers}, {root}), sharded)] * 2


def test_states_during_a_step(ranks, impl):
    """Seen from inside: a forward hook of a layer, and a hook on the gradient of its weight."""

    def run():
        model, _ = sharded_toy(impl, 2)
        layer, seen = model.layers[0], []
        group, state = group_of(impl, layer), impl.fully_shard.state(layer)

        def look(moment):
            now = (state._training_state.name, group._training_state.name, group._sharded_state.name)
            seen.append((moment, *now, group.is_unsharded, kind(layer.w)))

        layer.forward = lambda x: (look("forward"), Matrix.forward(layer, x))[1]
        out = model(torch.randn(2, 4))
        look("between")
        group.fsdp_params[0]._unsharded_param.register_hook(lambda grad: look("backward"))
        out.sum().backward()
        look("after")
        return seen

    expected = [
        ("forward", "FORWARD", "FORWARD", "UNSHARDED", True, "unsharded"),
        ("between", "IDLE", "IDLE", "SHARDED", False, "sharded"),
        ("backward", "PRE_BACKWARD", "PRE_BACKWARD", "UNSHARDED", True, "unsharded"),
        ("after", "IDLE", "IDLE", "SHARDED", False, "sharded"),
    ]
    assert ranks(2, run) == [expected] * 2


def test_the_unsharded_parameter_is_one_object_whose_memory_comes_and_goes(ranks, impl):
    """Autograd keeps references to it; so its storage is resized instead."""

    def run():
        model, plain = sharded_toy(impl)
        fsdp_param = group_of(impl, model.layers[0]).fsdp_params[0]
        sizes, objects = [], []
        for _ in range(2):
            out = model(torch.randn(2, 4))
            objects.append(fsdp_param._unsharded_param)
            sizes.append(fsdp_param._unsharded_param.untyped_storage().size())
            model.layers[0].unshard()
            sizes.append(fsdp_param._unsharded_param.untyped_storage().size())
            assert model.layers[0].w is fsdp_param._unsharded_param is fsdp_param.unsharded_param
            assert torch.equal(model.layers[0].w.data, plain.layers[0].w.data)
            out.sum().backward()
            assert model.layers[0].w is fsdp_param.sharded_param
        return sizes, objects[0] is objects[1]

    assert ranks(2, run) == [([0, 64, 0, 64], True)] * 2


# How many collectives


@pytest.mark.parametrize(
    ("reshard_after_forward", "in_backward"), [(True, 4), (False, 0), (None, 3)], ids=["True", "False", "None"]
)
def test_number_of_collectives_in_forward_and_backward(ranks, impl, reshard_after_forward, in_backward):
    def run():
        model, _ = sharded_toy(impl, 3, reshard_after_forward=reshard_after_forward)
        counts = []
        for _ in range(2):
            with CommDebugMode() as forward:
                out = model(torch.randn(2, 4))
            with CommDebugMode() as backward:
                out.sum().backward()
            for mode in (forward, backward):
                gathers, reduces, total = comm_counts(mode)
                assert total == gathers + reduces
                counts.append((gathers, reduces))
        return counts

    assert ranks(2, run) == [[(4, 0), (in_backward, 4)] * 2] * 2


@pytest.mark.parametrize(("reshard_after_forward", "second"), [(True, 4), (False, 0), (None, 3)])
def test_a_second_forward_without_a_backward_gathers_what_the_first_freed(ranks, impl, reshard_after_forward, second):
    def run():
        model, _ = sharded_toy(impl, 3, reshard_after_forward=reshard_after_forward)
        counts = []
        for _ in range(2):
            with Collectives() as mode, torch.no_grad():
                model(torch.randn(2, 4))
            counts.append(mode.counts)
        return counts

    assert ranks(2, run) == [[(4, 0), (second, 0)]] * 2


def test_no_buffer_outlives_the_pass_that_needed_it(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 3, reshard_after_forward=True)
        groups = groups_of(impl, model)
        fsdp_params = [p for g in groups for p in g.fsdp_params]

        def left():
            whole = sum(p._unsharded_param.untyped_storage().size() for p in fsdp_params)
            grads = sum(p._unsharded_param.grad is not None for p in fsdp_params)
            return (
                groups[0].comm_ctx.all_gather_state,
                sum(g._all_gather_result is not None for g in groups),
                whole,
                grads,
            )

        out = model(torch.randn(2, 4))
        after_forward = left()
        out.sum().backward()
        return after_forward, left()

    assert ranks(2, run) == [((None, 0, 0, 0), (None, 0, 0, 0))] * 2


def test_set_reshard_after_forward_changes_the_counts_of_the_next_step(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 3)
        counts = []
        for setting in (None, False, True, "layer 0 keeps"):
            if setting == "layer 0 keeps":
                model.layers[0].set_reshard_after_forward(False)
            elif setting is not None:
                model.set_reshard_after_forward(setting)
            with Collectives() as mode:
                model(torch.randn(2, 4)).sum().backward()
            counts.append(mode.counts)
        model.set_reshard_after_forward(False, recurse=False)
        with Collectives() as mode:
            model(torch.randn(2, 4)).sum().backward()
        return [*counts, mode.counts]

    assert ranks(2, run) == [[(4 + 3, 4), (4, 4), (4 + 4, 4), (4 + 3, 4), (4 + 2, 4)]] * 2


def test_set_reshard_after_forward_before_the_first_forward(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 3)
        model.set_reshard_after_forward(True, recurse=False)
        with Collectives() as mode:
            model(torch.randn(2, 4)).sum().backward()
        return mode.counts

    assert ranks(2, run) == [(4 + 4, 4)] * 2


def test_reshard_by_hand_makes_backward_gather_again(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 3, reshard_after_forward=False)
        out = model(torch.randn(2, 4))
        for module in (model, *model.layers):
            module.reshard()
        assert {kind(p) for p in model.parameters()} == {"sharded"}
        with Collectives() as mode:
            out.sum().backward()
        return mode.counts

    assert ranks(2, run) == [(4, 4)] * 2


def test_collectives_are_called_where_a_patch_finds_them(ranks, impl):
    """torch's own tests replace the functions in torch.distributed to look at their arguments."""

    def run():
        model, _ = sharded_toy(impl, 2)
        with called() as log:
            model(torch.randn(2, 4)).sum().backward()
        return log

    gather, reduce = ("AG", "None"), ("RS", "AVG")
    assert ranks(2, run) == [[gather] * 3 + [gather, gather, reduce, reduce, reduce]] * 2


# Which unit when


@pytest.mark.parametrize("prefetch", ["default", "listed"])
def test_backward_prefetch_with_a_list_as_a_unit_of_which_a_module_is_unused(ranks, impl, prefetch):
    class Skips(Toy):
        def forward(self, x):
            return self.head(self.layers[3](self.layers[1](self.layers[0](self.embed(x)))))

    def run():
        model = Skips(4)
        impl.fully_shard(model.layers[0])
        impl.fully_shard([model.layers[1], model.layers[2]])
        impl.fully_shard(model.layers[3])
        impl.fully_shard(model)
        if prefetch == "listed":
            model.layers[3].set_modules_to_backward_prefetch([model.layers[1]])
            model.layers[2].set_modules_to_backward_prefetch([model.layers[0]])
        steps = []
        for _ in range(2):
            out = model(torch.randn(2, 4))
            with events(impl) as log:
                out.sum().backward()
            steps.append(log)
        return steps

    first, second = ranks(2, run)
    assert first == second
    for log in first:
        gathered = [name for what, name, _ in log if what == "unshard"]
        reduced = [name for what, name, _ in log if what == "post_backward"]
        assert sorted(gathered) == ["layers.0", "layers.1, layers.2", "layers.3"]
        assert set(reduced) == {"", "layers.0", "layers.1, layers.2", "layers.3"}
        assert log.index(unshard("layers.1, layers.2", "PRE_BACKWARD")) < log.index(post_backward("layers.3"))


def test_post_forward_order_counts_every_call(ranks, impl):
    def run():
        class Twice(Toy):
            def forward(self, x):
                x = self.layers[0](self.embed(x))
                return self.head(self.layers[0](self.layers[1](x)))

        model = shard(Twice(2), impl.fully_shard)
        out = model(torch.randn(2, 4))
        groups = [group_of(impl, m) for m in (*model.layers, model)]
        after_forward = [list(g._post_forward_indices) for g in groups]
        order = [g._module_fqn for g in groups[0].comm_ctx.post_forward_order]
        out.sum().backward()
        return after_forward, order, [g._post_forward_indices for g in groups], groups[0].comm_ctx.post_forward_order

    order = ["layers.0", "layers.1", "layers.0", ""]
    assert ranks(2, run) == [([[0, 2], [1], [3]], order, [[], [], []], [])] * 2


def test_no_forward_of_an_evaluation_is_left_in_the_order_after_a_training_step(ranks, impl):
    """Forwards without gradients are recorded too; the next backward clears them."""

    def run():
        model, plain = sharded_toy(impl, 2)
        with torch.no_grad():
            model(torch.randn(2, 4))
        model.reshard()
        train_side_by_side(model, plain, steps=2)
        return group_of(impl, model).comm_ctx.post_forward_order

    assert ranks(2, run) == [[]] * 2


def test_a_unit_that_backward_does_not_need_is_not_gathered_there(ranks, impl):
    """The gradient of an embedding does not read its table."""

    def run():
        class Lookup(Toy):
            def __init__(self):
                super().__init__(2)
                self.table = torch.nn.Embedding(5, 4)

            def forward(self, ids):
                x = self.table(ids)
                for layer in self.layers:
                    x = layer(x)
                return x

        model = Lookup()
        plain = twin(model)
        impl.fully_shard(model.table)
        shard(model, impl.fully_shard)
        ids = torch.arange(4)
        gathers = []
        for setting in (True, False):
            model.table.set_unshard_in_backward(setting)
            out = model(ids)
            with events(impl) as log:
                square_loss(out).backward()
            gathers.append([name for what, name, _ in log if what == "unshard" and name == "table"])
            square_loss(plain(ids)).backward()
        with Collectives() as mode:
            model(ids).sum().backward()
        plain(ids).sum().backward()
        torch.testing.assert_close(model.table.weight.grad.full_tensor(), plain.table.weight.grad)
        return mode.counts

    # 4 units in forward; the layers alone in backward (nothing of the root takes part)
    assert ranks(2, run) == [(4 + 2, 3)] * 2


# Buffers, groups, streams and events


@pytest.mark.usefixtures("since_torch_2_13")
def test_reduce_scatter_input_buffers_in_flight(ranks, impl):
    """One by default; the cap is common to all units, the largest that any asked for."""

    def run():
        in_flight = []
        for cap in (None, 2, 3):
            model, plain = sharded_toy(impl, 4)
            if cap is not None:
                model.layers[1].set_reduce_scatter_max_input_buffers(cap)
            kept, cls = [], impl.FSDPParamGroup
            original = cls.post_backward

            def post_backward_and_count(self, *args, original=original, kept=kept, **kwargs):
                original(self, *args, **kwargs)
                kept.append(len(self.comm_ctx.reduce_scatter_states))

            cls.post_backward = post_backward_and_count
            try:
                train_side_by_side(model, plain, steps=1)
            finally:
                cls.post_backward = original
            assert len(group_of(impl, model).comm_ctx.reduce_scatter_states) == 0
            assert group_of(impl, model).comm_ctx.reduce_scatter_max_input_buffers == (cap or 1)
            in_flight.append(kept)
        return in_flight

    assert ranks(2, run) == [[[1, 1, 1, 1, 1], [1, 2, 2, 2, 2], [1, 2, 3, 3, 3]]] * 2


@pytest.mark.usefixtures("since_torch_2_13")
def test_a_separate_group_for_reduce_scatter(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2)
        used = []
        for enable in (False, True, False):
            model.set_separate_reduce_scatter_group(enable)
            whole = torch.randn(4, 4)
            with Issued() as mode:
                square_loss(model(my_part(whole))).backward()
            square_loss(plain(whole)).backward()
            assert_same_grads(model, plain)
            gathers, reduces = ({c.group for c in mode.of(name)} for name in ("AG", "RS"))
            assert {c.ranks for c in mode.log} == {(0, 1)}
            used.append((gathers == reduces, len(reduces)))
        return used

    assert ranks(2, run) == [[(True, 1), (False, 1), (True, 1)]] * 2


def test_roots_that_share_one_communication_context(ranks, impl):
    """As the model chunks of a pipeline do."""

    def run():
        first, plain_first = sharded_toy(impl, 2)
        second, plain_second = sharded_toy(impl, 2)
        impl.share_comm_ctx([first, second])
        impl.share_comm_ctx([])
        states = [impl.fully_shard.state(m) for m in (first, second)]
        assert states[0]._comm_ctx is states[1]._comm_ctx is group_of(impl, second).comm_ctx
        for step in range(2):
            whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            for a, b, x in ((first, second, my_part(whole)), (plain_first, plain_second, whole)):
                square_loss(b(a(x))).backward()
            assert_same_grads(first, plain_first)
            assert_same_grads(second, plain_second)
        return states[0]._state_ctx is states[1]._state_ctx, group_of(impl, second.layers[0]).comm_ctx is (
            states[0]._comm_ctx
        )

    assert ranks(2, run) == [(False, True)] * 2


def test_an_event_after_the_optimizer_is_waited_for_once(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2)
        train_side_by_side(model, plain, steps=1)
        context = impl.fully_shard.state(model)._state_ctx
        model.set_post_optim_event(torch.cpu.current_stream().record_event())
        train_side_by_side(model, plain, steps=1)
        return context.post_optim_event

    assert ranks(2, run) == [None, None]
