"""The start page in a browser that may ask no other host: the simulator runs in it, and says what it says natively."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.viz.explorer.starts import PRESETS
from web.fetch import fetched
from web.live.calls import call

pytestmark = [pytest.mark.browser, pytest.mark.tail]
FSDP1 = "model=gpt2-124m gpu=A100-SXM-80GB gpus=8 micro_batch=4 api=fsdp1"
LINES = [PRESETS["Llama-3-8B on 8 H100"], PRESETS["Llama-3-70B on 512 H100, HSDP"], FSDP1]


@pytest.fixture
def start(live_site: str, page: Any) -> Iterator[Any]:
    """The start page, live."""
    page.set_default_timeout(60_000)
    elsewhere: list[str] = []

    def only_here(route: Any) -> None:
        if route.request.url.startswith((live_site, "blob:", "data:")):
            route.continue_()
        else:
            elsewhere.append(route.request.url)
            route.abort()

    page.route("**/*", only_here)
    page.goto(live_site)
    page.get_by_text("Live: the simulator runs in this page.").wait_for()
    yield page
    assert elsewhere == []


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of an answer, with where it stands."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        yield at, value
    for name, part in parts:
        yield from leaves(part, f"{at}/{name}")


@pytest.mark.parametrize("line", LINES)
def test_a_figure_in_the_page_is_the_native_one(start: Any, line: str) -> None:
    asked = {"line": line}
    here = json.loads(call("see", json.dumps(asked)))["answer"]
    there = start.evaluate("asked => import('./live/python.js').then(({call}) => call('see', asked))", asked)
    native, found = dict(leaves(here)), dict(leaves(there))

    assert native.keys() == found.keys()
    for at, value in native.items():
        assert found[at] == (pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value), at


def test_a_lever_moves_figure_words_and_link_by_keyboard(start: Any) -> None:
    before = start.locator("#numbers").inner_text()
    start.locator("[data-key=gpus]").focus()
    start.keyboard.press("ArrowLeft")
    start.wait_for_function("document.body.dataset.drawn > 0")

    assert start.locator("#numbers").inner_text() != before
    assert "gpus%3D32" in start.url
    assert start.evaluate("document.activeElement.dataset.key") == "gpus"
    drawn = start.evaluate("document.getElementById('figure').data.map(trace => trace.name)")
    assert {"forward", "all-gather", "activations"} <= set(drawn)
    address = start.url
    start.goto("about:blank")
    start.goto(address)
    start.wait_for_function("document.body.dataset.drawn > 0")
    assert start.locator("[data-key=gpus]").get_attribute("aria-valuetext") == "32"


def test_what_is_impossible_is_said_and_the_figure_stays(start: Any) -> None:
    start.evaluate("location.hash = encodeURIComponent('model=gpt2-124m gpu=H100-SXM-80GB gpus=8 straggler=2')")
    start.locator("#words .refused").wait_for()
    assert "makes ranks differ, which takes numpy" in start.locator("#words").inner_text()
    assert "The figure still shows the last plan that works: model=llama3-8b" in start.locator("#words").inner_text()


def test_the_live_parts_are_less_than_25_mb(live_parts: Path) -> None:
    assert sum(path.stat().st_size for path in live_parts.rglob("*") if path.is_file()) < 25e6


def test_what_was_fetched_and_is_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyodide-314.0.7.tgz").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"has sha256 \w+, not 66b7949e\w+ as web/pinned.toml says: remove it"):
        fetched("pyodide", tmp_path)
