"""Activation checkpointing, in both orders: a unit that is checkpointed, and a checkpoint inside or across units."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.mini.models import Matrix, assert_same_grads, my_part, twin
from tests.mini.parity.tools import backward_of_both, groups_of, kind, square_loss


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class CheckpointedBlock(Block):
    """A checkpoint around a part of the unit."""

    def forward(self, x):
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), x, use_reentrant=self.use_reentrant)


class Stack(nn.Module):
    def __init__(self, n: int = 3, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = Matrix()
        self.blocks = nn.ModuleList(block() for _ in range(n))
        self.last = Matrix()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class CheckpointsItsBlocks(Stack):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class CheckpointsInsideBlocks(Stack):
    def __init__(self):
        super().__init__(block=CheckpointedBlock)


class CheckpointsAcrossBlocks(Stack):
    """One checkpoint around all blocks, each a unit."""

    def forward(self, x):
        def through(x):
            for block in self.blocks:
                x = block(x)
            return x

        return self.last(checkpoint(through, self.first(x), use_reentrant=self.use_reentrant))


def compare(impl, model, plain, steps=2):
    for _ in range(steps):
        whole = torch.randn(4, 4)
        backward_of_both(model, plain, whole, afresh=True)
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda text, name=name: f"{name}: {text}")
        assert {kind(p) for p in model.parameters()} == {"sharded"}
        assert all(g._all_gather_result is None for g in groups_of(impl, model))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.step()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("model_cls", [CheckpointsItsBlocks, CheckpointsAcrossBlocks, CheckpointsInsideBlocks])
def test_functional_checkpoints_around_and_inside_units(ranks, impl, model_cls, use_reentrant):
    def run():
        model = model_cls()
        for module in model.modules():
            module.use_reentrant = use_reentrant
        plain = twin(model)
        for unit in (*model.blocks, model):
            impl.fully_shard(unit)
        compare(impl, model, plain)

    ranks(2, run)


@pytest.mark.parametrize("order", ["checkpoint, then shard the wrapper", "shard, then checkpoint", "shard the inside"])
@pytest.mark.parametrize("how", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT], ids=lambda how: how.name)
def test_the_wrapper_in_both_orders(ranks, impl, order, how):
    def run():
        model = Stack()
        plain = twin(model)
        for i, block in enumerate(model.blocks):
            if order == "shard, then checkpoint":
                impl.fully_shard(block)
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=how)
            if order == "checkpoint, then shard the wrapper":
                impl.fully_shard(model.blocks[i])
            if order == "shard the inside":
                impl.fully_shard(block.up)
                impl.fully_shard(block.down)
        impl.fully_shard(model)
        compare(impl, model, plain)

    ranks(2, run)


@pytest.mark.parametrize("order", ["checkpoint first", "shard first"])
def test_the_composable_checkpoint_in_both_orders(ranks, impl, order):
    def run():
        model = Stack()
        plain = twin(model)
        for block in model.blocks:
            if order == "checkpoint first":
                composable_checkpoint(block)
            impl.fully_shard(block)
            if order == "shard first":
                composable_checkpoint(block)
        impl.fully_shard(model)
        compare(impl, model, plain)

    ranks(2, run)


def test_checkpoint_of_the_whole_model(ranks, impl):
    def run():
        model = Stack()
        plain = twin(model)
        for unit in (*model.blocks, model):
            impl.fully_shard(unit)
        for _ in range(2):
            whole = torch.randn(4, 4)
            x = my_part(whole)
            square_loss(checkpoint(model, x, use_reentrant=False)).backward()
            square_loss(plain(whole)).backward()
            assert_same_grads(model, plain)

    ranks(2, run)


def test_two_forwards_of_checkpointed_units_before_their_backwards(ranks, impl):
    """The backward of the second frees the parameters that the recomputation of the first then needs."""

    def run():
        model = CheckpointsItsBlocks(2)
        model.use_reentrant = False
        plain = twin(model)
        for unit in (*model.blocks, model):
            impl.fully_shard(unit)
        wholes = [torch.randn(4, 4) for _ in range(2)]
        for m, parts in ((model, [my_part(w) for w in wholes]), (plain, wholes)):
            losses = [square_loss(m(x)) for x in parts]
            for loss in reversed(losses):
                loss.backward()
        assert_same_grads(model, plain)

    ranks(2, run)


def test_one_backward_of_two_forwards_of_a_checkpointed_unit_with_a_unit_inside(ranks, impl):
    """The backward of one forward freed the inner unit; recomputing the other gathers it again."""

    def run():
        model = CheckpointsItsBlocks(2)
        model.use_reentrant = False
        plain = twin(model)
        for block in model.blocks:
            impl.fully_shard(block.up)
            impl.fully_shard(block)
        impl.fully_shard(model)
        wholes = [torch.randn(4, 4) for _ in range(2)]
        for m, parts in ((model, [my_part(w) for w in wholes]), (plain, wholes)):
            sum(square_loss(m(x)) for x in parts).backward()
        assert_same_grads(model, plain)

    ranks(2, run)


def test_a_checkpointed_unit_in_bf16(ranks, impl):
    def run():
        model = CheckpointsItsBlocks(2)
        model.use_reentrant = False
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        without = twin(model)
        without.__class__ = Stack
        grads = []
        for m in (model, without):
            for block in m.blocks:
                impl.fully_shard(block, mp_policy=policy)
            impl.fully_shard(m)
            square_loss(m(torch.ones(2, 4))).backward()
            grads.append([p.grad.to_local() for p in m.parameters()])
        return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    assert ranks(2, run) == [True, True]
