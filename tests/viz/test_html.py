"""A saved page needs no network, escapes its text and draws its bars; a notebook gets a figure, words and a table."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import Picture, Section, Table, save_html, show, timeline, timeline_figure

Run = Callable[..., Timeline]


def without_plotly(html: str) -> str:
    return re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", html, flags=re.DOTALL)


def test_a_page_holds_plotly_once_and_its_parts_in_order(tmp_path: Path, training_run: Run) -> None:
    runs = timeline({"off": training_run(), "on": training_run(prefetch=True)})
    section = Section.of(runs, "Prefetching", "Two runs.\n\nSame model.")
    path = save_html(tmp_path / "page.html", [section, go.Figure()], title="A lesson", intro="What you see.")
    html = path.read_text(encoding="utf-8")
    assert html.count('id="plotly"') == 1
    parts = ["<h1>A lesson", "<p>What you see.", "<h2>Prefetching", "<p>Two runs.", "<p>Same model.", 'id="figure-0"',
             "<p>off: The ", "<p>on: The ", "<caption>", 'id="figure-1"']  # fmt: skip
    places = [without_plotly(html).index(part) for part in parts]
    assert places == sorted(places)


def test_nothing_on_a_page_is_fetched(tmp_path: Path, training_run: Run) -> None:
    html = without_plotly(save_html(tmp_path / "page.html", timeline_figure(training_run()), title="t").read_text())
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", html)
    assert '"showSendToCloud":false' in html
    assert "default-src 'none'" in html


def test_all_text_is_escaped(tmp_path: Path, training_run: Run) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    table = Table(evil, (evil,), ((evil,),))
    section = Section.of(timeline({evil: training_run()}), evil, evil)
    html = save_html(tmp_path / "page.html", [section], title=evil, intro=evil, tables=[table]).read_text()
    assert "<img" not in without_plotly(html)
    assert without_plotly(html).count("&lt;img src=x") >= 7


def test_a_dict_of_figures_has_its_keys_as_headings(tmp_path: Path, tiny: Timeline) -> None:
    html = save_html(
        tmp_path / "page.html", {"One": timeline_figure(tiny), "Two": timeline_figure(tiny)}, title="t"
    ).read_text()
    assert re.findall("<h2>(.*?)</h2>", without_plotly(html)) == ["One", "Two"]


def test_a_page_of_nothing_or_of_something_else_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no figure was given"):
        save_html(tmp_path / "page.html", [], title="t")
    with pytest.raises(ValueError, match="is a str; a page is made of Pictures, plotly figures and Sections"):
        save_html(tmp_path / "page.html", ["figure"], title="t")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.browser
def test_the_page_draws_its_bars_in_a_browser_without_network_or_errors(
    tmp_path: Path, page: Any, training_run: Run
) -> None:
    run = training_run(prefetch=True)
    path = save_html(tmp_path / "page.html", [timeline(run, step=1)], title="A lesson")
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(".bars .point path")
    expected = sum(len(t.x) for t in timeline_figure(run, step=1).data if isinstance(t, go.Bar))
    assert page.locator(".bars .point path").count() == expected > 4 * 30
    assert page.locator(".scatterlayer .js-fill").count() == 8  # an area for each memory category

    labels = page.locator(".bars .point text", has_text="embed").locator("visible=true")
    label = labels.first  # the first forward of rank 0
    box = label.bounding_box()
    page.mouse.move(box["x"] - 2, box["y"])
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.wait_for_selector(".hoverlayer .hovertext")
    assert page.locator(".hoverlayer").text_content().startswith("forward embed, 4.00 mscomputes the output")

    page.set_viewport_size({"width": 848, "height": 900})
    page.wait_for_selector('.main-svg[width="800"]')  # 848 less the margins of the page
    assert page.evaluate("document.documentElement.scrollWidth") <= 848
    assert [url for url in requests if not url.startswith("file:")] == []
    assert complaints == []


@pytest.mark.browser
def test_title_legends_and_panels_do_not_overlap_in_a_browser(tmp_path: Path, page: Any, training_run: Run) -> None:
    page.set_viewport_size({"width": 896, "height": 900})
    both = {"predicted": training_run(prefetch=True), "measured": training_run(prefetch=True, clock="measured")}
    page.goto(save_html(tmp_path / "page.html", timeline_figure(both), title="t").as_uri())
    page.wait_for_selector(".bars .point path")
    queries = [
        ".gtitle",
        ".legend",
        '.annotation[data-index="0"]',
        ".subplot.xy .barlayer",
        '.annotation[data-index="4"]',
        ".legend2",
    ]
    boxes = [page.locator(f"#figure-0 {query}").first.bounding_box() for query in queries]
    for above, below in pairwise(boxes):
        assert above["y"] + above["height"] <= below["y"] + 1, (above, below)


@pytest.mark.browser
def test_the_static_picture_is_a_png_of_the_whole_figure(chromium: str, monkeypatch: Any, training_run: Run) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    monkeypatch.setenv("BROWSER_PATH", chromium)
    figure = timeline_figure(training_run(ranks=1))
    png = Picture(figure, "").to_image(width=800)
    assert png.startswith(b"\x89PNG")
    # one and a half times the size asked for
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (1200, 3 * figure.layout.height // 2)


def test_show_displays_the_figure_safely_then_words_and_a_table(
    displayed: list[dict[str, Any]], training_run: Run
) -> None:
    assert show(training_run(), ranks=[0]) is None
    figure, words = displayed
    plotly = figure["application/vnd.plotly.v1+json"]
    assert plotly["config"]["showSendToCloud"] is False
    assert plotly["config"]["displaylogo"] is False
    assert len(plotly["data"]) == len(timeline_figure(training_run(), ranks=[0]).data)
    assert not any(kind.startswith("image/") for kind in figure)
    assert "Step 2 on 4 ranks takes 133 ms" in words["text/plain"]
    assert "<table>" in words["text/html"]


def test_a_picture_that_was_asked_for_and_cannot_be_made_is_an_error(
    displayed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tiny: Timeline
) -> None:
    def no_browser(*_: object, **__: object) -> bytes:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.\nMore.")

    monkeypatch.setattr(go.Figure, "to_image", no_browser)
    with pytest.raises(
        RuntimeError, match=r"no picture could be made \(Kaleido requires .* installed\.\).*BROWSER_PATH"
    ):
        show(tiny, png=True)
    assert displayed == []
