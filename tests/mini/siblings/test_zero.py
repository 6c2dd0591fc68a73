"""ZeRO-1 and ZeRO-2: the numbers of one process, a rank's part of the memory, and what travels."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.mini.siblings import ZeroOptimizer, watch
from fsdp_sim.timeline import Memory
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

SMALL = {"bucket_cap_mb": 0.003}  # several buckets
STAGES = pytest.mark.parametrize("stage", [1, 2])


def zero(model, stage, optimizer_class=torch.optim.AdamW, **options):
    return ZeroOptimizer(model.parameters(), optimizer_class, stage=stage, **{**SMALL, "lr": 1e-2, **options})


def whole_grads(model, optimizer):
    """The gradients by parameter: ``.grad`` in stage 1, put together from all ranks' parts in stage 2."""
    if optimizer.stage == 1:
        return {name: p.grad for name, p in model.named_parameters()}
    by_param = {}
    for bucket in optimizer.buckets:
        parts = [torch.empty_like(bucket.owned) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, bucket.owned.grad)
        by_param |= {p: bucket.part(torch.cat(parts), p) for p in bucket.params}
    return {name: by_param[p] for name, p in model.named_parameters()}


@STAGES
@pytest.mark.parametrize("world_size", [1, 3])
def test_ten_adamw_steps_are_those_of_one_process(ranks, world_size, stage):
    def run():
        model = Transformer(tied=True)
        expected, plain = whole_batch(model, 10, lr=1e-2)
        optimizer = zero(model, stage)
        losses = my_part_of_it(model, optimizer, 10)
        assert_equal_to(plain, whole_grads(model, optimizer), grads=True)
        assert_equal_to(plain, dict(model.named_parameters()), **AFTER_ADAMW)
        return losses, expected

    for losses, expected in ranks(world_size, run):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses[-1] < losses[0]


@STAGES
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_optimizer_that_treats_elements_alone(ranks, stage, optimizer_class):
    def run():
        model = Toy(sizes=(7, 15, 17, 2))
        plain = copy.deepcopy(model)
        optimizers = zero(model, stage, optimizer_class), optimizer_class(plain.parameters(), lr=1e-2)
        x = torch.randn(12, 4)
        for _ in range(3):
            for m, batch, optimizer in ((model, my_part(x), optimizers[0]), (plain, x, optimizers[1])):
                optimizer.zero_grad()
                m(batch).pow(2).mean().backward()
                optimizer.step()
        assert_equal_to(plain, dict(model.named_parameters()))

    ranks(3, run)


@STAGES
def test_a_rank_holds_its_part_of_the_optimizer_state(ranks, stage):
    def run():
        model = Transformer()
        optimizer = zero(model, stage)
        my_part_of_it(model, optimizer, 1)
        held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim)
        return held, sum(p.numel() for p in model.parameters()), len(optimizer.buckets)

    for world_size in (2, 4):
        for held, numel, n_buckets in ranks(world_size, run):
            two_moments = 2 * numel / world_size
            assert two_moments <= held < two_moments + 2 * n_buckets, "at most one element of padding per bucket"


@STAGES
def test_memory_of_a_step(ranks, stage):
    """Five buckets of one matrix each, 64 bytes, on two ranks."""

    def run():
        model = watch(Toy(3))
        optimizer = zero(model, stage, bucket_cap_mb=64 / 2**20)

        def step():
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()

        _, live = timeline_of(record(step)).live_bytes(dist.get_rank())
        return {category: (int(values.max()), int(values[-1])) for category, values in live.items()}

    expected = {
        Memory.UNSHARDED: (5 * 64, 5 * 64),
        Memory.OPTIMIZER: (5 * (2 * 32 + 4),) * 2,  # half of two moments, and a step count
        Memory.UNSHARDED_GRAD: (5 * 64, 5 * 64) if stage == 1 else (2 * 64, 0),
    }
    if stage == 2:
        expected[Memory.RS_OUTPUT] = (5 * 32, 5 * 32)
    assert ranks(2, run) == [expected] * 2


@pytest.mark.parametrize(("stage", "reduce"), [(1, "ALL_REDUCE"), (2, "REDUCE_SCATTER")])
def test_what_a_step_sends_and_when(ranks, stage, reduce):
    def run():
        model = watch(Toy(1))
        optimizer = zero(model, stage, bucket_cap_mb=64 / 2**20)

        def step():
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()

        return record(step)

    for events in ranks(2, run):
        assert labels(events) == [
            "FWD root", "FWD layers.0", "FWD root",
            "BWD root", f"{reduce}(bucket.0)", "BWD root",
            "BWD layers.0", f"{reduce}(bucket.1)", "BWD layers.0",
            "BWD root", f"{reduce}(bucket.2)", "BWD root",
            "OPTIM", *(f"ALL_GATHER(bucket.{i})" for i in range(3)),
        ]  # fmt: skip
        assert {e.bytes for e in events if e.group_size > 1} == {64}
        assert waited_for(events)[f"{reduce}(bucket.1)"] == ["BWD layers.0"]
        assert waited_for(events)["OPTIM"] == [f"{reduce}(bucket.2)"]


@STAGES
def test_one_rank_sends_nothing(ranks, stage):
    def run():
        model = Transformer()
        optimizer = zero(model, stage)
        return counts(record(lambda: my_part_of_it(model, optimizer, 1)))

    assert ranks(1, run)[0].keys() <= {"ALL_REDUCE"}, "that of the test's own loss"


@STAGES
def test_micro_batches_accumulate(ranks, stage):
    def run():
        model = Transformer()
        plain = copy.deepcopy(model)
        optimizer = zero(model, stage)
        for _ in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            for batch in batches(3):
                token_loss(model, my_part(batch)).backward()
                token_loss(plain, batch).backward()
            assert_equal_to(plain, whole_grads(model, optimizer), grads=True)

    ranks(2, run)


@STAGES
def test_clipping_is_by_the_norm_of_the_whole_gradient(ranks, stage):
    def run():
        model = Transformer()
        plain = copy.deepcopy(model)
        optimizer = zero(model, stage, torch.optim.SGD, lr=1.0)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        batch = batches(1)[0]
        token_loss(model, my_part(batch)).backward()
        token_loss(plain, batch).backward()
        norms = optimizer.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        plain_optimizer.step()
        assert_equal_to(plain, dict(model.named_parameters()))
        return [norm.item() for norm in norms]

    for norm, plain_norm in ranks(3, run):
        assert norm == pytest.approx(plain_norm, rel=1e-5)
        assert norm > 0.1


@STAGES
def test_groups_named_parameters_frozen_ones_and_schedulers(ranks, stage):
    """Weight decay for matrices alone, a frozen layer, two dtypes, and a learning rate that a scheduler moves."""

    def run():
        model = Transformer()
        model.layers[1].requires_grad_(False)
        plain = copy.deepcopy(model)

        def groups(m):
            named = list(m.named_parameters())
            return [
                {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.5},
                {"params": [(n, p) for n, p in named if p.ndim == 1], "weight_decay": 0.0},
            ]

        zero_optimizer = ZeroOptimizer(groups(model), torch.optim.AdamW, stage=stage, lr=1e-2, **SMALL)
        plain_optimizer = torch.optim.AdamW(groups(plain), lr=1e-2)
        pairs = [(model, zero_optimizer, my_part), (plain, plain_optimizer, lambda batch: batch)]
        schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for _, o, _ in pairs]
        for batch in batches(3):
            for (m, optimizer, part), scheduler in zip(pairs, schedulers, strict=True):
                optimizer.zero_grad()
                token_loss(m, part(batch)).backward()
                optimizer.step()
                scheduler.step()
        assert_equal_to(plain, dict(model.named_parameters()), **AFTER_ADAMW)
        return zero_optimizer.param_groups[0]["lr"]

    assert ranks(2, run) == [1e-2 / 8] * 2


def test_two_dtypes_make_two_buckets(ranks):
    def run():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5, dtype=torch.float64))
        optimizer = zero(model, 2, bucket_cap_mb=25)
        return [(bucket.numel, str(bucket.whole.dtype)) for bucket in optimizer.buckets]

    assert ranks(4, run) == [[(20, "torch.float64"), (12, "torch.float32")]] * 4


@STAGES
def test_every_rank_starts_with_rank_0s_parameters(ranks, stage):
    def run():
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(3, 5)
        zero(model, stage)
        return model.weight.tolist()

    first, *others = ranks(3, run)
    assert others == [first, first]


@STAGES
def test_state_is_saved_and_loaded_rank_by_rank(ranks, stage):
    def run():
        model = Transformer()
        optimizer = zero(model, stage)
        my_part_of_it(model, optimizer, 2)
        copied = copy.deepcopy(model)
        resumed = zero(copied, stage)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return my_part_of_it(model, optimizer, 2), my_part_of_it(copied, resumed, 2)

    for losses, resumed_losses in ranks(2, run):
        assert losses == resumed_losses


@STAGES
def test_an_unused_parameter_is_an_error_or_counts_as_zero(ranks, stage):
    def run():
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
        strict = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, stage=stage, lr=1.0)
        with pytest.raises(RuntimeError, match=r"no gradient for spare.bias, spare.weight"):
            model["used"](torch.ones(1, 2)).sum().backward()
        strict.zero_grad()
        model = copy.deepcopy(model)
        before = model["spare"].weight.tolist()
        lenient = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=1.0, find_unused_parameters=True)
        model["used"](torch.ones(1, 2)).sum().backward()
        lenient.step()
        return model["spare"].weight.tolist() == before

    assert ranks(2, run) == [True, True]


def test_a_closure_is_called_once_with_gradients_on(ranks):
    def run():
        model = nn.Linear(2, 1)
        optimizer = zero(model, 2, weight_decay=0.0)

        def closure():
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            return optimizer.step(closure).item() == pytest.approx(model(torch.ones(1, 2)).item() + 0.03)

    assert ranks(2, run) == [True, True]


def test_errors_come_before_any_work(ranks):
    def run():
        params = list(nn.Linear(2, 2).parameters())
        with pytest.raises(ValueError, match=r"stage=3: must be 1 or 2; stage 3 is fsdp_sim.mini.fully_shard"):
            ZeroOptimizer(params, torch.optim.AdamW, stage=3)
        with pytest.raises(ValueError, match="LBFGS does not treat each element alone"):
            ZeroOptimizer(params, torch.optim.LBFGS)
        with pytest.raises(ValueError, match="bucket_cap_mb=0: must be above 0"):
            ZeroOptimizer(params, torch.optim.AdamW, bucket_cap_mb=0)
        with pytest.raises(TypeError, match="learning_rate"):
            ZeroOptimizer(params, torch.optim.AdamW, learning_rate=1)
        with pytest.raises(RuntimeError, match="meta device"):
            ZeroOptimizer(nn.Linear(2, 2, device="meta").parameters(), torch.optim.AdamW)
        with pytest.raises(RuntimeError, match=r"rank 0 has the parameter .* where rank 1 has"):
            ZeroOptimizer(nn.Linear(2, 2 + dist.get_rank()).parameters(), torch.optim.AdamW)

    ranks(2, run)
