"""The point of it all: N ranks with a part of the batch each train exactly as one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.mini import fully_shard
from tests.mini.models import (
    Collectives,
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
from tests.some import some


def train_beside_one_process(steps, tied, prefetch, **options):
    """Losses of both, and the parameters at the end compared."""
    model = Transformer(tied=tied)
    plain = twin(model)
    shard(model, **options)
    if prefetch:
        for i, layer in enumerate(model.layers):
            layer.set_modules_to_forward_prefetch(list(model.layers[i + 1 : i + 1 + prefetch]))
            layer.set_modules_to_backward_prefetch(list(reversed(model.layers[max(0, i - prefetch) : i])))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    losses, plain_losses = [], []
    for batch in batches(steps):
        loss, plain_loss = token_loss(model, my_part(batch)), token_loss(plain, batch)
        for value in (loss, plain_loss):
            value.backward()
        assert_same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        plain_losses.append(plain_loss.item())
    assert_same_params(model, plain, rtol=1e-3, atol=1e-5)  # AdamW divides by tiny second moments
    return losses, plain_losses


@pytest.mark.parametrize("world_size", some([3, 1, 2, 4], first=1))
def test_twenty_adamw_steps_give_the_losses_of_one_process(ranks, world_size):
    for losses, plain_losses in ranks(world_size, train_beside_one_process, 20, False, 0):
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_resharding_changes_nothing_but_communication(ranks, reshard_after_forward):
    def run():
        return train_beside_one_process(5, False, 0, reshard_after_forward=reshard_after_forward)

    for losses, plain_losses in ranks(3, run):
        assert losses == pytest.approx(plain_losses, rel=1e-5)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_prefetch_lists_change_the_order_and_not_the_losses(ranks, prefetch):
    for losses, plain_losses in ranks(2, train_beside_one_process, 5, False, prefetch):
        assert losses == pytest.approx(plain_losses, rel=1e-5)


def test_tied_weights_in_one_group(ranks):
    for losses, plain_losses in ranks(3, train_beside_one_process, 5, True, 0):
        assert losses == pytest.approx(plain_losses, rel=1e-5)


def test_one_rank_does_not_communicate(ranks):
    def run():
        model = shard(Transformer())
        with CommDebugMode() as mode:
            token_loss(model, batches(1)[0]).backward()
        return mode.get_total_counts()

    assert ranks(1, run) == [0]


def test_first_dimensions_that_no_rank_count_divides(ranks):
    """7, 15 and 17 rows, and 2 rows on 4 ranks: some ranks hold nothing."""

    def run():
        model = Toy(sizes=(7, 15, 17, 2))
        plain = twin(model)
        shard(model)
        whole = torch.randn(12, 4)
        for _ in range(3):
            for m, x in ((model, my_part(whole)), (plain, whole)):
                m(x).pow(2).mean().backward()
            assert_same_grads(model, plain)
            with torch.no_grad():
                for p in (*model.parameters(), *plain.parameters()):
                    p -= 0.1 * p.grad
                    p.grad = None
        assert_same_params(model, plain)
        return [p.to_local().shape[0] for p in model.layers[2].parameters()], model.head.w.to_local().shape[0]

    assert ranks(4, run) == [([5], 1), ([5], 1), ([5], 0), ([2], 0)]


@pytest.mark.parametrize("synchronize", ["every micro-batch", "the last"])
def test_gradient_accumulation(ranks, synchronize):
    def run():
        model = Transformer()
        plain = twin(model)
        shard(model)
        micro_batches = batches(3)
        with Collectives() as mode:
            for i, batch in enumerate(micro_batches):
                model.set_requires_gradient_sync(synchronize != "the last" or i == len(micro_batches) - 1)
                token_loss(model, my_part(batch)).backward()
                token_loss(plain, batch).backward()
        assert_same_grads(model, plain)
        return mode.counts

    groups, micro_batches = 4, 3
    reduces = groups if synchronize == "the last" else groups * micro_batches
    gathers = (2 * groups - 1) * micro_batches
    assert ranks(2, run) == [(gathers, reduces)] * 2


def test_clip_grad_norm_is_global(ranks):
    def run():
        model = Transformer()
        plain = twin(model)
        shard(model)
        batch = batches(1)[0]
        token_loss(model, my_part(batch)).backward()
        token_loss(plain, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_same_grads(model, plain)
        return norm.full_tensor().item(), plain_norm.item()

    for norm, plain_norm in ranks(3, run):
        assert norm == pytest.approx(plain_norm, rel=1e-5)
        assert norm > 0.1


def test_state_dict_round_trip(ranks):
    def run():
        model = shard(Toy(sizes=(7, 15)), reshard_after_forward=False)
        x = torch.randn(2, 4)
        before = model(x)  # leaves the parameters whole: saving has to shard them
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(type(v).__name__ == "DTensor" for v in saved.values())
        other = shard(Toy(sizes=(7, 15)))
        other.load_state_dict(saved)
        torch.testing.assert_close(other(x), before)
        assigned = shard(Toy(sizes=(7, 15)))
        assigned.load_state_dict(saved, assign=True)
        torch.testing.assert_close(assigned(x), before)
        return list(saved)

    assert ranks(4, run) == [["embed.w", "layers.0.w", "head.w"]] * 4


def test_ranks_stay_equal_when_a_module_is_unused_or_frozen(ranks):
    def run():
        model = Toy(4)
        plain = twin(model)
        for m in (model, plain):
            m.layers[1].requires_grad_(False)
            m.embed.requires_grad_(False)
            del m.layers[2:]  # layer 3 exists but takes no part
            m.spare = Toy(1)
        plain.spare.load_state_dict(model.spare.state_dict())
        fully_shard(model.spare)
        shard(model)
        whole = torch.randn(4, 4)
        for thaw in (False, True):
            for m, x in ((model, my_part(whole)), (plain, whole)):
                m.zero_grad()
                m.layers[1].requires_grad_(thaw)
                m(x).pow(2).mean().backward()
            assert_same_grads(model, plain)
        return dist.get_rank()

    assert ranks(2, run) == [0, 1]
