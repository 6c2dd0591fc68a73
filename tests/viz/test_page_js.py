"""A page is right at any width: nothing is cut, nothing lies on anything else, on a phone, a tablet and a desk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import Section, collective, compare, plotly_js, save_html, shard_map, timeline

Run = Callable[..., Timeline]
MOST_BYTES = 2_000_000

# All that is there to be read: of figures the texts outside of bars (those inside plotly hides where they do not fit).
TEXTS = """() => {
  const chosen = [
    "h1, h2, main p:not(.legend), .legend span, summary, #scheme, td, tbody th", ".gtitle", ".legendtext",
    ".annotation-text-g",
    ".xtitle, .ytitle, .x2title, .y2title", ".xtick text, .ytick text, .x2tick text, .y2tick text, .y3tick text",
    ".updatemenu-button", ".textpoint text",
  ].join(", ");
  return [...document.querySelectorAll(chosen)].filter((e) => e.textContent.trim() && e.checkVisibility()
    && getComputedStyle(e).opacity !== "0").map((e) => {
      const { left, right, top, bottom } = e.getBoundingClientRect();
      const place = e.closest("figure")?.querySelector(".drawing")?.id ?? "";
      const drawn = e.closest(".drawing") !== null;
      return { text: e.textContent.slice(0, 60), left, right, top, bottom, place, drawn };
    }).filter((box) => box.right - box.left > 1);
}"""


def cut(boxes: list[dict[str, Any]], width: int) -> list[str]:
    return [box["text"] for box in boxes if box["left"] < -0.5 or box["right"] > width + 0.5]


def overlapping(boxes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of texts of one figure of which each covers the other by more than 2 pixels, both ways."""
    found = []
    for n, a in enumerate(boxes):
        for b in boxes[n + 1 :]:
            wide = min(a["right"], b["right"]) - max(a["left"], b["left"])
            high = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            nested = not (a["drawn"] and b["drawn"]) and (a["text"].startswith(b["text"]) or b["text"] in a["text"])
            if wide > 2 and high > 3 and not nested:
                found.append((a["text"], b["text"]))
    return found


@pytest.fixture
def saved(tmp_path: Path, training_run: Run) -> Path:
    """A page as the demo writes it, and what else has headings, notes, legends and buttons."""
    measured = {"predicted": training_run(prefetch=True), "measured": training_run(prefetch=True, clock="measured")}
    large = simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=64), Plan(micro_batch=1, param_dtype="bf16"))
    sections = [
        Section.of(compare(training_run(), training_run(prefetch=True), titles=("prefetch off", "prefetch on")), "Two"),
        Section.of(timeline(measured), "Several ranks, predicted and measured"),
        Section.of(shard_map(training_run(ranks=4)), "Who holds what"),
        Section.of(timeline(large.timeline), "A limit"),
        Section.of(collective("all-gather", ranks=4), "A ring"),
    ]
    return save_html(tmp_path / "page.html", sections, title="One training step of Fully Sharded Data Parallel")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_cut_and_no_texts_overlap(saved: Path, page: Any, width: int) -> None:
    assert saved.stat().st_size < MOST_BYTES
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(saved.as_uri())
    page.wait_for_selector("#scheme:not([hidden])")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate(TEXTS)
    assert len({box["place"] for box in boxes}) == 6
    assert cut(boxes, width) == []
    assert overlapping(boxes) == []
    drawings = page.evaluate(
        "[...document.querySelectorAll('.drawing .main-svg')].map(e => e.getBoundingClientRect().right)"
    )
    assert max(drawings) <= width
    assert complaints == []


@pytest.mark.browser
def test_a_page_that_is_turned_is_drawn_anew_and_its_table_of_a_phone_opens(saved: Path, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.goto(saved.as_uri())
    page.wait_for_selector("#scheme:not([hidden])")
    assert page.locator("#figure-0 .gtitle").count() == 0
    assert page.locator("figure .title").first.inner_text().startswith("A step of “prefetch on” is ")
    page.locator("summary").first.click()
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert cut(page.evaluate(TEXTS), 390) == []
    page.set_viewport_size({"width": 1200, "height": 844})
    page.wait_for_selector("#figure-0 .gtitle")
    assert page.locator("figure .title").count() == 0
    assert page.locator("figure").first.locator(".said, .drawing").count() == 1
    paper = page.evaluate("document.querySelector('#figure-1')._fullLayout.paper_bgcolor")
    assert paper == "#111418"


def test_a_page_has_the_part_of_plotly_that_its_figures_need() -> None:
    bars, surface = go.Figure(go.Bar(y=[1])), go.Figure(go.Surface(z=[[1, 2]]))
    small, whole = plotly_js.source([bars]), plotly_js.source([bars, surface])
    assert 'name:"bar"' in small or '"bar"' in small
    assert len(whole) > 3 * len(small)


def test_the_part_is_of_the_release_that_the_python_package_brings() -> None:
    """Else take the new one from npm: plotly.js-cartesian-dist-min, gzipped."""
    from plotly.offline import get_plotlyjs_version

    assert f"v{get_plotlyjs_version()}" in plotly_js.source([])[:200]
