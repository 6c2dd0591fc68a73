"""A figure for a projector: what is measured in pixels grows, what is data stays, and the plot fills the height."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import Picture, Table, present, timeline_figure
from fsdp_sim.viz.present import DISPLAY, HEIGHT_PX, enlarged, fitting, shown

MIME = "application/vnd.plotly.v1+json"


def content(height: int = 400, **layout: Any) -> dict[str, Any]:
    """A figure with a bar; 100 of its pixels are margins."""
    margin = {"l": 80, "r": 20, "t": 60, "b": 40}
    return {"data": [{"type": "bar", "width": 0.5}], "layout": {"height": height, "margin": margin, **layout}}


@pytest.fixture
def displays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What is displayed and updated in a notebook; at the end nobody presents any more."""
    module = pytest.importorskip("IPython.display", reason="IPython is not installed")
    seen: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(module, "display", lambda bundle, **where: seen.append((where.get("display_id", ""), bundle)))
    monkeypatch.setattr(module, "update_display", lambda bundle, **where: seen.append((where["display_id"], bundle)))
    monkeypatch.setenv("FSDP_SIM_PNG", "0")
    yield seen
    present(False)


def test_type_margins_and_lines_grow_and_data_stay() -> None:
    figure = content(
        font={"size": 12},
        template={"layout": {"xaxis": {"tickfont": {"size": 11}, "ticklabelstandoff": 6}}},
        annotations=[{"x": 3, "y": 0.5, "yshift": 4, "font": {"size": 10.5}, "text": "peak"}],
        shapes=[{"x0": 1, "x1": 2, "line": {"width": 2}}],
    )
    figure["data"][0] |= {"x": [7], "marker": {"line": {"width": 1}, "pattern": {"size": 7}}, "xbins": {"size": 5}}
    before = copy.deepcopy(figure)

    larger = enlarged(figure, 2, 800)
    layout, bar = larger["layout"], larger["data"][0]

    assert layout["height"] == 800
    assert layout["margin"] == {"l": 160, "r": 40, "t": 120, "b": 80}
    assert layout["font"]["size"] == 24
    assert layout["template"]["layout"]["xaxis"] == {"tickfont": {"size": 22}, "ticklabelstandoff": 12}
    assert layout["annotations"] == [{"x": 3, "y": 0.5, "yshift": 8, "font": {"size": 21.0}, "text": "peak"}]
    assert layout["shapes"][0] == {"x0": 1, "x1": 2, "line": {"width": 4}}
    assert bar["marker"] == {"line": {"width": 2}, "pattern": {"size": 14}}
    assert (bar["width"], bar["x"], bar["xbins"]) == (0.5, [7], {"size": 5})
    assert figure == before


def test_lists_and_packed_arrays_of_sizes_grow_too() -> None:
    packed = {"dtype": "f8", "bdata": "AAAAAAAACEAAAAAAAAAQQA=="}  # 3.0 and 4.0
    figure = content()
    figure["data"] = [{"marker": {"size": [8, 9]}}, {"marker": {"size": packed}}]

    sizes = [trace["marker"]["size"] for trace in enlarged(figure, 1.5, 400)["data"]]

    assert sizes == [[12, 14], [4.5, 6.0]]


def test_what_plotly_wants_whole_stays_whole() -> None:
    """A fraction is no valid ``ticklabelstandoff``, and plotly.js would fall back to none at all."""
    larger = enlarged(content(xaxis={"ticklabelstandoff": 6}), 1.6, 800)
    assert larger["layout"]["xaxis"]["ticklabelstandoff"] == 10


def test_title_and_legends_keep_their_enlarged_distance_from_the_nearer_edge() -> None:
    at = {"yref": "container", "font": {"size": 12}}
    figure = content(title=at | {"y": 0.95}, legend=at | {"y": 0.8}, legend2=at | {"y": 0.05}, legend3={"y": 1})

    layout = enlarged(figure, 1.5, 1000)["layout"]

    assert (1 - layout["title"]["y"]) * 1000 == pytest.approx(1.5 * 0.05 * 400)
    assert (1 - layout["legend"]["y"]) * 1000 == pytest.approx(1.5 * 0.2 * 400)
    assert layout["legend2"]["y"] * 1000 == pytest.approx(1.5 * 0.05 * 400)
    assert layout["legend3"] == {"y": 1}  # a part of the plot, wherever that is


def test_type_can_be_given_a_least_size_and_what_is_not_to_be_read_stays_tiny() -> None:
    figure = content(font={"size": 9}, sliders=[{"font": {"size": 1}}])
    figure["data"][0]["marker"] = {"size": 7}

    larger = enlarged(figure, 1.5, 800, smallest_px=20)

    assert larger["layout"]["font"]["size"] == 20
    assert larger["layout"]["sliders"][0]["font"]["size"] < 3
    assert larger["data"][0]["marker"]["size"] < 12  # no type


def test_the_frames_of_a_figure_that_moves_grow_with_it() -> None:
    frame = {"name": "1", "data": [{"textfont": {"size": 16}}], "layout": {"height": 400}}
    larger = enlarged(content() | {"frames": [frame]}, 2, 800)
    assert larger["frames"] == [{"name": "1", "data": [{"textfont": {"size": 32}}], "layout": {"height": 800}}]


def test_a_figure_with_many_rows_is_enlarged_less_so_that_they_hold_their_names() -> None:
    low, high = content(300)["layout"], content(1000)["layout"]

    assert fitting(low, 1.6, 800) == 1.6
    scale = fitting(high, 1.6, 800)
    assert 1 < scale < 1.6
    stretched = (800 - 100 * scale) / (1000 - 100)
    assert scale / stretched == pytest.approx(1.4)  # type grows by no more than this beyond its row


def test_margins_that_leave_nothing_for_the_plot_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"150 pixels high has no room for margins enlarged 2 times"):
        enlarged(content(), 2, 150)


def test_a_real_timeline_has_larger_type_on_the_same_time_axis(training_run: Callable[..., Timeline]) -> None:
    plain = timeline_figure(training_run()).to_plotly_json()
    larger = enlarged(plain, 1.6, 800)

    assert larger["layout"]["title"]["font"]["size"] == round(1.6 * plain["layout"]["title"]["font"]["size"])
    assert larger["layout"]["uniformtext"]["minsize"] == 16
    assert larger["layout"]["xaxis"]["range"] == plain["layout"]["xaxis"]["range"]


def test_until_somebody_presents_a_figure_is_shown_as_it_is() -> None:
    figure = content()
    assert shown(figure) is figure


def test_from_then_on_figures_are_large_and_when_it_ends_they_are_not(displays: list[Any]) -> None:
    picture = Picture(_bar(), "A bar.", (Table("Bars", ("bar",), (("1",),)),))

    def height() -> int:
        displays.clear()
        picture.show()
        return int(displays[0][1][MIME]["layout"]["height"])

    assert height() == 200
    present()
    assert height() == HEIGHT_PX
    present(height_px=600)
    assert height() == 600
    present(False)
    assert height() == 200


def test_the_notebook_is_enlarged_by_a_style_that_goes_when_it_ends(displays: list[Any]) -> None:
    present()
    present()  # the cell is run again: its output, and with it the style, was cleared
    present(False)

    (first, shows), (again, shows_again), (last, clears) = displays
    assert first == again == last == DISPLAY
    assert "<style>" in shows["text/html"]
    assert "--jp-code-font-size" in shows["text/html"]
    assert shows_again == shows
    assert clears["text/html"] == ""


def test_a_figure_without_a_height_fills_its_place_already(displays: list[Any]) -> None:
    present()
    figure: dict[str, Any] = {"data": [], "layout": {}}
    assert shown(figure) is figure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.5}, "scale is 0.5; 1 leaves type as it is"),
        ({"height_px": 80}, "height_px is 80; a figure is drawn"),
    ],
)
def test_what_could_not_be_shown_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        present(**options)


def _bar() -> Any:
    import plotly.graph_objects as go

    return go.Figure(go.Bar(x=[1], y=[2]), go.Layout(height=200, margin={"t": 40, "b": 40}))
