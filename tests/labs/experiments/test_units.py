"""Unit size: what torch issues is what was said, the bytes stay and their number grows; and the network decides."""

from __future__ import annotations

import pytest

from fsdp_sim.ranks import Network
from fsdp_sim.timeline import Lane
from labs.experiments.memory import PEAK
from labs.experiments.result import ResultRow
from labs.experiments.units import (
    POLICIES,
    STEP,
    WIRE,
    in_a_sentence,
    main,
    on_a_cluster,
    picture,
    run,
    settings,
    sweet_spot,
)

FEW = ("one unit", "each block")


@pytest.fixture(scope="module")
def result():
    return run(Network(bandwidth_gbps=10, latency_us=100), rows=1, seq_len=16, policies=FEW)


@pytest.fixture(scope="module")
def simulated():
    """Of a small model; the lab's notebook has the large one, and that smaller units need less memory."""
    return on_a_cluster(model="teaching", rows=1, seq_len=64)


def of(rows, quantity):
    return [row.predicted for row in rows if row.quantity == quantity]


def test_on_a_cluster_nothing_is_measured(simulated):
    assert all(row.measured is None for row in simulated)
    assert (
        in_a_sentence(simulated[:3])
        == f"one unit {of(simulated, STEP)[0]:,.4g} ms and {of(simulated, PEAK)[0]:,.4g} GiB"
    )


@pytest.mark.tail
def test_the_picture_has_what_was_predicted_and_what_was_measured(simulated, result):
    for rows, drawn in ((simulated, ["predicted"]), (result.rows, ["predicted", "measured"])):
        traces = picture(rows, "a sentence").figure.data
        assert [trace.name for trace in traces] == [name for name in drawn for _ in range(2)]
        for number, by in enumerate(drawn):
            for trace, quantity in zip(traces[2 * number :], (STEP, PEAK), strict=False):
                assert list(trace.y) == [getattr(row, by) for row in rows if row.quantity == quantity]


def test_every_policy_moves_the_same_bytes_in_more_and_more_collectives():
    issued = []
    for setting in settings(ranks=2, rows=1, seq_len=16).values():
        issued.append([i.bytes for i in setting.simulation.program.ops if i.op in WIRE])
    assert [len(bytes_) for bytes_ in issued] == sorted({len(bytes_) for bytes_ in issued})
    assert [max(bytes_) for bytes_ in issued] == sorted((max(bytes_) for bytes_ in issued), reverse=True)
    assert all(sum(bytes_) == pytest.approx(sum(issued[0]), rel=0.01) for bytes_ in issued)
    assert len(issued) == len(POLICIES)


@pytest.mark.tail
@pytest.mark.parametrize("name", FEW)
def test_predicted_and_measured_steps_can_be_laid_on_one_picture(result, name):
    before, after = (result.timelines[f"{name}, {kind}"] for kind in ("predicted", "measured"))
    assert (before.header.clock, after.header.clock) == ("simulated", "measured")
    step = after.steps[-2]
    assert before.select(step=1).lane_order(0, Lane.ALL_GATHER) == after.select(step=step).lane_order(
        0, Lane.ALL_GATHER
    )


def test_the_sweet_spot_is_the_shortest_step():
    rows = [ResultRow(name, STEP, p, m, "ms") for name, p, m in (("a", 3.0, 1.0), ("b", 2.0, 4.0))]
    assert (sweet_spot(rows), sweet_spot(rows, by="measured")) == ("b", "a")


@pytest.mark.parametrize("asked", [{"ranks": 1}, {"rows": 0}, {"bandwidth_gbps": 0.0}, {"latency_us": -1.0}])
def test_what_cannot_be_is_refused_before_anything_runs(asked, capsys):
    assert main(**asked) == 2
    assert "labs.experiments.units: " in capsys.readouterr().out
