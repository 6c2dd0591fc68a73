"""The start page in a browser that may ask no other host: the simulator runs in it, and says what it says natively."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fsdp_sim.forms import FormState
from fsdp_sim.viz.explorer.starts import PRESETS
from web.fetch import fetched
from web.live.calls import call

pytestmark = [pytest.mark.browser, pytest.mark.tail]
FSDP1 = "model=gpt2-124m gpu=A100-SXM-80GB gpus=8 micro_batch=4 api=fsdp1"
LINE = FormState.read(PRESETS["Llama-3-8B on 64 H100"]).line
LINES = [PRESETS["Llama-3-70B on 512 H100, HSDP"], FSDP1]


@pytest.fixture
def start(opened: Any, live_site: str) -> Any:
    """The start page, live."""
    opened.goto(live_site)
    opened.get_by_text("Live: the simulator runs in this page.").wait_for()
    opened.locator("#figure .main-svg").first.wait_for()
    return opened


def moved(page: Any, times: int) -> None:
    page.wait_for_function(f"document.body.dataset.drawn >= {times}")


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of an answer, with where it stands."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        yield at, value
    for name, part in parts:
        yield from leaves(part, f"{at}/{name}")


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", ["see", "say"])
def test_a_figure_in_the_page_and_what_is_said_of_it_are_the_native_ones(start: Any, name: str, line: str) -> None:
    here = json.loads(call(name, json.dumps({"line": line})))["answer"]
    ask = "([name, asked]) => import('./live/python.js').then(({call}) => call(name, asked))"
    there = start.evaluate(ask, [name, {"line": line}])
    native, found = dict(leaves(here)), dict(leaves(there))

    assert native.keys() == found.keys()
    for at, value in native.items():
        assert found[at] == (pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value), at


def test_a_lever_moves_figure_words_and_link_by_keyboard(start: Any) -> None:
    before = start.locator("#numbers").inner_text()
    start.locator("[data-key=gpus]").focus()
    start.keyboard.press("ArrowLeft")
    moved(start, 1)

    assert start.locator("#numbers").inner_text() != before
    assert "gpus%3D32" in start.url
    assert start.evaluate("document.activeElement.dataset.key") == "gpus"
    drawn = start.evaluate("document.getElementById('figure').data.map(trace => trace.name)")
    assert {"forward", "all-gather", "activations"} <= set(drawn)
    address = start.url
    start.goto("about:blank")
    start.goto(address)
    moved(start, 1)
    assert start.locator("[data-key=gpus]").get_attribute("aria-valuetext") == "32"


def test_a_pinned_plan_stays_above_a_goal_is_judged_and_an_operation_says_why_it_waited(start: Any) -> None:
    from fsdp_sim.viz.explorer.starts import GOALS

    start.evaluate(
        """() => {
          const { postMessage } = Worker.prototype;
          window.asked = [];
          Worker.prototype.postMessage = function (message) {
            window.asked.push(message.name);
            postMessage.call(this, message);
          };
        }"""
    )
    start.get_by_role("button", name="Pin as A").press("Enter")
    moved(start, 1)
    name = next(iter(GOALS))
    start.select_option("#goal", name)
    moved(start, 2)
    start.get_by_role("button", name="Next ▶").press("Enter")
    moved(start, 3)
    assert start.evaluate("window.asked") == ["see", "see", "say", "see"]  # of a plan whose words stand, no words anew
    about = start.locator("#about").inner_text()
    shown = json.loads(call("see", json.dumps({"line": GOALS[name].start, "pinned": LINE, "goal": name, "number": 1})))
    expected = shown["answer"]

    assert about == expected["about"]
    assert "It starts then because" in about
    assert start.locator("#reached span").all_inner_texts() == [
        f"{'✓' if holds else '✗'} {text}" for text, holds in expected["reached"]
    ]
    was = start.locator("#numbers dd + dd").all_inner_texts()
    assert was == [since for _, _, since in expected["numbers"]]
    axes = set(start.evaluate("document.getElementById('figure').data.map(trace => trace.yaxis ?? 'y')"))
    assert axes == {"y", "y2", "y3"}
    assert {"pinned", "goal"} <= set(parse_qs(urlsplit(start.url).fragment))
    start.get_by_role("button", name="Back to A").press("Enter")
    moved(start, 4)
    assert parse_qs(urlsplit(start.url).fragment)["plan"] == [LINE]


def test_the_start_page_is_accessible_while_a_plan_is_pinned(start: Any) -> None:
    from tests.web.test_accessible import violations  # skips where axe is not installed

    start.set_viewport_size({"width": 390, "height": 900})
    start.emulate_media(color_scheme="dark")
    start.get_by_role("button", name="Pin as A").click()
    moved(start, 1)
    assert start.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(start) == []


def test_what_is_impossible_is_said_and_the_figure_stays(start: Any) -> None:
    start.evaluate(
        "location.hash = 'plan=' + encodeURIComponent('model=gpt2-124m gpu=H100-SXM-80GB gpus=8 jitter=0.2')"
    )
    start.locator("#words .refused").wait_for()
    assert "makes ranks differ, which takes numpy" in start.locator("#words").inner_text()
    assert "The figure still shows the last plan that works: model=llama3-8b" in start.locator("#words").inner_text()


def test_the_live_parts_are_less_than_25_mb(live_parts: Path) -> None:
    assert sum(path.stat().st_size for path in live_parts.rglob("*") if path.is_file()) < 25e6


def test_what_was_fetched_and_is_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyodide-314.0.7.tgz").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"has sha256 \w+, not 66b7949e\w+ as web/pinned.toml says: remove it"):
        fetched("pyodide", tmp_path)


def test_without_scripts_the_start_page_shows_its_figure_numbers_and_words(live_site: str, page: Any) -> None:
    context = page.context.browser.new_context(java_script_enabled=False)
    still = context.new_page()
    still.goto(live_site)
    assert still.locator("#figure svg path").count() > 10
    assert still.locator("#words").inner_text().startswith("A step takes 1,3")
    context.close()
