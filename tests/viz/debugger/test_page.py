"""The page steps with the arrow keys and by clicks, without kernel, network or script."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.timeline import Op, Timeline
from fsdp_sim.viz.debugger import debugger_page
from tests.timeline.strategies import gather, op, timeline_of


def test_it_asks_for_nothing_and_runs_nothing(run: Timeline, tmp_path: Path) -> None:
    html = debugger_page(tmp_path / "page.html", run, step=0, title="A <run>").read_text()
    assert "<title>A &lt;run&gt;</title>" in html
    assert "default-src 'none'" in html
    assert not re.findall(r"<script|\bsrc=|href=(?!.#)|@import|url\((?!#)|https?://|\bon\w+=", html)


def test_a_moment_per_event_of_one_step_and_of_each_rank(run: Timeline, tmp_path: Path) -> None:
    html = debugger_page(tmp_path / "page.html", run, step=1, rank=1).read_text()
    ids = re.findall(r'<input type="radio" name="moment" id="moment-(\d)-(\d+)"', html)
    assert [(int(rank), int(seq)) for rank, seq in ids] == [
        (rank, e.seq) for rank in (1, 0) for e in run.select(rank=rank, step=1)
    ]
    assert set(re.findall(r'for="(moment-[\d-]+)"', html)) <= {f"moment-{rank}-{seq}" for rank, seq in ids}
    assert html.count(" checked ") == 1


def test_ids_of_the_page_are_its_own(run: Timeline, tmp_path: Path) -> None:
    ids = re.findall(r'\bid="([^"]+)"', debugger_page(tmp_path / "page.html", run, step=0).read_text())
    assert len(ids) == len(set(ids))


def test_html_in_names_stays_text(tmp_path: Path) -> None:
    evil = '"><img src=x onerror=alert(1)>'
    timeline = timeline_of(gather(0, 1, unit=evil), op(0, 0, Op.ALLOC, unit=evil, bytes=1, seq=1))
    assert "<img" not in debugger_page(tmp_path / "page.html", timeline, title=evil).read_text()


def test_a_run_too_long_for_a_page_is_refused(tmp_path: Path) -> None:
    many = timeline_of(*(op(i, i + 1, seq=i) for i in range(700)))
    with pytest.raises(ValueError, match="step 0 of rank 0 has 700 events, and a page holds 600"):
        debugger_page(tmp_path / "page.html", many)


@pytest.mark.browser
def test_arrow_keys_and_clicks_step_forwards_and_backwards(page: Any, run: Timeline, tmp_path: Path) -> None:
    path = debugger_page(tmp_path / "page.html", run, step=0)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(f"file://{os.fspath(path)}")
    head = page.locator("section:visible h3").first
    marked = page.locator("section:visible tr[aria-current=true] td").first
    assert head.inner_text() == "All-gather copy-in of root"
    page.focus("input:checked")
    page.keyboard.press("ArrowRight")
    assert (head.inner_text(), marked.inner_text()) == ("All-gather of root", "6")
    page.keyboard.press("ArrowLeft")
    assert (head.inner_text(), marked.inner_text()) == ("All-gather copy-in of root", "5")
    page.locator("section:visible label", has_text="Next ▶").click()
    page.locator("section:visible label", has_text="Next on all-gather").click()
    assert head.inner_text() == "All-gather of layers.0"
    page.locator("section:visible label", has_text="Same on rank 1").click()
    assert page.locator("section:visible .fsd-where").first.inner_text().startswith("rank 1 ")
    assert page.locator(".fsd-film > section:visible").count() == 1
    assert complaints == []
