"""A figure that moves can be scrubbed, played and stepped, in a browser, from wherever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdp_sim.viz import frames
from fsdp_sim.viz.frames import add_player, legend_at, title_of, words_axes, words_of

COUNT, EACH_S = 6, 1.0
NOW = "() => document.querySelector('.js-plotly-plot').data[0].text[0]"


@pytest.fixture
def figure() -> go.Figure:
    drawn = go.Figure(words_of("frame 0"))
    drawn.update_layout(height=300, margin={"t": 20, "b": 120}, xaxis={"visible": False}, **words_axes(0.0))
    add_player(
        drawn,
        [[go.Scatter(text=[f"frame {number}"])] for number in range(COUNT)],
        [0],
        [f"{number} of {COUNT}" for number in range(COUNT)],
        seconds_each=EACH_S,
    )
    return drawn


@pytest.fixture
def shown(figure: go.Figure, page: Any, tmp_path: Path) -> Any:
    """The page with the figure, and every error in it."""
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    figure.write_html(tmp_path / "figure.html", include_plotlyjs=True, auto_play=False)
    page.goto((tmp_path / "figure.html").as_uri())
    page.wait_for_selector(".updatemenu-button")
    return page


def press(page: Any, label: str) -> None:
    page.locator(".updatemenu-button", has_text=label).first.click()


def wait_for(page: Any, number: int) -> None:
    page.wait_for_function(f"() => ({NOW})() === 'frame {number}'", timeout=20_000)


def test_next_and_back_step_from_where_the_figure_is(shown: Any) -> None:
    assert shown.evaluate(NOW) == "frame 0"
    for label, number in (("next", 1), ("next", 2), ("next", 3), ("back", 2), ("next", 3)):
        press(shown, label)
        wait_for(shown, number)
    rail = shown.locator(".slider-rail-touch-rect").first.bounding_box()
    shown.mouse.click(rail["x"] + rail["width"] * 0.8, rail["y"] + rail["height"] / 2)
    wait_for(shown, 4)
    press(shown, "next")
    wait_for(shown, 5)
    press(shown, "next")  # there is none after the last
    shown.wait_for_timeout(300)
    assert shown.evaluate(NOW) == "frame 5"
    assert shown.problems == []


def test_it_plays_from_where_it_is_until_it_is_paused_or_ends(shown: Any) -> None:
    press(shown, "play")
    wait_for(shown, 1)
    press(shown, "pause")
    shown.wait_for_timeout(200)
    paused = shown.evaluate(NOW)
    shown.wait_for_timeout(EACH_S * 2500)
    assert shown.evaluate(NOW) == paused != f"frame {COUNT - 1}"
    rail = shown.locator(".slider-rail-touch-rect").first.bounding_box()
    shown.mouse.click(rail["x"] + rail["width"] * 0.8, rail["y"] + rail["height"] / 2)
    wait_for(shown, COUNT - 2)
    press(shown, "play")
    wait_for(shown, COUNT - 1)
    assert set(shown.problems) <= {"undefined"}  # plotly.js rejects the promise of an animation that is interrupted


def test_it_keeps_its_height_where_the_layout_has_lost_it(shown: Any) -> None:
    """As in JupyterLab, whose renderer drops the height after the first drawing."""
    shown.evaluate("() => { delete document.querySelector('.js-plotly-plot').layout.height; }")
    press(shown, "next")
    wait_for(shown, 1)
    assert shown.locator(".js-plotly-plot .svg-container").bounding_box()["height"] == 300


def test_frames_name_the_traces_that_change_and_nothing_of_the_layout_but_buttons_and_height(
    figure: go.Figure,
) -> None:
    for frame in figure.frames:
        assert frame.traces == (0,)
        assert set(frame.layout.to_plotly_json()) == {"updatemenus", "height"}


def test_a_long_film_plays_faster() -> None:
    long = go.Figure(words_of(""))
    count = 600
    add_player(long, [[go.Scatter(text=[""])]] * count, [0], [""] * count, seconds_each=2.0)
    play = long.layout.updatemenus[0].buttons[0].args[1]
    assert play["frame"]["duration"] * count == pytest.approx(frames.LONGEST_PLAY_S * 1000)


def test_titles_are_escaped_and_a_legend_lies_at_the_bottom_or_below_the_title() -> None:
    assert title_of("<b>x</b>", 100)["text"] == "&lt;b&gt;x&lt;/b&gt;"
    assert legend_at(600)["yanchor"] == "bottom"
    assert legend_at(600, top_px=60) == legend_at(600, top_px=60) | {"y": 0.9, "yanchor": "top"}
