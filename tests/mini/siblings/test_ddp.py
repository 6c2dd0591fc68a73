"""DDP: N ranks with a part of the batch each train as one process with the whole batch, and as torch's DDP."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from fsdp_sim.mini.siblings import DistributedDataParallel
from fsdp_sim.timeline import Memory, Phase
from tests.mini.models import Toy, Transformer, batches, my_part, token_loss
from tests.mini.siblings.training import (
    AFTER_ADAMW,
    assert_equal_to,
    counts,
    labels,
    my_part_of_it,
    record,
    timeline_of,
    waited_for,
    whole_batch,
)
from tests.some import some

SMALL = {"bucket_cap_mb": 0.003}  # several buckets


@pytest.mark.parametrize("world_size", some([3, 1, 2, 4], first=1))
@pytest.mark.parametrize("options", [{}, SMALL, {**SMALL, "find_unused_parameters": True}], ids=str)
def test_ten_adamw_steps_are_those_of_one_process(ranks, world_size, options):
    def run():
        model = Transformer()
        expected, plain = whole_batch(model, 10, lr=1e-2)
        ddp = DistributedDataParallel(model, **options)
        losses = my_part_of_it(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), 10)
        assert_equal_to(plain, {n: p.grad for n, p in model.named_parameters()}, grads=True)
        assert_equal_to(plain, dict(model.named_parameters()), **AFTER_ADAMW)
        return losses, expected

    for losses, expected in ranks(world_size, run):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[-1] < losses[0]


def test_gradients_are_those_of_torch_bit_by_bit(ranks):
    def run():
        model = Transformer(tied=True)
        theirs, ours = TorchDDP(copy.deepcopy(model), **SMALL), DistributedDataParallel(model, **SMALL)
        for batch in batches(2):  # torch's first backward has one bucket
            for ddp in (theirs, ours):
                ddp.zero_grad()
                token_loss(ddp, my_part(batch)).backward()
        assert theirs.state_dict().keys() == ours.state_dict().keys()
        return [torch.equal(a.grad, b.grad) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)]

    assert all(all(equal) for equal in ranks(2, run))


def test_every_rank_starts_with_rank_0s_parameters_and_buffers(ranks):
    def run():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model[1].running_mean += dist.get_rank()
        DistributedDataParallel(model)
        return [t.tolist() for t in model.state_dict().values()]

    first, *others = ranks(3, run)
    assert others == [first, first]


def test_buffers_are_rank_0s_before_each_forward_unless_told_otherwise(ranks):
    def run():
        means = []
        for broadcast_buffers in (True, False):
            model = nn.BatchNorm1d(1)
            ddp = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
            for _ in range(2):
                ddp(torch.full((2, 1), float(dist.get_rank())) + torch.tensor([[0.0], [1.0]]))
            means.append(model.running_mean.item())
        return means

    rank_0, rank_1 = ranks(2, run)
    assert rank_0[0] == pytest.approx(0.1 * 0.5 * 0.9 + 0.1 * 0.5)
    assert rank_1[0] == pytest.approx(0.1 * 0.5 * 0.9 + 0.1 * 1.5), "rank 0's mean, then its own batch"
    assert rank_1[1] == pytest.approx(0.1 * 1.5 * 0.9 + 0.1 * 1.5)


def test_one_all_reduce_per_bucket_in_order_as_soon_as_its_gradients_are_there(ranks):
    def run():
        ddp = DistributedDataParallel(Toy(3), bucket_cap_mb=64 / 2**20)  # each matrix is a bucket
        return record(lambda: ddp(torch.randn(4, 4)).sum().backward())

    for events in ranks(2, run):
        assert labels(events) == [
            "FWD root", "FWD layers.0", "FWD layers.1", "FWD layers.2", "FWD root",
            "BWD root", "ALL_REDUCE(bucket.0)", "BWD root",
            "BWD layers.2", "ALL_REDUCE(bucket.1)", "BWD layers.2",
            "BWD layers.1", "ALL_REDUCE(bucket.2)", "BWD layers.1",
            "BWD layers.0", "ALL_REDUCE(bucket.3)", "BWD layers.0",
            "BWD root", "ALL_REDUCE(bucket.4)", "BWD root",
        ]  # fmt: skip
        assert waited_for(events)["ALL_REDUCE(bucket.1)"] == ["BWD layers.2"]
        assert {e.bytes for e in events if e.op == "ALL_REDUCE"} == {64}
        assert {e.phase for e in events if e.op == "ALL_REDUCE"} == {Phase.BACKWARD}


def test_buckets_are_sent_in_order_even_if_their_gradients_come_in_another(ranks):
    """The first layer's weight is used last, too, so the last bucket is full before others are."""

    class Twisted(Toy):
        def forward(self, x):
            return self.layers[1](self.head(self.layers[0](self.embed(x))))

    def run():
        model = Twisted(2)
        ddp = DistributedDataParallel(model, bucket_cap_mb=64 / 2**20)
        return labels(record(lambda: ddp(torch.randn(4, 4)).sum().backward()), "ALL_REDUCE")

    assert ranks(2, run) == [[f"ALL_REDUCE(bucket.{i})" for i in range(4)]] * 2


def test_one_rank_sends_nothing(ranks):
    def run():
        ddp = DistributedDataParallel(Transformer(), find_unused_parameters=True)
        return counts(record(lambda: token_loss(ddp, batches(1)[0]).backward()))

    assert ranks(1, run) == [{}]


@pytest.mark.parametrize("keep_zeros", [True, False], ids=["zero_grad to zero", "zero_grad to None"])
def test_no_sync_accumulates_without_communication(ranks, keep_zeros):
    def run():
        model = Transformer()
        plain = copy.deepcopy(model)
        ddp = DistributedDataParallel(model, **SMALL)
        sent = []
        for _ in range(2):
            ddp.zero_grad(set_to_none=not keep_zeros)
            plain.zero_grad(set_to_none=not keep_zeros)
            for i, batch in enumerate(batches(3)):

                def micro_batch(i=i, batch=batch):
                    with ddp.no_sync() if i < 2 else nullcontext():
                        token_loss(ddp, my_part(batch)).backward()

                sent.append(sum(counts(record(micro_batch)).values()))
                token_loss(plain, batch).backward()
            assert_equal_to(plain, {n: p.grad for n, p in model.named_parameters()}, grads=True)
        return sent

    for sent in ranks(2, run):
        assert sent[0] == sent[1] == sent[3] == sent[4] == 0
        assert sent[2] == sent[5] > 1


def test_without_no_sync_micro_batches_accumulate_too(ranks):
    def run():
        model = Transformer()
        plain = copy.deepcopy(model)
        ddp = DistributedDataParallel(model)
        for batch in batches(2):
            token_loss(ddp, my_part(batch)).backward()
            token_loss(plain, batch).backward()
        assert_equal_to(plain, {n: p.grad for n, p in model.named_parameters()}, grads=True)

    ranks(3, run)


def test_gradients_are_views_of_the_buckets(ranks):
    def run():
        ddp = DistributedDataParallel(Toy(3), bucket_cap_mb=64 / 2**20)
        x = torch.randn(4, 4)
        ddp(x).sum().backward()
        storages = [p.grad.untyped_storage().data_ptr() for p in ddp.parameters()]
        buffers = [bucket.buffer.untyped_storage().data_ptr() for bucket in ddp.reducer.buckets]
        return storages == list(reversed(buffers))

    assert ranks(2, run) == [True, True]


class Choosy(nn.Module):
    """Uses ``left`` or ``right``, never ``spare``."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.spare = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, go_left):
        return (self.left if go_left else self.right)(x)


def test_unused_parameters_count_as_zero_and_those_no_rank_uses_keep_none(ranks):
    def run():
        results = []
        for wrap in (TorchDDP, DistributedDataParallel):
            torch.manual_seed(0)
            ddp = wrap(Choosy(), find_unused_parameters=True, bucket_cap_mb=1 / 2**20)
            for left_rank in (0, 1):  # the second time nothing of the first is left
                ddp.zero_grad()
                ddp(torch.ones(2, 3), go_left=dist.get_rank() == left_rank).sum().backward()
            results.append({n: None if p.grad is None else p.grad.tolist() for n, p in ddp.named_parameters()})
        return results

    for theirs, ours in ranks(2, run):
        assert ours == theirs
        assert ours["module.left.weight"] == ours["module.right.weight"] == [[1.0, 1.0, 1.0]], "(2 + 0) / 2"
        assert ours["module.spare.weight"] is None


def test_a_parameter_without_gradient_is_an_error_that_names_it_and_training_can_go_on(ranks):
    def run():
        model = Choosy()
        ddp = DistributedDataParallel(model)
        with pytest.raises(RuntimeError, match=r"no gradient for (right.\w+, |spare.\w+, )*right.weight") as error:
            ddp(torch.ones(2, 3), go_left=True).sum().backward()
        ddp.zero_grad()
        out = model.left(torch.ones(2, 3)) + model.right(torch.ones(2, 3)) + model.spare(torch.ones(2, 3))
        out.sum().backward()
        return str(error.value), model.right.weight.grad

    for message, grad in ranks(2, run):
        assert "find_unused_parameters=True" in message
        assert grad.tolist() == [[2.0, 2.0, 2.0]]


def test_frozen_parameters_stay_out_of_it(ranks):
    def run():
        model = Toy(2)
        model.layers[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
        ddp(torch.randn(4, 4)).sum().backward()
        return model.layers[0].w.grad, sum(bucket.numel for bucket in ddp.reducer.buckets)

    assert ranks(2, run) == [(None, 3 * 16)] * 2


def test_memory_is_whole_parameters_gradients_and_optimizer_state(ranks):
    def run():
        ddp = DistributedDataParallel(Toy(3))
        optimizer = torch.optim.AdamW(ddp.parameters())

        def step():
            ddp(torch.randn(4, 4)).sum().backward()
            optimizer.step()

        _, live = timeline_of(record(step)).live_bytes(dist.get_rank())
        return {category: int(values[-1]) for category, values in live.items()}

    parameters = 5 * 16 * 4
    expected = {
        Memory.UNSHARDED: parameters,
        Memory.UNSHARDED_GRAD: parameters,
        Memory.OPTIMIZER: 2 * parameters + 5 * 4,  # two moments, and a step count each
    }
    assert ranks(2, run) == [expected] * 2


def test_errors_come_before_any_work(ranks):
    def run():
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(RuntimeError, match="no parameter of Linear needs a gradient"):
            DistributedDataParallel(frozen)
        with pytest.raises(ValueError, match="bucket_cap_mb=0: must be above 0"):
            DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0)
        with pytest.raises(RuntimeError, match=r"meta device: \['weight', 'bias'\]; call module.to_empty"):
            DistributedDataParallel(nn.Linear(2, 2, device="meta"))
        with pytest.raises(RuntimeError, match=r"rank 0 has the parameter \('weight', \(2, 2\), .* where rank 1 has"):
            DistributedDataParallel(nn.Linear(2, 2 + dist.get_rank()))

    ranks(2, run)


def test_without_a_process_group_the_message_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"no process group; call torch.distributed.init_process_group"):
        DistributedDataParallel(nn.Linear(2, 2))


def test_a_gradient_written_twice_in_one_backward_is_an_error(ranks):
    def run():
        model = nn.Linear(2, 2)
        DistributedDataParallel(model)
        x = torch.ones(1, 2, requires_grad=True)
        y = model(checkpoint(model, x, use_reentrant=True))
        with pytest.raises(RuntimeError, match=r"(weight|bias) was written twice .* use_reentrant=False"):
            y.sum().backward()

    ranks(1, run)
