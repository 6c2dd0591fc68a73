"""Several backwards per optimizer step: who gathers, who reduces, and that the sum is right in every form."""

from itertools import product

import pytest
import torch

from tests.mini.models import Collectives, assert_same_grads, my_part, twin
from tests.mini.parity.tools import backward_of_both, groups_of, kind, sharded_toy, square_loss

N_UNITS = 4  # 3 layers and the root
MICRO_BATCHES = 3


def expected_counts(reshard_after_forward, reshard_after_backward, units_without_sync):
    """(all-gathers, reduce-scatters) of all micro-batches, in closed form.

    ``reshard_after_backward`` False keeps what a backward leaves until the last one; ``units_without_sync`` reduce in
    the last micro-batch only.
    """
    if reshard_after_forward:
        per_micro_batch = [2 * N_UNITS] * MICRO_BATCHES
        if not reshard_after_backward:  # kept from backward to the next forward
            per_micro_batch = [2 * N_UNITS] + [N_UNITS] * (MICRO_BATCHES - 1)
    else:
        per_micro_batch = [N_UNITS] * MICRO_BATCHES
        if not reshard_after_backward:
            per_micro_batch = [N_UNITS] + [0] * (MICRO_BATCHES - 1)
    return sum(per_micro_batch), N_UNITS * MICRO_BATCHES - units_without_sync * (MICRO_BATCHES - 1)


RESHARDS = list(product([True, False], repeat=2))
WITHOUT_SYNC = {"nobody": 0, "everybody": N_UNITS, "the root alone": 1, "two layers": 2}


@pytest.mark.parametrize(
    ("without_sync", "reshard_after_forward", "reshard_after_backward"),
    [*((name, True, True) for name in WITHOUT_SYNC), *(("everybody", *keep) for keep in RESHARDS[1:])],
)
def test_number_of_collectives(ranks, impl, without_sync, reshard_after_forward, reshard_after_backward):
    def run():
        model, plain = sharded_toy(impl, 3, reshard_after_forward=reshard_after_forward)

        def set_sync(value):
            if without_sync == "everybody":
                model.set_requires_gradient_sync(value)
            elif without_sync == "the root alone":
                model.set_requires_gradient_sync(value, recurse=False)
            elif without_sync == "two layers":
                for layer in model.layers[1:]:
                    layer.set_requires_gradient_sync(value)

        wholes = [torch.randn(4, 4) for _ in range(MICRO_BATCHES)]
        with Collectives() as mode:
            for i, whole in enumerate(wholes):
                last = i == MICRO_BATCHES - 1
                set_sync(last)
                model.set_reshard_after_backward(reshard_after_backward or last)
                square_loss(model(my_part(whole))).backward()
        for whole in wholes:
            square_loss(plain(whole)).backward()
        assert_same_grads(model, plain)
        assert {kind(p) for p in model.parameters()} == {"sharded"}
        return mode.counts

    expected = expected_counts(reshard_after_forward, reshard_after_backward, WITHOUT_SYNC[without_sync])
    assert ranks(2, run) == [expected] * 2


def test_without_sync_gradients_stay_whole_and_local_until_the_last(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 1)
        model.set_requires_gradient_sync(False)
        square_loss(model(torch.randn(2, 4))).backward()
        params = [p for g in groups_of(impl, model) for p in g.fsdp_params]
        local = [(p.sharded_param.grad, tuple(p._unsharded_param.grad.shape)) for p in params]
        registered = {kind(p) for p in model.parameters()}
        model.set_requires_gradient_sync(True)
        square_loss(model(torch.randn(2, 4))).backward()
        return local, registered, [p._unsharded_param.grad for p in params], [p.grad.shape for p in model.parameters()]

    whole = (4, 4)
    expected = ([(None, whole)] * 3, {"sharded"}, [None] * 3, [whole] * 3)
    assert ranks(2, run) == [expected] * 2


@pytest.mark.parametrize("sync", ["every backward", "last backward"])
def test_one_forward_one_backward_interleaving(ranks, impl, sync):
    """The schedule of a pipeline stage: two forwards ahead, then in turn; the last backward alone is marked as last."""

    def run():
        model, plain = sharded_toy(impl)
        for _ in range(2):
            wholes = [torch.randn(4, 4) for _ in range(4)]
            model.set_is_last_backward(False)
            model.set_requires_gradient_sync(sync == "every backward")
            losses = []
            for i in range(len(wholes) + 2):
                if i < len(wholes):
                    losses.append(square_loss(model(my_part(wholes[i]))))
                if i >= 2:
                    if i == len(wholes) + 1:
                        model.set_is_last_backward(True)
                        model.set_requires_gradient_sync(True)
                    losses[i - 2].backward()
            for whole in wholes:
                square_loss(plain(whole)).backward()
            assert_same_grads(model, plain)
            for m in (model, plain):
                m.zero_grad()

    ranks(2, run)


def test_a_unit_that_the_last_micro_batch_does_not_use_is_reduced_with_it(ranks, impl):
    def run():
        class Skips(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
                self.skip = False

            def forward(self, x):
                x = self.first(x)
                return x if self.skip else self.second(x)

        model = Skips()
        plain = twin(model)
        for unit in (model.first, model.second, model):
            impl.fully_shard(unit)
        for skip in (False, True):
            model.skip = plain.skip = skip
            whole = torch.randn(4, 4)
            model.set_requires_gradient_sync(skip)
            backward_of_both(model, plain, whole)
        assert_same_grads(model, plain)

    ranks(2, run)


def test_accumulation_adds_into_the_same_gradient(ranks, impl):
    def run():
        model, _ = sharded_toy(impl, 1)
        model(torch.randn(2, 4)).sum().backward()
        first = [p.grad for p in model.parameters()]
        model(torch.randn(2, 4)).sum().backward()
        return [a is p.grad for a, p in zip(first, model.parameters(), strict=True)]

    assert ranks(2, run) == [[True] * 3] * 2


def test_zero_grad_does_not_reach_gradients_that_are_not_reduced_yet(ranks, impl):
    """They are not on the parameters that the optimizer knows."""

    def run():
        model, plain = sharded_toy(impl)
        whole = torch.randn(4, 4)
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model.zero_grad()
            backward_of_both(model, plain, whole)
        assert_same_grads(model, plain)

    ranks(2, run)


def test_evaluation_between_micro_batches(ranks, impl):
    def run():
        model, plain = sharded_toy(impl)
        wholes = [torch.randn(4, 4) for _ in range(2)]
        model.set_requires_gradient_sync(False)
        square_loss(model(my_part(wholes[0]))).backward()
        with torch.no_grad():
            torch.testing.assert_close(model(wholes[0]), plain(wholes[0]))
        model.set_requires_gradient_sync(True)
        square_loss(model(my_part(wholes[1]))).backward()
        for whole in wholes:
            square_loss(plain(whole)).backward()
        assert_same_grads(model, plain)

    ranks(2, run)
