"""Predicted against measured: every run that has a number is a mark in both panels, and errors are what they are."""

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from fsdp_sim.cost import fitted
from fsdp_sim.validate import HeldOut, PredictedRow, compare, read_csv
from fsdp_sim.viz import accuracy_figures
from fsdp_sim.viz.charts.accuracy_scatter import BAND, UNLIKE, accuracy


@pytest.fixture(scope="module")
def compared() -> list[PredictedRow]:
    rows = read_csv()
    return [compare(row) for n, row in enumerate(rows) if n % 24 == 0 or row.peak_memory_bytes]


def marks(figure: go.Figure, axis: str = "y") -> list[tuple[float, float]]:
    traces = [t for t in figure.data if t.mode == "markers" and (t.yaxis or "y") == axis]
    return sorted((x, y) for t in traces for x, y in zip(t.x, t.y, strict=True))


def test_every_run_with_a_step_time_is_a_mark_and_an_error(compared: list[PredictedRow]) -> None:
    figure = accuracy(compared).figure
    timed = [c for c in compared if c.row.step_time_s]
    assert marks(figure) == sorted((c.row.step_time_s, c.predicted_step_time_s) for c in timed)
    assert np.array(marks(figure, "y2")) == pytest.approx(
        np.array(sorted((c.row.step_time_s, c.time_error) for c in timed))
    )


def test_memory_is_in_gib(compared: list[PredictedRow]) -> None:
    known = [c for c in compared if c.row.peak_memory_bytes]
    expected = sorted((c.row.peak_memory_bytes / 2**30, c.predicted_peak_memory_bytes / 2**30) for c in known)
    assert marks(accuracy(compared, of="memory").figure) == expected


def test_what_is_not_plain_fsdp_is_hollow_and_not_counted(compared: list[PredictedRow]) -> None:
    picture = accuracy(compared, of="memory")
    plain = [c for c in compared if c.row.peak_memory_bytes and not c.row.remark]
    errors = [abs(c.memory_error or 0.0) for c in plain]
    assert f"{len(plain)} published runs is off by {np.mean(errors):.1%}" in picture.finding
    assert f"{np.mean(np.array(errors) <= BAND):.0%} are within 10%" in picture.finding
    hollow = [t for t in picture.figure.data if t.mode == "markers" and str(t.marker.symbol).endswith("-open")]
    assert {t.name.partition(" (")[0] for t in hollow} == {UNLIKE}


def test_the_worst_is_named_and_comes_first_in_the_table(compared: list[PredictedRow]) -> None:
    plain = [c for c in compared if not c.row.remark and c.time_error is not None]
    picture = accuracy(plain)
    worst = max(plain, key=lambda c: abs(c.time_error or 0.0))
    assert f"The worst is {worst.row.id} " in picture.finding
    assert picture.tables[1].rows[0][0] == worst.row.id


def test_measurements_are_predicted_and_held_out_predictions_taken_as_they_are(compared: list[PredictedRow]) -> None:
    rows = [c.row for c in compared[:3]]
    assert marks(accuracy(rows).figure) == marks(accuracy(compared[:3]).figure)
    held = HeldOut("g", rows, [2.0 * (row.step_time_s or 0.0) for row in rows], fitted())
    assert {round(y, 9) for _, y in marks(accuracy([held]).figure, "y2")} == {1.0}


def test_names_are_text(compared: list[PredictedRow]) -> None:
    row = replace(compared[0].row, id="<b>x</b>")
    figure = accuracy([replace(compared[0], row=row)]).figure
    texts = [text for t in figure.data for text in t.hovertext or ()]
    assert all("&lt;b&gt;x" in text for text in texts)


def test_one_run_is_drawn_in_the_middle(compared: list[PredictedRow]) -> None:
    figure = accuracy(compared[:1]).figure
    low, high = figure.layout.xaxis.range
    assert high - low > 0.5
    assert "one published run" in figure.layout.title.text


def test_nothing_to_compare_is_said(compared: list[PredictedRow]) -> None:
    blank = [replace(c, row=replace(c.row, step_time_s=None)) for c in compared[:2]]
    with pytest.raises(ValueError, match="none of the 2 rows has a step time"):
        accuracy(blank)
    with pytest.raises(ValueError, match="of is 'speed'"):
        accuracy(compared, of="speed")  # type: ignore[arg-type]


def test_beside_held_out_groups_all_others_are_of_other_stacks(compared: list[PredictedRow]) -> None:
    held = HeldOut("g", [compared[0].row], [1.0], fitted())
    figure = accuracy([held, *[c for c in compared[1:] if not c.row.remark]]).figure
    names = {t.name.partition(" (")[0] for t in figure.data if t.mode == "markers"}
    assert names == {compared[0].row.cluster.gpu.name, "other stacks"}


def test_the_accuracy_page_shows_every_held_out_row_and_every_predictor(compared: list[PredictedRow]) -> None:
    rows = [c.row for c in compared[:3]]
    held = HeldOut("g", rows, [1.5 * (row.step_time_s or 0.0) for row in rows], fitted())
    drawn = accuracy_figures([held], compared[3:6], {"one utilisation": 0.2, "this simulator": 0.1})
    assert [y for t in drawn["errors"].data for y in t.y] == pytest.approx([0.5] * 3)
    assert [*drawn["simpler"].data[0].y] == ["this simulator", "one utilisation"]
    assert len(marks(drawn["held_out"])) == 6
