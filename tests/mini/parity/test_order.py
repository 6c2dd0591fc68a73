"""What is registered when, and who communicates in which group. The order of a step: `test_programs`."""

import pytest
import torch

from tests.mini.models import Matrix, assert_same_grads, my_part
from tests.mini.parity.tools import (
    Issued,
    backward_of_both,
    called,
    group_of,
    kind,
    sharded_toy,
    square_loss,
)


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


def test_collectives_are_called_where_a_patch_finds_them(ranks, impl):
    """torch's own tests replace the functions in torch.distributed to look at their arguments."""

    def run():
        model, _ = sharded_toy(impl, 2)
        with called() as log:
            model(torch.randn(2, 4)).sum().backward()
        return log

    gather, reduce = ("AG", "None"), ("RS", "AVG")
    assert ranks(2, run) == [[gather] * 3 + [gather, gather, reduce, reduce, reduce]] * 2


@pytest.mark.usefixtures("since_torch_2_13")
def test_a_separate_group_for_reduce_scatter(ranks, impl):
    def run():
        model, plain = sharded_toy(impl, 2)
        used = []
        for enable in (False, True, False):
            model.set_separate_reduce_scatter_group(enable)
            whole = torch.randn(4, 4)
            with Issued() as mode:
                backward_of_both(model, plain, whole)
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
