"""A notebook in real JupyterLab and headless Chromium: started, run, and watched from key press to repainted figure."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[2]
IDLE = ".jp-Notebook-ExecutionIndicator[data-status='idle']"
# Of every repaint of the figure when it came: the frame after plotly has drawn is on the screen. And of the last key
# press, which is seen before the slider sees it.
WATCH = """figure => {
  window.painted = []; window.pressed = 0;
  document.addEventListener("keydown", () => { window.pressed = performance.now(); }, true);
  figure.on("plotly_afterplot", () => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => window.painted.push(performance.now());
    channel.port2.postMessage(0);
  }));
}"""


@contextlib.contextmanager
def lab(home: Path, name: str = "t", *options: str) -> Iterator[str]:
    """JupyterLab over a folder, on loopback with a token; gives the address of the notebook of a name in it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(12)
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
            f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={home}", *options,
        ],
        env={**os.environ, "JUPYTER_CONFIG_DIR": str(home), "JUPYTERLAB_WORKSPACES_DIR": str(home / "ws"),
             "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=2).close()
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/doc/tree/{name}.ipynb?token={token}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def write_notebook(home: Path, *cells: str) -> Path:
    """A notebook ``t.ipynb`` of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, home / "t.ipynb")
    return home / "t.ipynb"


class Watched:
    """A page, what its console said and what it asked other hosts for."""

    def __init__(self, browser: Any, height: int = 1500) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": height})
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda r: self.elsewhere.append(r.url) if _elsewhere(r.url) else None)

    def open(self, address: str) -> None:
        """Open a notebook and wait until its kernel is idle."""
        self.address = address
        self.page.goto(address)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        self.page.wait_for_selector(IDLE, timeout=120_000)
        self.page.wait_for_timeout(2500)  # a menu that is used earlier loses what it was told

    def run(self) -> float:
        """Run all cells; seconds until the first figure has its bars."""
        self.page.click(".jp-Notebook .jp-Cell >> nth=0")
        self.page.keyboard.press("Escape")
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        begun = time.perf_counter()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_selector(".js-plotly-plot .barlayer path", state="attached", timeout=120_000)
        shown_s = time.perf_counter() - begun
        self.page.wait_for_selector(IDLE, timeout=120_000)
        self.page.wait_for_timeout(1500)
        self.page.locator(".js-plotly-plot").first.evaluate(WATCH)
        return shown_s

    def slider(self, name: str) -> Any:
        """The handle of a slider."""
        return self.page.locator(f"[role=slider][aria-label='{name}']")

    def words(self) -> str:
        return str(self.page.locator(".fsdp-explorer [role=status]").first.inner_text())

    def settle(self, quiet_s: float = 0.4, at_most_s: float = 20.0) -> None:
        """Wait until the figure has not been repainted for a while, and the kernel is idle."""
        end = time.perf_counter() + at_most_s
        while time.perf_counter() < end:
            count = self.page.evaluate("window.painted.length")
            self.page.wait_for_timeout(quiet_s * 1000)
            if self.page.evaluate("window.painted.length") == count and self.page.locator(IDLE).count():
                return

    def move_ms(self, handle: Any, key: str) -> float:
        """Milliseconds from a key press on a slider to the figure that is repainted because of it."""
        before = self.page.evaluate("window.painted.length")
        handle.press(key)
        self.page.wait_for_function("count => window.painted.length > count", arg=before, timeout=30_000)
        self.settle(0.25)
        return float(self.page.evaluate(f"window.painted[{before}] - window.pressed"))


def _elsewhere(url: str) -> bool:
    return url.startswith(("http:", "https:", "ws:", "wss:")) and "127.0.0.1" not in url
