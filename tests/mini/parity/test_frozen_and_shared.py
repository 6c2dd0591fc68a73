"""Parameters that are special: frozen, used twice, ignored, unused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.mini.models import Collectives, Toy, Transformer, assert_same_grads, my_part, shard, twin
from tests.mini.parity.tools import (
    Issued,
    backward_of_both,
    group_of,
    raised,
    sharded_toy,
    square_loss,
    train_side_by_side,
)


def step(model, plain):
    """One backward of each; gradients are equal, and None where the other's are."""
    backward_of_both(model, plain, torch.randn(6, 4), afresh=True)
    assert_same_grads(model, plain)


# Frozen


@pytest.mark.parametrize("frozen", [("embed.w",), ("layers.0.w", "layers.1.w"), ("embed.w", "head.w")], ids=str)
def test_frozen_parameters_are_gathered_and_not_reduced(ranks, impl, frozen):
    def run():
        model = Toy(3)
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        plain = twin(model)
        shard(model, impl.fully_shard)
        with Issued() as mode:
            step(model, plain)
        gathered = {c.numel for c in mode.of("AG")}
        reduced = sum(c.numel for c in mode.of("RS"))
        train_side_by_side(model, plain)
        return gathered, reduced, [n for n, p in model.named_parameters() if p.grad is not None]

    trainable = 5 - len(frozen)
    assert ranks(2, run) == [({16, 32}, trainable * 8, [])] * 2


def test_a_group_with_frozen_and_trainable_parameters(ranks, impl):
    def run():
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        for linear in model:
            linear.bias.requires_grad_(False)
        plain = twin(model)
        impl.fully_shard(model)
        with Collectives() as mode:
            step(model, plain)
        assert model[0].bias.grad is None
        return [n for name, n in mode.issued if "reduce" in name]

    assert ranks(2, run) == [[(6 * 4 + 4 * 5) // 2]] * 2  # rows padded to whole shards, weights alone


def test_freezing_with_several_calls_of_a_unit_in_a_forward(ranks, impl):
    def run():
        class Repeats(Toy):
            def forward(self, x):
                for _ in range(2):
                    for layer in self.layers:
                        x = torch.tanh(layer(x))
                return self.head(self.embed(x))

        model = Repeats(3)
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i % 2 == 0)
        plain = twin(model)
        shard(model, impl.fully_shard)
        for _ in range(2):
            step(model, plain)
        for m in (model, plain):
            for p in m.parameters():
                p.requires_grad_(not p.requires_grad)
        for _ in range(2):
            step(model, plain)

    ranks(2, run)


def test_everything_frozen(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        for p in model.parameters():
            p.requires_grad_(False)
        x = torch.randn(2, 4, requires_grad=True)
        with Collectives() as mode:
            out = model(x)
            square_loss(out).backward()
        torch.testing.assert_close(out, plain(x))
        return mode.counts, x.grad is not None, {p.grad for p in model.parameters()}

    assert ranks(2, run) == [((4 + 3, 0), True, {None})] * 2


@pytest.mark.parametrize("looks_again", [False, True])
def test_in_mixed_precision_a_unit_that_was_frozen_in_its_first_forward_is_unsharded_when_it_is_thawed(
    ranks, impl, looks_again
):
    """Only then does FSDP look again which dtype its gradients have."""

    def run():
        model, _ = sharded_toy(impl, 1, mp_policy=impl.MixedPrecisionPolicy(torch.bfloat16))
        model.requires_grad_(False)
        model(torch.ones(2, 4))
        model.reshard()  # the root kept whole parameters, and it is the shards that are thawed
        model.requires_grad_(True)
        for unit in (*model.layers, model) if looks_again else ():
            unit.unshard()
            unit.reshard()
        error = raised(lambda: model(torch.ones(2, 4)).sum().backward())
        return error, [p.grad is not None for p in model.parameters()]

    for error, has_grad in ranks(2, run):
        if looks_again:
            assert (error, has_grad) == (None, [True] * 3)
        else:
            assert error[0] == "RuntimeError"
            if impl.__name__ == "fsdp_sim.mini":
                assert "parameters of unit 'layers.0' were frozen" in error[1]


class LowRank(nn.Module):
    """A frozen matrix and a trainable correction of it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("adapters", ["in the unit of their layer", "in a unit of their own"])
def test_low_rank_adapters(ranks, impl, adapters):
    def run():
        model = nn.Sequential(LowRank(), LowRank(), LowRank())
        plain = twin(model)
        for layer in model:
            if adapters == "in a unit of their own":
                impl.fully_shard([layer.down, layer.up])
            impl.fully_shard(layer)
        impl.fully_shard(model)
        adam = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
        for _ in range(3):
            step(model, plain)
            for optimizer in adam:
                optimizer.step()
        torch.testing.assert_close(model[0].base.weight.full_tensor(), plain[0].base.weight)

    ranks(2, run)


# Shared


@pytest.mark.parametrize("how", ["the root has both", "a list of both"])
def test_tied_weights_in_one_group(ranks, impl, how):
    """17 rows on 3 ranks; gathered once, registered at both ends."""

    def run():
        model = Transformer(1, tied=True)
        plain = twin(model)
        if how == "a list of both":
            impl.fully_shard([model.tokens, model.head])
        shard(model, impl.fully_shard)
        assert model.tokens.weight is model.head.weight
        seen = []
        model.layers[0].register_forward_hook(lambda *_: seen.append(model.tokens.weight is model.head.weight))
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        ids = torch.randint(17, (6, 5), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            backward_of_both(model, plain, ids, afresh=True)
            assert_same_grads(model, plain)
            for optimizer in sgd:
                optimizer.step()
        assert model.tokens.weight is model.head.weight
        unit = model.tokens if how == "a list of both" else model
        return (
            seen,
            len(list(model.parameters())) == len(list(plain.parameters())),
            sum(p.sharded_param.shape == (17, 14) for p in group_of(impl, unit).fsdp_params),
        )

    assert ranks(3, run) == [([True, True], True, 1)] * 3


def test_a_shared_module_that_is_a_unit_itself(ranks, impl):
    def run():
        common = nn.Linear(4, 4)
        model = nn.Sequential(nn.Sequential(common, nn.Tanh()), nn.Sequential(nn.Linear(4, 4), common))
        plain = twin(model)
        for unit in (common, model[0], model[1], model):
            impl.fully_shard(unit)
        train_side_by_side(model, plain)

    ranks(2, run)


# Ignored


def test_ignored_parameters_are_left_alone(ranks, impl):
    """Not sharded, not gathered, not reduced: each rank has its own gradient."""

    def run():
        model = Toy(2)
        plain = twin(model)
        ignored = {model.embed.w, model.layers[0].w}
        for unit in (*model.layers, model):
            impl.fully_shard(unit, ignored_params=ignored)
        assert model.embed.w in ignored
        kinds = [isinstance(p, DTensor) for p in model.parameters()]
        whole = torch.randn(4, 4)
        with Collectives() as mode:
            square_loss(model(my_part(whole))).backward()
        square_loss(plain(my_part(whole))).backward()
        torch.testing.assert_close(model.embed.w.grad, plain.embed.w.grad)
        plain.zero_grad()
        square_loss(plain(whole)).backward()
        torch.testing.assert_close(model.head.w.grad.full_tensor(), plain.head.w.grad)
        return kinds, mode.counts

    # the first layer has nothing left to shard: 2 groups. The root keeps its own for backward.
    assert ranks(2, run) == [([False, False, True, True], (2 + 1, 2))] * 2


def test_ignored_parameters_under_ddp(ranks, impl):
    """The outer wrapper reduces what `fully_shard` ignores."""

    def run():
        model = Toy(2)
        plain = twin(model)
        ignored = {model.embed.w, model.head.w}
        for unit in (*model.layers, model):
            impl.fully_shard(unit, ignored_params=ignored)
        sharded = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
        wrapped = DistributedDataParallel(model)
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for _ in range(3):
            whole = torch.randn(4, 4)
            backward_of_both(wrapped, plain, whole, afresh=True)
            for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
                grad = a.grad.full_tensor() if name in sharded else a.grad
                torch.testing.assert_close(grad, b.grad)
            for optimizer in sgd:
                optimizer.step()

    ranks(2, run)


# Unused


class Routed(nn.Module):
    """Uses one of two experts; both are in one unit with the rest."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.choice = 0

    def forward(self, x):
        return self.experts[self.choice](self.stem(x))


def test_unused_parameters_are_left_out_of_the_reduction_and_have_no_gradient(ranks, impl):
    def run():
        model = Routed()
        plain = twin(model)
        impl.fully_shard(model)
        reduced = []
        for choice in (0, 1):
            model.choice = plain.choice = choice
            with Collectives() as mode:
                step(model, plain)
            reduced.append([n for name, n in mode.issued if "reduce" in name])
        return reduced, [p.grad is None for p in model.experts[0].parameters()]

    assert ranks(2, run) == [([[20], [20]], [True, True])] * 2


@pytest.mark.usefixtures("since_torch_2_13")
def test_with_unused_parameters_reduced_ranks_may_use_different_ones(ranks, impl):
    def run():
        model = Routed()
        plain = twin(model)
        impl.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        for swap in (0, 1):
            parts = torch.randn(4, 4).chunk(2)
            for m in (model, plain):
                m.zero_grad()
            model.choice = (dist.get_rank() + swap) % 2
            with Collectives() as mode:
                square_loss(model(parts[dist.get_rank()])).backward()
            assert [n for name, n in mode.issued if "reduce" in name] == [30]
            for rank, part in enumerate(parts):
                plain.choice = (rank + swap) % 2
                (square_loss(plain(part)) / 2).backward()
            assert_same_grads(model, plain)
        model.set_reduce_scatter_unused_params(False, recurse=False)
        return group_of(impl, model).reduce_scatter_unused_params

    assert ranks(2, run) == [False, False]


@pytest.mark.usefixtures("since_torch_2_13")
def test_with_unused_parameters_reduced_they_have_a_gradient_of_zero(ranks, impl):
    def run():
        model = Routed()
        impl.fully_shard(model.experts[1])
        impl.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        model(torch.randn(2, 4)).sum().backward()
        never_gathered = [p.grad is None for p in model.experts[1].parameters()]
        with torch.no_grad():
            model.choice = 1
            model(torch.randn(2, 4))
        model.choice = 0
        model(torch.randn(2, 4)).sum().backward()
        return never_gathered, [p.grad.full_tensor().abs().sum().item() for p in model.experts[1].parameters()]

    # a unit that was never gathered has nothing to reduce; from its first gather on it has
    assert ranks(2, run) == [([True, True], [0.0, 0.0])] * 2
