"""The first notebook in real JupyterLab and Chromium: opened as saved it shows its pictures; run, it shows no error."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)"),
]
IDLE = ".jp-Notebook-ExecutionIndicator[data-status='idle']"
RED = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab over a copy of the notebook, on loopback with a token; gives the notebook's address."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", home)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(12)
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
            f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={home}",
        ],
        env={**os.environ, "JUPYTER_CONFIG_DIR": str(home), "JUPYTERLAB_WORKSPACES_DIR": str(home / "ws")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/doc/tree/00_start_here.ipynb?token={token}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


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
