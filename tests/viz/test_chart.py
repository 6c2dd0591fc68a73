"""The frame of the charts: titles that fit, axes with a few round numbers, series told apart twice."""

import math

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.explore import Sweep
from fsdp_sim.validate import read_csv
from fsdp_sim.viz import Picture, chart, theme
from fsdp_sim.viz.chart import FEWEST_TICKS, MOST_TICKS, SERIES, frame, log_axis, series, short
from fsdp_sim.viz.charts.accuracy_scatter import accuracy
from fsdp_sim.viz.charts.pareto_front import pareto
from fsdp_sim.viz.charts.rooflines import roofline
from fsdp_sim.viz.charts.scaling_curves import scaling
from fsdp_sim.viz.charts.waterfall import memory_waterfall
from fsdp_sim.viz.comparison.comparing import compare

sizes = st.floats(1e-9, 1e18)


@given(sizes, st.floats(1.0, 1e9))
def test_an_axis_reaches_from_end_to_end_with_a_handful_of_marks(low: float, ratio: float) -> None:
    axis = log_axis(low, low * ratio)
    start, end = axis["range"]
    assert start < math.log10(low) <= math.log10(low * ratio) < end
    assert 2 <= len(axis["tickvals"]) <= MOST_TICKS + FEWEST_TICKS
    assert all(start - 1e-6 <= math.log10(v) <= end + 1e-6 for v in axis["tickvals"])
    assert len(axis["ticktext"]) == len(axis["tickvals"]) == len(set(axis["tickvals"]))


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (20, "20"), (1500, "1.5 k"), (9.894e14, "989 T"), (3e6, "3 M"), (2e15, "2 P")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_each_series_has_its_own_colour_sign_and_mark() -> None:
    assert len({look.color for look in SERIES}) == len({look.symbol for look in SERIES}) == len(SERIES)
    assert {look.symbol for look in SERIES} == set(chart.MARKS)
    assert series(len(SERIES)) == series(0)


def test_a_title_is_escaped_broken_into_lines_and_given_room() -> None:
    one, three = go.Figure(), go.Figure()
    frame(one, "Short <b>sentence</b>.", plot_px=200)
    frame(three, "word " * 40, plot_px=200)
    assert one.layout.title.text == "Short &lt;b&gt;sentence&lt;/b&gt;."
    assert three.layout.title.text.count("<br>") == 2
    assert three.layout.height - one.layout.height == 2 * chart.TITLE_LINE
    assert three.layout.margin.t - one.layout.margin.t == 2 * chart.TITLE_LINE
    assert one.layout.template == theme.LIGHT


def pictures() -> dict[str, Picture]:
    cluster, plan = Cluster("A100", gpus=16), Plan(seq_len=512)
    sim = simulate("gpt2-124m", cluster, plan)
    other = simulate("gpt2-124m", cluster, Plan(seq_len=512, api="fsdp1"))
    sweep = Sweep({"model": "gpt2-124m", "gpu": "A100", "gpus": "8"}, {"micro_batch": ["1", "2"]})
    return {
        "compare": compare(sim.timeline, other.timeline),
        "waterfall": memory_waterfall(sim),
        "stacks": memory_waterfall({"fsdp2": sim, "fsdp1": other}),
        "roofline": roofline(sim),
        "scaling": scaling("gpt2-124m", cluster, plan, gpus=[8, 16]),
        "accuracy": accuracy(read_csv()[::60]),
        "pareto": pareto(sweep),
    }


def test_every_chart_leaves_paper_ink_and_grid_to_the_template() -> None:
    for name, picture in pictures().items():
        layout = picture.figure.layout
        axes = [*picture.figure.select_xaxes(), *picture.figure.select_yaxes()]
        named = [layout.paper_bgcolor, layout.plot_bgcolor, layout.font.color, layout.legend.bgcolor]
        named += [color for axis in axes for color in (axis.gridcolor, axis.tickfont.color, axis.title.font.color)]
        assert not any(named), name
        assert picture.dark().figure.layout.template == theme.DARK
        assert layout.template == theme.LIGHT
        assert layout.width is None
        assert layout.height > 200


def test_every_chart_states_its_finding_with_numbers_and_has_a_table() -> None:
    for name, picture in pictures().items():
        title = picture.figure.layout.title.text
        assert title.endswith("."), name
        assert any(letter.isdigit() for letter in picture.finding), name
        assert all(len(row) == len(table.header) for table in picture.tables for row in table.rows), name
        assert all(table.rows for table in picture.tables), name
