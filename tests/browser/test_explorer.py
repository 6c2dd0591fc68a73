"""The explorer in real JupyterLab and Chromium: keys move it, of a burst the last lands, no host is asked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import CHROMIUM, FLAGS
from tests.browser.lab import Watched, lab, write_notebook

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)"),
]
STATE = "model=gpt2-124m gpu=A100 gpus=16 micro_batch=4"
CELL = f"from fsdp_sim.viz.explorer import explorer\nexplorer(state={STATE!r})"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, Path]]:
    """A notebook whose first cell has been run, and its file."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    home = tmp_path_factory.mktemp("lab")
    path = write_notebook(home, CELL)
    with lab(home) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        watched = Watched(browser)
        watched.open(address)
        watched.run()
        yield watched, path
        browser.close()


def all_gathers(watched: Watched) -> float:
    """How long all all-gathers of the figure are."""
    js = "figure => figure._fullData.find(trace => trace.name === 'all-gather').x.reduce((sum, x) => sum + x, 0)"
    return float(watched.page.locator(".js-plotly-plot").evaluate(js))


def test_a_key_on_a_slider_moves_the_figure_and_the_words(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    before, words = all_gathers(watched), watched.words()
    watched.slider("micro-batch").press("Home")
    watched.settle()
    watched.move_ms(watched.slider("bandwidth"), "ArrowRight")
    assert "bandwidth_gbps=1 " in watched.page.locator(".fsdp-explorer input[type=text]").first.input_value()
    assert all_gathers(watched) > 2 * before
    assert watched.words() != words


def test_of_a_burst_of_keys_the_last_lands(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    handle = watched.slider("sequence")
    handle.press("Home")
    watched.settle()
    before = watched.page.evaluate("window.painted.length")
    handle.focus()
    for key in ["ArrowRight"] * 3 + ["ArrowLeft"] * 2 + ["ArrowRight"] * 2:
        watched.page.keyboard.press(key)
    watched.settle(1.0)
    assert "seq_len=1024" in watched.page.locator(".fsdp-explorer input[type=text]").first.input_value()
    assert 0 < watched.page.evaluate("window.painted.length") - before <= 14
    assert watched.page.locator(".fsdp-stale").count() == 0


def test_what_is_impossible_is_said_and_the_figure_fades(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    before = watched.slider("sequence").get_attribute("aria-valuenow")
    watched.slider("sequence").press("ArrowRight")  # 2048 tokens, and the model has positions for 1024
    watched.page.wait_for_selector(".fsdp-stale", timeout=10_000)
    assert "learned positions for 1024 tokens" in watched.page.locator(".fsdp-seen").inner_text()
    opacity = watched.page.locator(".fsdp-stale").evaluate("box => getComputedStyle(box).opacity")
    assert float(opacity) < 0.6
    watched.slider("sequence").press("ArrowLeft")
    watched.page.wait_for_selector(".fsdp-stale", state="detached", timeout=10_000)
    assert watched.slider("sequence").get_attribute("aria-valuenow") == before


def test_operations_are_stepped_through_by_keys(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    watched.slider("operation").press("ArrowRight")
    watched.page.wait_for_function(
        "() => [...document.querySelectorAll('.fsdp-explorer [role=status]')]"
        ".some(e => e.textContent.includes('It comes after'))"
    )
    watched.slider("operation").press("Home")
    watched.settle()


def test_every_slider_has_a_name_and_nothing_is_cut(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    page = watched.page
    assert page.locator(".fsdp-explorer [role=slider]:not([aria-label])").count() == 0
    cut = """() => [...document.querySelectorAll('.fsdp-explorer .widget-label, .fsdp-explorer .widget-readout')]
      .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
    assert page.evaluate(cut) == []
    place = page.locator(".fsdp-explorer").bounding_box()
    for part in page.locator(".fsdp-explorer button, .fsdp-explorer select, .js-plotly-plot .main-svg").all():
        if part.is_visible():
            box = part.bounding_box()
            assert box["x"] + box["width"] <= place["x"] + place["width"] + 2


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1280, 720)])
def test_controls_lanes_and_memory_are_in_sight_together(shown: tuple[Watched, Path], width: int, height: int) -> None:
    watched, _ = shown
    page, before = watched.page, watched.page.viewport_size
    page.get_by_role("button", name="Pin as A").click()
    unpin = page.get_by_role("button", name="Unpin")
    unpin.wait_for()
    page.set_viewport_size({"width": width, "height": height})
    watched.settle()
    page.locator(".fsdp-explorer").evaluate("explorer => explorer.scrollIntoView()")
    page.wait_for_timeout(1000)
    seen = page.locator(".jp-WindowedPanel-outer").bounding_box()
    for part in (".fsdp-controls", ".js-plotly-plot"):
        box = page.locator(part).bounding_box()
        assert seen["y"] <= box["y"], part
        assert box["y"] + box["height"] <= seen["y"] + seen["height"], part
        assert box["x"] + box["width"] <= seen["x"] + seen["width"], part
    page.set_viewport_size(before)
    watched.settle()  # a press while the page is laid out anew may miss its button
    unpin.click()
    unpin.wait_for(state="hidden")


def test_the_copy_button_copies_code(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    page = watched.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".fsdp-explorer select", has_text="torch: train.py").select_option(label="torch: train.py")
    page.wait_for_function("() => document.querySelector('.fsdp-explorer textarea').value.includes('fully_shard(')")
    page.locator(".fsdp-copy").click()
    page.wait_for_selector("text=copied")
    assert "fully_shard(model, **fsdp)" in page.evaluate("navigator.clipboard.readText()")


def test_no_error_nothing_from_elsewhere_and_no_log_entry(shown: tuple[Watched, Path]) -> None:
    watched, _ = shown
    assert [text for text in watched.complaints if "favicon" not in text] == []
    assert watched.elsewhere == []
    assert watched.page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    counts = watched.page.locator(".jp-mod-highlighted[title*='logs'], [title*='new log']").all_inner_texts()
    assert [count for count in counts if count.strip() not in ("", "0")] == []


@pytest.mark.tail
def test_saved_and_opened_again_it_says_what_it_was(shown: tuple[Watched, Path]) -> None:
    watched, path = shown
    page = watched.page
    assert not page.locator(".fsdp-explorer-still").first.is_visible()  # while the explorer lives
    page.keyboard.press("Escape")
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Save Notebook$")).first.click()
    page.wait_for_timeout(2500)
    saved = json.loads(path.read_text())
    assert len(path.read_text()) < 200_000
    outputs = [output["data"] for output in saved["cells"][0]["outputs"]]
    assert any("A step takes" in "".join(data.get("text/html", "")) for data in outputs)
    other = Watched(page.context.browser)
    write_as = path.with_name("s.ipynb")
    for cell in saved["cells"]:
        cell["execution_count"] = None
    write_as.write_text(json.dumps(saved))
    other.open(watched.address.replace("t.ipynb", "s.ipynb"))
    assert other.page.locator(".fsdp-explorer-still").first.is_visible()
    assert "A step takes" in other.page.locator(".fsdp-explorer-still").first.inner_text()
