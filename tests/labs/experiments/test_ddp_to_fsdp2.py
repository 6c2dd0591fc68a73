"""DDP and FSDP2: one short diff, the same losses and weights, other memory and collectives; differences are found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from labs.cluster.torchrun import FailedError
from labs.experiments import ddp_to_fsdp2
from labs.experiments.ddp_to_fsdp2 import SCRIPTS, changed_lines, diff, main, run_script
from labs.experiments.scripts.watch import IssuedCollective, RankStep

pytestmark = pytest.mark.usefixtures("warm_torchrun")


@pytest.fixture(scope="module")
def ran():
    return {api: run_script(api) for api in SCRIPTS}


def result_of(monkeypatch, ran):
    monkeypatch.setattr(ddp_to_fsdp2, "run_script", lambda api, ranks, device: ran[api])
    return ddp_to_fsdp2.run()


def test_the_scripts_are_short_and_differ_in_few_lines():
    assert all(len(path.read_text().splitlines()) < 60 for path in SCRIPTS.values())
    changed = [line for line in changed_lines()[2:] if line[0] in "+-"]
    assert len(changed) <= 14
    assert any("fully_shard(layer, mesh=mesh)" in line for line in changed)
    assert "fully_shard(model, mesh=mesh)" in diff().data


@pytest.mark.tail  # the lab's notebook runs it too
def test_a_loss_that_is_not_ddps_is_found(ran, monkeypatch):
    losses = [*ran["fsdp2"].losses[:-1], ran["fsdp2"].losses[-1] * 1.001]
    with pytest.raises(FailedError, match="not the losses of DDP: they differ by"):
        result_of(monkeypatch, ran | {"fsdp2": dataclasses.replace(ran["fsdp2"], losses=losses)})


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda w: {name: t + 0.01 for name, t in w.items()}, "saved weights differ by 1.0e-02"),
     (lambda w: {f"module.{name}": t for name, t in w.items()}, "saved under other names")],
)  # fmt: skip
@pytest.mark.tail  # the lab's notebook runs it too
def test_other_weights_are_found(ran, monkeypatch, change, says):
    with pytest.raises(FailedError, match=says):
        result_of(monkeypatch, ran | {"fsdp2": dataclasses.replace(ran["fsdp2"], weights=change(ran["ddp"].weights))})


def test_numbers_like_loss_and_norm_are_left_out_of_the_count():
    rows = ddp_to_fsdp2.totals("x", [IssuedCollective("all-reduce", 2**20)], [IssuedCollective("all-reduce", 4)])
    assert [(row.quantity, row.predicted, row.measured) for row in rows] == [
        ("all-reduces per step", 1, 0), ("bytes of all-reduces", 1.0, 0.0),
    ]  # fmt: skip


@pytest.mark.tail  # the lab's notebook runs it too
def test_the_norm_is_a_collective_only_where_it_is_sharded(ran):
    small = {
        api: [c for c in one.watched[0].collectives if c.bytes < ddp_to_fsdp2.SMALL_BYTES] for api, one in ran.items()
    }
    assert len(small["fsdp2"]) > len(small["ddp"])
    assert all(isinstance(rank, RankStep) for one in ran.values() for rank in one.watched)
    assert all(isinstance(tensor, torch.Tensor) for tensor in ran["fsdp2"].weights.values())


@pytest.mark.parametrize("ranks", [0, 3])
def test_ranks_that_do_not_share_the_rows_are_refused(ranks, capsys):
    assert main(ranks) == 2
    assert "use 1, 2, 4 or 8 ranks" in capsys.readouterr().out
