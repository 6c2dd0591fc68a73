"""The hooks: what is registered when, what is issued when, and forwards of every shape."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.mini import fully_shard
from tests.mini.models import Collectives, Matrix, Toy, assert_same_grads, my_part, shard, twin

OPTIONS = [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}]


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [(OPTIONS[0], 4, 3), (OPTIONS[1], 4, 4), (OPTIONS[2], 4, 0)],
    ids=["default", "True", "False"],
)
def test_number_of_collectives(ranks, options, forward, backward):
    """With 4 groups, the root included."""

    def run():
        model = shard(Toy(3), **options)
        counts = []
        for _ in range(2):
            with Collectives() as in_forward:
                out = model(torch.randn(2, 4))
            with Collectives() as in_backward:
                out.sum().backward()
            counts.append((in_forward.counts, in_backward.counts))
        return counts

    assert ranks(2, run) == [[((forward, 0), (backward, 4))] * 2] * 2


def test_torchs_own_counter_sees_one_collective_per_unit(ranks):
    def run():
        model = shard(Toy(3))
        with CommDebugMode() as mode:
            model(torch.randn(2, 4)).sum().backward()
        return mode.get_total_counts()

    assert ranks(2, run) == [4 + 3 + 4] * 2


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_collectives_are_those_of_torch_in_the_same_order(ranks, options, prefetch):
    """The installed torch's `fully_shard`, run beside ours on the same ranks with the same settings."""

    def run():
        issued = []
        for shard_fn in (fully_shard, torch.distributed.fsdp.fully_shard):
            model = shard(Toy(4, sizes=(4, 5, 6, 7, 9)), shard_fn, **options)
            if prefetch:
                for i, layer in enumerate(model.layers):
                    layer.set_modules_to_forward_prefetch(list(model.layers[i + 1 : i + 1 + prefetch]))
                    layer.set_modules_to_backward_prefetch(list(reversed(model.layers[max(0, i - prefetch) : i])))
            with Collectives() as mode:
                for _ in range(2):
                    model(torch.randn(2, 4)).sum().backward()
            issued.append(mode.issued)
        return issued

    for ours, of_torch in ranks(2, run):
        assert len(ours) >= 2 * 10
        assert ours == of_torch


@pytest.mark.parametrize(
    ("option", "layers_after_forward", "root_after_forward"),
    [(True, DTensor, DTensor), (False, nn.Parameter, nn.Parameter), (None, DTensor, nn.Parameter)],
)
def test_registered_parameters(ranks, option, layers_after_forward, root_after_forward):
    def types(model):
        def kind(p):
            return DTensor if isinstance(p, DTensor) else nn.Parameter

        return kind(model.layers[0].w), kind(model.embed.w)

    def run():
        model = shard(Toy(), reshard_after_forward=option)
        before = types(model)
        out = model(torch.randn(2, 4))
        after_forward = types(model)
        out.sum().backward()
        return before, after_forward, types(model)

    sharded = (DTensor, DTensor)
    assert ranks(2, run) == [(sharded, (layers_after_forward, root_after_forward), sharded)] * 2


def test_reshard_by_hand_makes_backward_gather_again(ranks):
    def run():
        model = shard(Toy(), reshard_after_forward=False)
        out = model(torch.randn(2, 4))
        for module in (model, *model.layers):
            module.reshard()
        with Collectives() as mode:
            out.sum().backward()
        return mode.counts

    assert ranks(2, run) == [(4, 4)] * 2


def test_set_reshard_after_forward_works_from_the_next_step_on(ranks):
    def run():
        model, counts = shard(Toy()), []
        for setting in (None, False, True):
            if setting is not None:
                model.set_reshard_after_forward(setting)
            with Collectives() as mode:
                model(torch.randn(2, 4)).sum().backward()
            counts.append(mode.counts)
        return counts

    assert ranks(2, run) == [[(4 + 3, 4), (4 + 0, 4), (4 + 4, 4)]] * 2


Pair = namedtuple("Pair", "first second")


@dataclass
class Outputs:
    hidden: list
    note: str


class Odd(nn.Module):
    """A root without parameters of its own, no tensor inputs, nested outputs, a layer called often, one never."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Matrix(), Matrix()
        self.register_buffer("start", torch.randn(2, 4))

    def forward(self, times: int):
        x = self.start
        for _ in range(times):
            x = self.used(x)
        return {"pair": Pair(x, None), "more": Outputs([x * 2], "text"), "number": 3}


def test_nested_outputs_repeated_calls_unused_modules_and_no_tensor_inputs(ranks):
    def run():
        model = Odd()
        plain = twin(model)
        fully_shard(model.used)
        fully_shard(model.unused)
        fully_shard(model)
        for _ in range(2):
            for m in (model, plain):
                out = m(3)
                (out["pair"].first.sum() + out["more"].hidden[0].sum()).backward()
            assert_same_grads(model, plain)
        return type(model).__name__, isinstance(model, Odd)

    assert ranks(2, run) == [("FSDPOdd", True)] * 2


def test_a_list_of_modules_is_one_group_even_if_one_is_not_used(ranks):
    def run():
        model = Toy(3)
        plain = twin(model)
        fully_shard([model.layers[0], model.layers[1]])
        fully_shard(model.layers[2])
        fully_shard([model.embed, model.head])
        fully_shard(model)
        whole = torch.randn(4, 4)
        for skip in (False, True, False):
            for m, x in ((model, my_part(whole)), (plain, whole)):
                m.zero_grad()
                x = m.layers[0](m.embed(x)) if skip and m is plain else x
                if m is plain and skip:
                    m.head(m.layers[2](x)).pow(2).mean().backward()
                elif skip:
                    model.forward = lambda x: model.head(model.layers[2](model.layers[0](model.embed(x))))
                    model(x).pow(2).mean().backward()
                    del model.forward
                else:
                    m(x).pow(2).mean().backward()
            assert_same_grads(model, plain)
        return len([s for s in model._get_fsdp_state()._state_ctx.all_states if s._fsdp_param_group])

    assert ranks(2, run) == [3, 3]


def test_a_gather_that_nobody_used_is_dropped_at_the_end_of_backward(ranks):
    """Layer 1 runs in forward, its output is not part of the loss: layer 2 prefetches it in vain."""

    def run():
        class Detour(Toy):
            def forward(self, x):
                x = self.layers[0](self.embed(x))
                self.layers[1](x)
                return self.head(self.layers[2](x))

        model = Detour()
        plain = twin(model)
        shard(model)
        whole = torch.randn(4, 4)
        for _ in range(2):
            for m, x in ((model, my_part(whole)), (plain, whole)):
                m(x).pow(2).mean().backward()
            assert_same_grads(model, plain)
        group = model.layers[1]._get_fsdp_state()._fsdp_param_group
        return group._all_gather_result is None, group.is_unsharded

    assert ranks(2, run) == [(True, False)] * 2


def test_a_layer_on_its_own_after_the_root_has_run(ranks):
    def run():
        model = Toy()
        plain = twin(model)
        shard(model)
        whole = torch.randn(4, 4)
        for m, x in ((model, my_part(whole)), (plain, whole)):
            m(x).pow(2).mean().backward()
            m.layers[1](x).pow(2).mean().backward()
        assert_same_grads(model, plain)

    ranks(2, run)


def test_activation_checkpointing_inside_and_outside_the_unit(ranks):
    def run():
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(Toy):
            def forward(self, x):
                x = self.embed(x)
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                return self.head(x)

        model = Checkpointed()
        plain = twin(model)
        shard(model)
        whole = torch.randn(4, 4)
        for m, x in ((model, my_part(whole)), (plain, whole)):
            m(x).pow(2).mean().backward()
        assert_same_grads(model, plain)

    ranks(2, run)
