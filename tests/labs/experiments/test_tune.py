"""The fastest plan that fits is found without training, and it fits when it is tried."""

import dataclasses
import importlib
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Header, Timeline
from labs.cluster import process_group
from labs.cluster.pretend import Setup
from labs.config import TrainConfig
from labs.experiments import tune
from labs.experiments.gpu_results import record
from labs.experiments.result import LabResult, ResultRow
from labs.experiments.tune import DEFAULTS, SPACE, TuneOptions, check, choose, front, main, rows_of, search

SMALL = {"activation_checkpointing": ("none", "full"), "reshard_after_forward": (None, False)}


@pytest.fixture(scope="module")
def plans():
    cluster = Cluster("cpu", gpus=4, bandwidth_gbps=0.05, latency_us=10)
    config = TrainConfig(n_layer=2, seq_len=64, global_batch=4)
    return search(config, cluster, SMALL, steps=1)


def limit_between(plans):
    """More than the smallest needs, less than the largest."""
    needs = sorted(plan.peak_bytes for plan in plans)
    return (needs[0] + needs[-1]) / 2


def test_every_plan_is_simulated_fastest_first(plans):
    assert len(plans) == 4
    assert {plan.name for plan in plans} >= {DEFAULTS, "activation_checkpointing=full, reshard_after_forward=False"}
    times = [plan.step_time_s for plan in plans]
    assert times == sorted(times)


def test_plans_that_compute_alike_have_the_same_pieces(plans):
    """They differ in what the wire exposes: two all-gathers less, of 100 ms each."""
    time = {plan.name: plan.step_time_s for plan in plans}
    assert time["reshard_after_forward=False"] < time[DEFAULTS]


def test_what_fits_is_chosen_and_what_is_faster_is_checked_too(plans):
    limit = limit_between(plans)
    chosen = choose(plans, limit)
    fits = chosen["fastest that fits"]
    assert fits.peak_bytes <= limit
    assert all(plan.peak_bytes > limit for plan in plans if plan.step_time_s < fits.step_time_s)
    assert chosen.get("fastest of all", fits) is plans[0]
    assert [plan.name for plan in chosen.values()].count(DEFAULTS) == 1


def test_no_plan_is_chosen_twice(plans):
    chosen = choose(plans, float("inf"))
    assert chosen["fastest that fits"] is plans[0]
    assert "fastest of all" not in chosen


def test_where_nothing_fits_the_smallest_is_named(plans):
    with pytest.raises(ValueError, match=r"none of 4 plans fits 1,000 B: the smallest needs [\d.]+ MiB"):
        choose(plans, 1000)


def test_the_front_has_the_fastest_and_the_smallest(plans):
    found = front(plans)
    assert found[0] is plans[0]
    assert found[-1].peak_bytes == min(plan.peak_bytes for plan in plans)


def test_its_rows_are_those_of_a_sweep(plans):
    from fsdp_sim.viz import pareto

    limit = limit_between(plans)
    rows = rows_of(plans, limit)
    assert {row["fit"] for row in rows} == {"fits", "does not fit"}
    assert [row["fit"] == "fits" for row in rows] == [plan.fits(limit) for plan in plans]
    assert "teaching" in pareto(rows).finding or pareto(rows).figure.data


@pytest.mark.tail
def test_what_was_chosen_fits_when_it_is_tried(plans):
    limit = limit_between(plans)
    chosen = choose(plans, limit)
    result = check(chosen, steps=1)
    peaks = {row.name: row for row in result.rows if row.quantity == "peak memory"}
    assert peaks["fastest that fits"].measured * 2**20 <= limit
    assert all(abs(row.error) < 0.05 for row in peaks.values())
    assert (result.lab, result.kind) == ("tune", "pretended")
    assert any(note.startswith("fastest that fits: ") for note in result.notes)


def test_the_space_has_keys_of_the_trainer():
    for key, values in SPACE.items():
        for value in values:
            Setup(dataclasses.replace(TuneOptions().asks[0], **{key: value}), TuneOptions().asks[1]).check()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--model=teachin"], "did you mean 'teaching'"), (["--cluster=Voodoo"], "Voodoo"), (["--ranks=1"], "gpus=1")],
)
def test_what_cannot_be_has_status_2(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().out


def test_that_nothing_fits_is_an_answer(plans, monkeypatch, capsys):
    monkeypatch.setattr(tune, "search", lambda *_, **__: plans)
    assert main(["--limit-mib=0.01"]) == 1
    assert "labs.experiments.tune: none of 4 plans fits 10.2 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(("measured_mib", "status"), [(15.9, 0), (16.1, 1)])
def test_so_is_whether_what_was_chosen_fits_when_it_is_tried(monkeypatch, capsys, measured_mib, status):
    tried = ResultRow("fastest that fits", "peak memory", 15.0, measured_mib, "MiB")
    monkeypatch.setattr(tune, "run", lambda *_: LabResult("tune", "pretended", (tried,), "here"))
    assert main(["--limit-mib=16"]) == status
    assert f"{measured_mib} MiB" in capsys.readouterr().out


def test_help_documents_the_statuses(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Exit status: 0 done; 1 no plan fits, or" in words
    assert "2 asked wrongly; 130 Ctrl-C." in words


def test_what_was_tried_on_a_gpu_says_so_and_is_recorded(monkeypatch, tmp_path):
    """The GPU is faked by name, and tries nothing."""
    gpu, on = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30), []
    steps = Timeline(Header(producer="tests", clock="measured", world_size=1), [])
    ran = SimpleNamespace(pieces=[], step_time_s=0.1, exposed_comm_s=0.01, timeline=steps)

    @contextmanager
    def session(setup):
        on.append(setup.device.type)
        yield SimpleNamespace(train=lambda *_: ran, peak_bytes=lambda: 2**30)

    monkeypatch.setattr(importlib.import_module("labs.cluster.pretend.comparison"), "session", session)
    monkeypatch.setattr(tune, "SPACE", {"reshard_after_forward": (None, False)})
    monkeypatch.setattr(process_group, "gpus", lambda: [gpu.name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.total_memory,) * 2)
    asked = TuneOptions(cluster="here", rows=1)

    kept = LabResult.load(record("tune", partial(tune.run, asked, device="cuda"), gpu.name, tmp_path))
    assert kept.hardware == "rank 0 alone, 1 x NVIDIA H100 80GB HBM3, 80 GiB each"
    assert set(on) == {"cuda"}
    assert not any("On CPUs" in note for note in kept.notes)
