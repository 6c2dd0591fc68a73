"""A picture is a figure, what it shows in words, and its numbers; it displays itself and is saved as page or image."""

import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.viz import Picture, Table, chart, theme, timeline

FRAMES = [go.Frame(name="1", data=[go.Bar(x=[1], y=[1])])]


@pytest.fixture
def picture() -> Picture:
    """A bar and its number."""
    layout = go.Layout(template=theme.LIGHT, height=200)
    table = Table("Bars", ("bar", "ms"), (("<b>first</b>", "2"),))
    return Picture(go.Figure(go.Bar(x=[1], y=[2]), layout), "The <first> bar is 2 ms. There is no other.", (table,))


def test_as_the_last_line_of_a_cell_it_shows_figure_words_and_table(picture: Picture, displayed: list[Any]) -> None:
    picture._ipython_display_()
    figure, words = displayed
    assert figure["text/plain"] == words["text/plain"] == picture.finding
    assert figure["application/vnd.plotly.v1+json"]["config"]["showSendToCloud"] is False
    assert "frames" not in figure["application/vnd.plotly.v1+json"]
    assert "<p>The &lt;first&gt; bar is 2 ms. There is no other.</p>" in words["text/html"]
    assert "&lt;b&gt;first&lt;/b&gt;" in words["text/html"]


def test_words_and_numbers_are_folded_below_the_figure(picture: Picture, displayed: list[Any]) -> None:
    picture.show()
    assert re.fullmatch(r"<details><summary>[^<]*</summary>.*</details>", displayed[1]["text/html"], re.DOTALL)


def test_a_headline_of_ones_own_takes_the_place_of_the_one_that_was_found() -> None:
    figure = go.Figure(go.Bar(x=[1], y=[2]))
    chart.frame(
        figure, "The bar is 2 ms, which is a long sentence, so that it takes two lines. There is no other.", plot_px=100
    )
    found = Picture(figure, "The bar is 2 ms.")
    own = found.titled("Short & true")
    assert own.figure.layout.title.text == "Short &amp; true"
    assert own.finding == "Short & true. The bar is 2 ms."
    plots = [of.layout.height - of.layout.margin.t for of in (found.figure, own.figure)]
    assert plots[0] == plots[1]
    assert own.figure.layout.height < found.figure.layout.height
    assert found.figure.layout.title.text.startswith("The bar")


def test_under_a_shorter_headline_the_legends_keep_their_distance_from_the_plot() -> None:
    step = simulate("gpt2-124m", Cluster("A100-SXM-80GB", gpus=8), Plan(seq_len=16))

    def above_px(picture: Picture) -> list[float]:
        layout = picture.figure.layout
        return [(1 - legend.y) * layout.height - layout.margin.t for legend in (layout.legend, layout.legend2)]

    found = timeline(step.timeline)
    for headline in ("Short", f"{'Long, ' * 30}and longer"):
        own = found.titled(headline)
        assert own.figure.layout.height != found.figure.layout.height
        assert above_px(own) == pytest.approx(above_px(found))


def test_frames_are_shown_with_the_figure(displayed: list[Any]) -> None:
    Picture(go.Figure(go.Bar(x=[1], y=[0]), frames=FRAMES), "It grows.").show()
    (frame,) = displayed[0]["application/vnd.plotly.v1+json"]["frames"]
    assert frame["name"] == "1"


def test_the_dark_picture_says_the_same(picture: Picture) -> None:
    dark = picture.dark()
    assert (dark.finding, dark.tables) == (picture.finding, picture.tables)
    assert dark.figure.layout.template.layout.paper_bgcolor == theme.DARK.layout.paper_bgcolor


def test_a_page_is_named_after_the_finding_unless_it_has_a_title(tmp_path: Path, picture: Picture) -> None:
    assert "<title>The &lt;first&gt; bar is 2 ms</title>" in picture.save(tmp_path / "a.html").read_text()
    assert "<title>Bars</title>" in picture.save(tmp_path / "b.html", title="Bars").read_text()


def test_what_is_neither_page_nor_image_is_refused(tmp_path: Path, picture: Picture) -> None:
    with pytest.raises(ValueError, match=r"as \.html, \.png or \.svg, not as 'a\.gif'"):
        picture.save(tmp_path / "a.gif")


@pytest.mark.browser
def test_an_image_of_what_moves_is_its_still(tmp_path: Path, chromium: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", chromium)
    still = go.Figure(go.Bar(x=[1], y=[1]), go.Layout(title="three moments", height=120))
    path = Picture(go.Figure(frames=FRAMES), "It grows.", still=still).save(tmp_path / "a.svg", width=300)
    assert "three moments" in path.read_text()
    assert 'width="300" height="120"' in path.read_text()
