"""The debugger in real JupyterLab and Chromium: arrow keys step a run of ranks and come back; saved, it can be read."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser.chromium import CHROMIUM, FLAGS
from tests.browser.lab import IDLE
from tests.browser.lab import lab as start_lab
from tests.viz.debugger import training

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)"),
]
RED = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
CELLS = [
    Path(training.__file__).read_text(),
    "from fsdp_sim import ranks\nfrom fsdp_sim.viz.debugger import debugger\n"
    "run = ranks.run(train, 2, progress=False)\ndebugger(run)",
]


def notebook(path: Path) -> None:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS]), path)


def execute(path: Path, **environ: str) -> None:
    """Run a notebook as `make notebooks` does: without storing the state of widgets."""
    code = (
        "import nbformat, nbclient, sys; nb = nbformat.read(sys.argv[1], 4); "
        "nbclient.NotebookClient(nb, store_widget_state=False).execute(); nbformat.write(nb, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, path], env=os.environ | environ, check=True, capture_output=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """JupyterLab over three notebooks, on loopback with a token; gives their folder, and an address for a name."""
    home = tmp_path_factory.mktemp("lab")
    for name in ("live", "kept", "saved"):
        notebook(home / f"{name}.ipynb")
    with start_lab(home, "{}") as address:
        yield home, address


@pytest.fixture
def opened(lab: tuple[Path, str]) -> Iterator[Callable[[str], Any]]:
    """Opens a notebook and waits for its kernel."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def open_(name: str) -> Any:
            page = browser.new_page(viewport={"width": 1280, "height": 3000})
            page.complaints = []
            page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else 0)
            page.goto(lab[1].format(name))
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
            page.wait_for_timeout(2000)
            if page.locator(".jp-Dialog .jp-mod-accept").count():
                page.locator(".jp-Dialog .jp-mod-accept").first.click()
            page.wait_for_selector(IDLE, timeout=120_000)
            page.wait_for_timeout(2000)
            return page

        yield open_
        browser.close()


@pytest.mark.tail
def test_arrow_keys_step_forwards_and_backwards(opened: Callable[[str], Any]) -> None:
    page = opened("live")
    page.click(".jp-Notebook .jp-Cell >> nth=0")
    page.keyboard.press("Escape")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    head, line = page.locator(".fsd h3"), page.locator(".fsd-code .fsd-here")
    head.wait_for(timeout=120_000)
    assert head.inner_text() == "All-gather copy-in of root"
    start = line.all_inner_texts()
    assert len(start) == 2, "the learner's line and the mini's"
    assert "loss = model(torch.ones(4, 8)).sum()" in start[0], "the text of the cell"

    def press(key: str, expected: str) -> None:
        page.keyboard.press(key)
        page.wait_for_function("text => document.querySelector('.fsd h3').innerText === text", arg=expected)

    page.locator(".jupyter-widgets .noUi-handle").focus()
    press("ArrowRight", "All-gather of root")
    assert line.all_inner_texts()[1] != start[1]
    press("ArrowLeft", "All-gather copy-in of root")
    assert line.all_inner_texts() == start
    for name, expected in (
        ("Next on", "All-gather copy-in of layers.0"),
        ("Same on rank 1", "All-gather copy-in of layers.0"),
    ):
        page.get_by_role("button", name=name).focus()
        press("Enter", expected)
    page.wait_for_function("() => document.querySelector('.fsd-where').innerText.startsWith('rank 1 ')")
    page.get_by_placeholder("find").fill("reduce-scatter layers.1")
    press("Enter", "Reduce-scatter of layers.1")
    assert "loss.backward()" in line.first.inner_text()
    assert page.locator(RED).all_inner_texts() == []
    assert [text for text in page.complaints if "favicon" not in text] == []


@pytest.mark.tail
def test_kept_with_its_widget_the_tables_can_still_be_read(lab: tuple[Path, str], opened: Callable[[str], Any]) -> None:
    execute(lab[0] / "kept.ipynb")
    page = opened("kept")
    assert page.get_by_text("Run this cell to step through the run").is_visible()
    page.get_by_text("The telling moments as tables").click()
    assert page.get_by_text("The most memory alive").is_visible()
    assert page.locator(".jp-RenderedHTML code", has_text="loss.backward()").first.is_visible()


@pytest.mark.tail
def test_saved_for_readers_it_has_no_widget_that_could_fail(
    lab: tuple[Path, str], opened: Callable[[str], Any]
) -> None:
    execute(lab[0] / "saved.ipynb", FSDP_SIM_PNG="1")
    page = opened("saved")
    assert page.get_by_text("The most memory alive").is_visible()
    assert "model not found" not in page.content()
