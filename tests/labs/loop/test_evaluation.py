"""The validation loss is that of one process on the same rows, and neither it nor a sample disturbs the training."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_sim.ranks import run
from labs.cluster.process_group import RankPlace
from labs.data.loader import Loader
from labs.data.tokenizer import ByteTokenizer
from labs.loop.evaluation import evaluate, sample
from labs.loop.optimizer import make_optimizer
from labs.loop.step import train_step
from labs.model import build, model_config
from labs.wrapping import Wrapped, wrap
from tests.labs.wrapping.training import CPU, QUIET, SEED, SHAPES, config_of, each, here, wrapped_of

ROWS, SEQ = 12, 16
VOCABULARY = 37
# 31 sequences: the third batch has 7 rows and 5 that fill it up, more than a rank's share
LOADER = Loader(np.random.default_rng(0).integers(VOCABULARY, size=31 * SEQ + 1).astype(np.uint8), SEQ, ROWS, seed=5)
SPREAD = [{"api": api} for api in ("ddp", "fsdp2", "fsdp1", "mini")]


def by_hand(n_batches: int) -> float:
    """One process, row by row."""
    model, position, losses = build(SHAPES["gpt"], SEED).eval(), 0, []
    for _ in range(n_batches):
        batch = LOADER.batch(position)
        real = [row for row in range(ROWS) if batch.y[row, 0] != -1]
        with torch.no_grad():
            losses += [model(batch.x[row : row + 1], batch.y[row : row + 1]).item() for row in real]
        position = batch.next
    assert len(losses) == {1: 12, 3: 31, 4: 43}[n_batches]
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loss_is_that_of_one_process_whatever_the_ranks_and_micro_batches(ranks):
    n_batches = (1, 3, 4)  # 3: with filling rows; 4: into the next epoch

    def losses(settings):
        wrapped, _ = wrapped_of("gpt", settings)
        return [
            evaluate(wrapped, LOADER, n, here(), CPU, n_micro_batches) for n in n_batches for n_micro_batches in (1, 2)
        ]

    expected = [by_hand(n) for n in n_batches for _ in (1, 2)]
    on_ranks = list(run(each, ranks, losses, [(settings,) for settings in SPREAD], **QUIET))
    assert on_ranks == [on_ranks[0]] * ranks  # the same bits on every rank
    for of_api in on_ranks[0]:
        assert of_api == pytest.approx(expected, rel=1e-6)


def test_a_micro_batch_is_all_that_is_forwarded_at_once():
    wrapped, _ = wrapped_of("gpt", {"api": "single"})
    rows: list[int] = []
    wrapped.model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    evaluate(wrapped, LOADER, 2, RankPlace(), CPU, n_micro_batches=3)
    assert rows == [4] * 6


def losses_with(settings: dict[str, Any], disturb: bool) -> list[float]:
    """Losses of four steps with dropout; between them the model may be evaluated and sampled from."""
    place = here()
    config = config_of(settings, place)
    wrapped = wrap(config, model_config("teaching", n_layer=1, dropout=0.3), place, CPU)
    optimizer = make_optimizer(wrapped, config)
    torch.manual_seed(place.rank)
    losses = []
    for step in range(4):
        batch = LOADER.rows(step * ROWS % len(LOADER), place.rank, place.world_size)
        losses.append(train_step(wrapped, optimizer, batch, step, config).loss)
        if disturb:
            evaluate(wrapped, LOADER, 2, place, CPU)
            sample(wrapped, ByteTokenizer(), "def ", 3, 0, CPU)
    return losses


def test_training_goes_on_as_if_nothing_had_been_asked():
    cases = [(settings, disturb) for settings in SPREAD for disturb in (False, True)]
    cases += [({"api": "fsdp2", "activation_checkpointing": "full"}, disturb) for disturb in (False, True)]
    for on_rank in run(each, 2, losses_with, cases, **QUIET):
        for calm, disturbed in zip(on_rank[::2], on_rank[1::2], strict=True):
            assert not isinstance(calm, str), calm
            assert calm == disturbed
            assert len(set(calm)) == 4


class TestSample:
    def test_all_ranks_write_the_same_and_what_one_process_writes(self):
        def written(settings):
            wrapped, _ = big_enough(settings)
            return [sample(wrapped, ByteTokenizer(), "def ", 12, seed, CPU) for seed in (0, 0, 1)]

        alone = written({"api": "single"})
        ranks = list(run(each, 2, written, [(settings,) for settings in SPREAD], **QUIET))
        assert ranks == [[alone] * len(SPREAD)] * 2
        first, again, other = alone
        assert first == again != other  # a seed's own, whatever was drawn before
        assert first.startswith("def ")

    def test_the_global_generator_stays_as_it_is(self):
        wrapped, _ = big_enough({"api": "single"})
        before = torch.get_rng_state()
        sample(wrapped, ByteTokenizer(), "a", 3, 0, CPU)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("seed", range(3))
    def test_what_a_terminal_would_act_on_is_replaced(self, seed):
        wrapped, _ = big_enough({"api": "single"})  # untrained: every byte is as likely
        text = sample(wrapped, ByteTokenizer(), "\x1b[2J\r\x07\x9b31m\u202e\n\t", 60, seed, CPU)
        assert "\n\t" in text
        assert not [c for c in text if unicodedata.category(c)[0] in "CZ" and c not in "\n\t "], text

    def test_without_a_prompt_a_line_begins(self):
        wrapped, _ = big_enough({"api": "single"})
        text = sample(wrapped, ByteTokenizer(), "", 4, 0, CPU)
        assert text.startswith("\n")
        assert len(text) > 1


def big_enough(settings: dict[str, Any]) -> tuple[Wrapped, Any]:
    """A model with all bytes for tokens."""
    place = here()
    config = config_of(settings, place)
    return wrap(config, model_config("teaching", n_layer=1), place, CPU), config
