"""Lab 4: what each prefetch is ahead of. That torch issues what was predicted is asserted by the lab's notebook."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from fsdp_sim.schedule import build
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Timeline
from fsdp_sim.timeline.analysis import overlap as hidden
from fsdp_sim.timeline.analysis import step_time_s
from labs.cluster import process_group
from labs.config import TrainConfig
from labs.experiments import overlap
from labs.experiments.overlap import __main__ as the_command
from labs.experiments.overlap import run
from labs.experiments.prefetch import Experiment
from labs.experiments.result import LabResult, ResultRow
from labs.measure.step_summary import first_divergence

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


def test_all_settings_have_an_expectation():
    assert set(AHEAD) == set(overlap.SETTINGS)


@pytest.mark.parametrize("name", AHEAD)
def test_the_order_of_each_setting(predicted, name):
    assert overlap.ahead(predicted[name]) == AHEAD[name]


def test_another_settings_program_is_told_apart(predicted):
    found = first_divergence(predicted["FSDP1, no prefetch"], predicted["FSDP1, BACKWARD_PRE"])
    assert found.b.label == "ALL_GATHER(layers.2)"  # before the root's backward
    assert found.a.label == "BWD head"


def test_rows_and_sentences_say_the_same(predicted):
    rows = overlap.order_rows(predicted, predicted)
    assert len(rows) == 2 * len(AHEAD)
    assert all(row.predicted == row.measured for row in rows)
    assert all(text.endswith("issued as predicted") for text in overlap.sentences(predicted, predicted))


def test_by_default_a_blocks_all_gather_takes_as_long_as_its_forward():
    """Bytes and ranks are the lab's; 5 ms is the forward that the default network was chosen for."""
    experiment = Experiment(world_size=2, network=overlap.SLOW)
    block = next(unit for unit in experiment.units if unit.name == "layers.0")
    n_bytes = sum(param.padded_bytes(2) for param in block.params)
    assert overlap.SLOW.seconds("all_gather", n_bytes, 2) == pytest.approx(5e-3, rel=0.05)


def test_forward_prefetch_hides_the_gathers_of_all_blocks_but_the_first():
    """Every piece takes 5 ms, as block and wire do by default; nothing is run."""
    experiment = Experiment(world_size=2, network=overlap.SLOW)
    program = build(experiment.units, Plan(), 2, steps=1)
    pieces = [{(i.op, i.unit): np.full(2, 5e-3) for i in program.ops}]
    off, on = (experiment.predict(pieces, forward_prefetch=depth) for depth in overlap.PREFETCHES.values())
    blocks = sum(unit.name.startswith("layers.") for unit in experiment.units)
    assert step_time_s(off, 1) - step_time_s(on, 1) == pytest.approx((blocks - 1) * 5e-3)
    assert hidden(on, 0) > hidden(off, 0) > 0


def test_without_its_limiter_fsdp1_issues_far_ahead():
    limited, unlimited = overlap.limiter_rows()
    assert (limited.measured, unlimited.measured) == (None, None)  # predicted, and said so
    assert limited.predicted <= 3 < 30 < unlimited.predicted


class TestCommand:
    def test_prints_the_table_and_what_torch_did(self, monkeypatch):
        result = LabResult("overlap", "measured", (ResultRow("a setting", "step time", 2.0, 1.0, "ms"),), "2 ranks",
                        notes=("issued as predicted",))  # fmt: skip
        monkeypatch.setattr(the_command, "run", lambda *_: result)
        out = io.StringIO()
        monkeypatch.setattr("labs.experiments.command.Console", lambda: Console(file=out, width=120))
        assert the_command.main() == 0
        assert "a setting" in out.getvalue()
        assert "+100%" in out.getvalue()
        assert "issued as predicted" in out.getvalue()

    def test_a_model_that_does_not_exist_is_a_wrong_question(self, capsys):
        assert the_command.main(model="gpt9") == 2
        assert "gpt9" in capsys.readouterr().out

    @pytest.mark.parametrize("asked", [{"ranks": 1}, {"device": "cuda"}])
    def test_one_rank_has_nobody_to_send_to(self, monkeypatch, capsys, asked):
        """It would find 0 ms of communication in every row. The GPU is faked by name."""
        monkeypatch.setattr(process_group, "gpus", lambda: ["NVIDIA H100"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert the_command.main(**asked) == 2
        assert "one rank has nobody to send to" in (said := capsys.readouterr().out)
        assert "on one GPU python -m labs.cluster.pretend --device cuda" in said


def test_a_file_for_another_number_of_ranks_is_refused_before_anything_runs(tmp_path):
    Cluster("cpu", gpus=4).to_file(tmp_path / "four.toml")
    with pytest.raises(ValueError, match="the cluster has 4 ranks"):
        run(rows=2, seq_len=16, cluster=tmp_path / "four.toml")
