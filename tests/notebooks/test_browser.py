"""The first notebook in real JupyterLab and Chromium: opened as saved it shows its pictures; run, it shows no error."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.lab import CHROMIUM, FLAGS, IDLE
from tests.browser.lab import lab as start_lab

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)"),
]
RED = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab over a copy of the notebook, on loopback with a token; gives the notebook's address."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", home)
    with start_lab(home, "00_start_here") as address:
        yield address


def test_it_shows_its_figures_as_saved_and_runs_without_an_error(lab: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 20_000})  # all cells are on screen, so all are drawn
        elsewhere: list[str] = []
        page.on("request", lambda request: elsewhere.append(request.url) if "127.0.0.1" not in request.url else None)
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        page.wait_for_timeout(2000)
        if page.locator(".jp-Dialog .jp-mod-accept").count():
            page.locator(".jp-Dialog .jp-mod-accept").first.click()
        page.wait_for_selector(IDLE, timeout=120_000)
        expect(page.locator(".jp-RenderedPlotly img")).to_have_count(2, timeout=30_000)  # before anything was run
        assert "model not found" not in page.content()

        page.wait_for_timeout(2000)
        page.click(".jp-Notebook .jp-Cell >> nth=0")
        page.keyboard.press("Escape")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_timeout(1500)
        page.wait_for_selector(IDLE, timeout=240_000)
        page.wait_for_timeout(2000)
        assert page.locator(".jp-InputPrompt", has_text="[*]").count() == 0
        assert page.locator(RED).all_inner_texts() == []
        assert page.locator(".js-plotly-plot .barlayer").count() >= 2  # interactive now
        assert "Every rank issued what the program says" in page.content()
        assert [url for url in elsewhere if url.startswith("http")] == []
        browser.close()
