"""A step has the numbers of one process on the whole batch, and all ranks take it, or none."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import run
from labs.config import TrainConfig
from labs.data.loader import Batch
from labs.loop.optimizer import lr_at, make_optimizer
from labs.loop.step import StepOutcome, train_step
from labs.loop.stopping import INTERRUPTED, PREEMPTED
from labs.model import build
from labs.wrapping import Wrapped
from tests.labs.wrapping.training import MICRO_BATCHES, QUIET, ROWS, SEED, SHAPES, each, here, wrapped_of

STEPS, LR, CLIP, WARMUP = 3, 1e-2, 0.5, 2
SETTINGS: dict[str, Any] = {"lr": LR, "clip": CLIP, "warmup_steps": WARMUP}
SPREAD = [{"api": api} for api in ("ddp", "fsdp2", "fsdp1", "mini")]


def whole_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which some count for nothing and some for little: their targets are -1. The last rank has the most."""
    x, y = torch.randint(37, (2, ROWS, 16), generator=torch.Generator().manual_seed(step))
    y[ROWS // 3 : ROWS // 2, 3:] = -1
    y[-1] = -1
    return x, y


def my_rows(step: int) -> Batch:
    x, y = whole_batch(step)
    place = here()
    mine = (t.chunk(place.world_size)[place.rank] for t in (x, y))
    return Batch(*mine, n_tokens=int((y != -1).sum()), next=0)


def begin(**settings: Any) -> tuple[Wrapped, torch.optim.Optimizer, TrainConfig]:
    wrapped, config = wrapped_of("gpt", SETTINGS | settings)
    return wrapped, make_optimizer(wrapped, config), config


def one_step(training: tuple[Wrapped, torch.optim.Optimizer, TrainConfig], step: int, **options: Any) -> StepOutcome:
    wrapped, optimizer, config = training
    return train_step(wrapped, optimizer, my_rows(step), step, config, **{"n_micro_batches": MICRO_BATCHES} | options)


def shards_of(wrapped: Wrapped) -> list[torch.Tensor]:
    """Copies of what this rank has of the parameters."""
    params = [param.detach() for param in wrapped.named_parameters().values()]
    return [getattr(param, "_local_tensor", param).clone() for param in params]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def by_hand() -> list[tuple[float, float, float]]:
    """Loss, norm and learning rate of each step of one process, with nothing of the trainer."""
    model = build(SHAPES["gpt"], SEED)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": TrainConfig().weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    seen = []
    for step in range(STEPS):
        lr = LR * min(1.0, (step + 1) / WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = model(*whole_batch(step))  # the mean over tokens whose target is not -1
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        seen.append((loss.item(), norm.item(), lr))
    return seen


class TestTheNumbersOfOneProcess:
    """Though ranks and micro-batches have unequally many tokens: a mean of their means would be off by percents."""

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_on_ranks(self, ranks, by_hand):
        cases = [(settings | {"requires_gradient_sync": sync},) for settings in SPREAD for sync in (True, "last")]
        cases = cases if ranks == 2 else cases[::2]

        def steps(settings):
            training = begin(**settings)
            return [one_step(training, step) for step in range(STEPS)]

        for on_rank in run(each, ranks, steps, cases, **QUIET):
            for (settings,), outcomes in zip(cases, on_rank, strict=True):
                assert not isinstance(outcomes, str), outcomes
                self.check(outcomes, by_hand, settings)

    def test_of_one_process_with_and_without_accumulation(self, by_hand):
        for n_micro_batches in (1, 2, 6):
            training = begin(api="single")
            outcomes = [one_step(training, step, n_micro_batches=n_micro_batches) for step in range(STEPS)]
            self.check(outcomes, by_hand, n_micro_batches)

    def check(self, outcomes, by_hand, what):
        losses, norms, rates = zip(*by_hand, strict=True)
        assert [o.loss for o in outcomes] == pytest.approx(losses, rel=2e-6), what
        assert [o.grad_norm for o in outcomes] == pytest.approx(norms, rel=1e-5), what
        assert [o.lr for o in outcomes] == pytest.approx(rates), what
        assert all(o.finite and o.updated and o.stop == 0 for o in outcomes)
        assert max(norms) > CLIP  # else clipping is not tested


def test_the_optimizer_steps_with_the_rate_of_the_schedule():
    wrapped, optimizer, config = begin(api="single", schedule="cosine", steps=10)
    for step in (0, 2, 5, 9):
        one_step((wrapped, optimizer, config), step)
        assert {group["lr"] for group in optimizer.param_groups} == {lr_at(step, config)}


def test_what_is_clipped_is_the_norm_of_all_ranks():
    """A step of plain gradient descent is as long as lr times the clipped norm."""

    def length() -> float:
        wrapped, _, config = begin(api="fsdp2", clip=0.25, warmup_steps=0)
        before = shards_of(wrapped)
        outcome = one_step((wrapped, torch.optim.SGD(wrapped.named_parameters().values()), config), 0)
        assert outcome.grad_norm > 0.25
        moved = sum((a - b).square().sum() for a, b in zip(before, shards_of(wrapped), strict=True))
        dist.all_reduce(moved)
        return moved.sqrt().item()

    assert list(run(length, 2, **QUIET)) == [pytest.approx(LR * 0.25, rel=1e-4)] * 2


class TestAllRanksOrNone:
    def test_a_loss_that_is_not_finite_on_one_rank_updates_nothing_anywhere(self):
        def broken(settings, kind):
            training = begin(**settings)
            wrapped = training[0]
            one_step(training, 0)
            before = shards_of(wrapped)
            with PoisonedLoss(wrapped, kind if dist.get_rank() == 1 else 1.0):
                outcome = one_step(training, 1)
            kept = equal(before, shards_of(wrapped))
            after = one_step(training, 2)
            return kept, (outcome.finite, outcome.updated), str(outcome), (after.finite, after.updated)

        cases = [(settings, kind) for settings in SPREAD for kind in (math.nan, math.inf)]
        for of_api in zip(*run(each, 3, broken, cases, **QUIET), strict=True):
            assert len(set(of_api)) == 1, of_api  # the same Outcome on every rank
            assert not isinstance(of_api[0], str), of_api[0]
            kept, bad, _, after = of_api[0]
            assert kept
            assert bad == (False, False)
            assert after == (True, True)  # nothing of the NaN is left in gradients or optimizer

    def test_a_gradient_that_is_not_finite_updates_nothing_though_the_loss_is(self):
        def broken():
            training = begin(api="fsdp2")
            before = shards_of(training[0])
            (first, *_) = training[0].named_parameters().values()
            handle = first.register_post_accumulate_grad_hook(lambda param: param.grad._local_tensor.fill_(math.inf))
            outcome = one_step(training, 0)
            handle.remove()
            return equal(before, shards_of(training[0])), outcome.loss, outcome.finite, outcome.updated

        for kept, loss, finite, updated in run(broken, 2, **QUIET):
            assert kept
            assert math.isfinite(loss)
            assert (finite, updated) == (False, False)

    def test_the_wish_of_one_rank_reaches_all_and_sigterm_wins_over_ctrl_c(self):
        wishes = {(0, 0): 0, (0, PREEMPTED): PREEMPTED, (INTERRUPTED, 0): INTERRUPTED,
                  (INTERRUPTED, PREEMPTED): PREEMPTED}  # fmt: skip

        def asked():
            training = begin(api="fsdp2")
            return [
                one_step(training, 0, stop=lambda of_ranks=of_ranks: of_ranks[dist.get_rank()]).stop
                for of_ranks in wishes
            ]

        assert list(run(asked, 2, **QUIET)) == [list(wishes.values())] * 2

    def test_the_wish_travels_with_a_nan_too(self):
        def asked():
            training = begin(api="fsdp2")
            with PoisonedLoss(training[0], math.nan if dist.get_rank() == 0 else 1.0):
                outcome = one_step(training, 0, stop=lambda: 75 * dist.get_rank())
            return outcome.stop, outcome.finite

        assert list(run(asked, 2, **QUIET)) == [(75, False)] * 2


class TestScaler:
    """fp16: gradients that overflow are skipped and the scale falls, on all ranks alike."""

    APIS = [(settings | {"param_dtype": "fp16"},) for settings in SPREAD]  # noqa: RUF012

    def test_an_overflow_skips_the_update_and_halves_the_scale(self):
        def overflows(settings):
            training = begin(**settings)
            wrapped, scaler = training[0], training[0].scaler
            scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})  # far beyond fp16's 65,504
            before = shards_of(wrapped)
            outcome = one_step(training, 0)
            kept, scale = equal(before, shards_of(wrapped)), scaler.get_scale()
            scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**10})
            after = one_step(training, 1)
            return (kept, scale, outcome.finite, outcome.updated, math.isfinite(outcome.loss), after.updated,
                    equal(before, shards_of(wrapped)))  # fmt: skip

        for on_rank in run(each, 2, overflows, self.APIS, **QUIET):
            for (settings,), result in zip(self.APIS, on_rank, strict=True):
                assert result == (True, 2.0**39, True, False, True, True, False), (settings, result)

    def test_a_loss_that_is_not_finite_is_no_overflow_and_training_can_go_on(self):
        def broken(settings):
            training = begin(**settings)
            wrapped = training[0]
            wrapped.scaler.load_state_dict(wrapped.scaler.state_dict() | {"scale": 2.0**10})
            before = shards_of(wrapped)
            with PoisonedLoss(wrapped, math.nan if dist.get_rank() == 1 else 1.0):
                outcome = one_step(training, 0)
            kept = equal(before, shards_of(wrapped))
            after = one_step(training, 1)
            return kept, (outcome.finite, outcome.updated), (after.finite, after.updated), wrapped.scaler.get_scale()

        ranks = run(each, 2, broken, self.APIS, **QUIET)
        for (settings,), of_api in zip(self.APIS, zip(*ranks, strict=True), strict=True):
            # The scale has fallen on both ranks alike: the NaN is in the gradients as well.
            assert list(of_api) == [(True, (False, False), (True, True), 2.0**9)] * 2, (settings, of_api)


def test_the_fault_of_the_tests_is_one_of_them(monkeypatch):
    monkeypatch.setitem(os.environ, "FSDP_SIM_FAULTS", "nan:loss@1")
    training = begin(api="single")
    assert [one_step(training, step).finite for step in range(3)] == [True, False, True]


class PoisonedLoss:
    """Inside, this rank's loss is multiplied by a number, gradients too."""

    def __init__(self, wrapped: Wrapped, by: float) -> None:
        self.wrapped, self.by = wrapped, by

    def __enter__(self) -> None:
        self.handle = self.wrapped.model.register_forward_hook(lambda module, inputs, loss: loss * self.by)

    def __exit__(self, *error: object) -> None:
        self.handle.remove()
