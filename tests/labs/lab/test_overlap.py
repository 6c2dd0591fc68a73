"""Lab 4: torch issues what was predicted, prefetch by prefetch; and a trace says what each prefetch is ahead of."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fsdp_sim.ranks import Network
from fsdp_sim.timeline import Timeline
from labs.config import TrainConfig
from labs.lab import overlap
from labs.lab.result import Result
from labs.overlap import Experiment
from labs.run_summary import first_divergence

BASE = TrainConfig(n_layer=3, seq_len=16, global_batch=4, device="cpu")
BLOCKS = 3
AHEAD = {
    # name: gathers issued before another unit computes, and before a reduce-scatter only
    "FSDP1, BACKWARD_PRE": (BLOCKS, 0),  # the last block's before the root's backward, each other before the next's
    "FSDP1, BACKWARD_POST": (0, BLOCKS - 1),  # after a block's backward, before its gradients are reduced
    "FSDP1, no prefetch": (0, 0),
    "FSDP2, as it comes": (BLOCKS, 0),
    "FSDP2, forward prefetch 1": (BLOCKS + BLOCKS - 1, 0),  # in forward each but the first
}


@pytest.fixture(scope="module")
def predicted() -> dict[str, Timeline]:
    return {name: overlap.predicted_step(config, 2) for name, config in overlap.configs(BASE).items()}


@pytest.fixture(scope="module")
def measured() -> dict[str, Timeline]:
    """Real steps of torch's FSDP on two gloo ranks, read from the profiler's traces."""
    return overlap.record(overlap.configs(BASE), 2)


def test_all_settings_have_an_expectation():
    assert set(AHEAD) == set(overlap.SETTINGS)


@pytest.mark.parametrize("name", AHEAD)
class TestOrder:
    def test_is_predicted(self, predicted, name):
        assert overlap.ahead(predicted[name]) == AHEAD[name]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_is_what_torch_does_on_each_rank(self, measured, name, rank):
        assert overlap.ahead(measured[name], rank) == AHEAD[name]

    def test_is_that_of_the_program_operation_by_operation(self, predicted, measured, name):
        assert first_divergence(predicted[name], measured[name]) is None


def test_another_settings_program_is_told_apart(predicted, measured):
    found = first_divergence(predicted["FSDP1, no prefetch"], measured["FSDP1, BACKWARD_PRE"])
    assert found.b.label == "ALL_GATHER(layers.1)"  # before the backward of layers.2
    assert found.a.label == "BWD layers.2"


def test_rows_and_sentences_say_the_same(predicted, measured):
    rows = overlap.order_rows(predicted, measured)
    assert len(rows) == 2 * len(AHEAD)
    assert all(row.predicted == row.measured for row in rows)
    assert all(text.endswith("issued as predicted") for text in overlap.said_of_order(predicted, measured))


def test_the_slow_network_has_times_of_both_and_their_timelines():
    small = Experiment(world_size=2, batch=4, seq_len=16, network=Network(bandwidth_gbps=0.5, latency_us=100))
    rows, timelines = overlap.on_slow_network(small)
    assert {row.name for row in rows} == set(overlap.PREFETCHES)
    assert {row.quantity for row in rows} == {overlap.STEP, overlap.EXPOSED}
    assert all(row.predicted > 0 and row.measured > 0 and row.unit == "ms" for row in rows)
    for name in overlap.PREFETCHES:
        sides = [timelines[f"{name}, {which}"] for which in ("predicted", "measured")]
        assert [len(side.steps) for side in sides] == [1, 1]
        assert first_divergence(*sides) is None
    ahead = [overlap.ahead(timelines[f"{name}, measured"])[0] for name in overlap.PREFETCHES]
    assert ahead == [5, 5 + 4]  # five blocks in backward; with prefetch four of them in forward too


def test_without_its_limiter_fsdp1_issues_far_ahead():
    limited, unlimited = overlap.limiter_rows()
    assert (limited.measured, unlimited.measured) == (None, None)  # predicted, and said so
    assert limited.predicted <= 3 < 30 < unlimited.predicted


class TestCommand:
    def test_prints_the_table_and_what_torch_did(self, monkeypatch):
        result = Result("overlap", "measured", (overlap.Row("a setting", "step time", 2.0, 1.0, "ms"),), "2 ranks",
                        notes=("issued as predicted",))  # fmt: skip
        monkeypatch.setattr(overlap, "run", lambda *_: result)
        out = io.StringIO()
        monkeypatch.setattr("labs.lab.command.Console", lambda: Console(file=out, width=120))
        assert overlap.main() == 0
        assert "a setting" in out.getvalue()
        assert "+100%" in out.getvalue()
        assert "issued as predicted" in out.getvalue()

    def test_a_model_that_does_not_exist_is_a_wrong_question(self, capsys):
        assert overlap.main(model="gpt9") == 2
        assert "gpt9" in capsys.readouterr().out
