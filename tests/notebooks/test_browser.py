"""Notebooks in real JupyterLab and Chromium: shown as saved, run from top to bottom, an exercise solved by keyboard."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from fsdp_sim.learn import progress
from tests.browser.chromium import CHROMIUM, FLAGS
from tests.browser.lab import IDLE
from tests.browser.lab import lab as start_lab

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
START, CHAPTER = "00_start_here", "04_the_life_of_a_unit"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)"),
]
RED = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
ACTIVE, INDEX = ".jp-Notebook .jp-Cell.jp-mod-active", "data-windowed-list-index"
FIGURE = "application/vnd.plotly.v1+json"
IN_NOTEBOOK_7 = pytest.param(
    "notebooks",
    marks=[
        pytest.mark.tail,
        pytest.mark.skipif(not importlib.util.find_spec("notebook"), reason="needs Notebook 7: pip install notebook"),
    ],
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with copies of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    for name in (START, CHAPTER):
        shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", folder)
    return folder


@pytest.fixture(scope="module")
def lab(home: Path) -> Iterator[str]:
    """JupyterLab over that folder, on loopback with a token; gives the first notebook's address."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(progress.VARIABLE, str(home / "progress.json"))
        with start_lab(home, START) as address:
            yield address


@pytest.mark.tail  # see make test-all
def test_it_shows_its_figures_as_saved_and_runs_without_an_error(lab: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    cells = nbformat.read(ROOT / "notebooks" / f"{START}.ipynb", as_version=4).cells
    figures = sum(FIGURE in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    assert figures >= 2
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
        drawn = page.locator(".jp-RenderedPlotly .plot-container")  # before anything was run
        expect(drawn).to_have_count(figures, timeout=60_000)
        assert "model not found" not in page.content()
        assert "prefetch on:  790 ms" not in page.content()  # behind a question: seen when the cell runs

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
        assert "prefetch on:  790 ms" in page.content()
        assert [url for url in elsewhere if url.startswith("http")] == []
        browser.close()


@pytest.mark.parametrize("application", ["doc/tree", IN_NOTEBOOK_7])
def test_an_exercise_is_solved_by_keyboard_and_its_check_says_right(lab: str, home: Path, application: str) -> None:
    """Enter, select all, type, Shift+Enter twice: the stub gives way to the solution, the check from ✗ to ✓."""
    from playwright.sync_api import expect, sync_playwright

    notebook = fresh(home / f"{CHAPTER}.ipynb")
    (home / "progress.json").unlink(missing_ok=True)
    solved = nbformat.read(ROOT / "notebooks" / "solutions" / f"{CHAPTER}.ipynb", as_version=4).cells
    imports = next(number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    stub = next(number for number, cell in enumerate(notebook.cells) if "exercise" in cell.metadata)
    name = notebook.cells[stub].metadata["exercise"]
    solution = next(cell.source for cell in solved if cell.metadata.get("exercise") == name)
    assert solution != notebook.cells[stub].source

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1500})
        page.goto(lab.replace("doc/tree", application).replace(START, CHAPTER))
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        page.wait_for_selector(IDLE, timeout=120_000)
        page.wait_for_timeout(2500)  # what is pressed earlier is lost
        page.click(".jp-Notebook .jp-Cell >> nth=0")  # the last use of the mouse
        page.keyboard.press("Escape")

        for number in range(imports + 1):  # the imports are folded: arrows leave them out, running them does not
            page.keyboard.press("Shift+Enter")
            wait_for_active(page, number + 1)
        go_down_to(page, stub)
        page.keyboard.press("Enter")
        expect(page.locator(f"{ACTIVE} .cm-content")).to_be_focused()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(solution)
        expect(page.locator(f"{ACTIVE} .cm-content")).to_contain_text(solution.splitlines()[-1].strip())
        execute(page, stub, "Shift+Enter")
        wait_for_active(page, stub + 1)
        execute(page, stub + 1, "Shift+Enter")

        assert page.locator(RED).all_inner_texts() == []
        (said,) = page.locator(f"{cell_of(stub + 1)} [data-mime-type='text/html']").all_inner_texts()
        assert said.startswith(("✓ Right", "★ Right"))
        browser.close()
    assert progress_of(home)[name].grade >= 1


def fresh(path: Path) -> nbformat.NotebookNode:
    """The chapter as nobody has run it yet, written to a file."""
    notebook = nbformat.read(ROOT / "notebooks" / path.name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    return notebook


def cell_of(number: int) -> str:
    return f".jp-Notebook .jp-Cell[{INDEX}='{number}']"


def execute(page: Page, number: int, keys: str) -> None:
    """Press keys in the active cell and wait until it has run. A page that has just opened can lose what is pressed."""
    from playwright.sync_api import expect

    prompt = page.locator(f"{cell_of(number)} .jp-InputPrompt")
    for _ in range(3):
        page.keyboard.press(keys)
        with contextlib.suppress(AssertionError):
            expect(prompt).not_to_have_text("[ ]:", timeout=10_000)
            break
    expect(prompt).to_have_text(re.compile(r"\[\d+\]:"), timeout=120_000)


def go_down_to(page: Page, number: int) -> None:
    """Press the arrow until the cell of a number is the active one."""
    for reached in range(int(page.locator(ACTIVE).get_attribute(INDEX) or 0), number):
        page.keyboard.press("ArrowDown")
        wait_for_active(page, reached + 1)


def wait_for_active(page: Page, number: int) -> None:
    page.wait_for_selector(f"{ACTIVE}[{INDEX}='{number}']", timeout=30_000)


def progress_of(home: Path) -> dict[str, progress.ExerciseEntry]:
    """What the kernel has written down about the learner."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(progress.VARIABLE, str(home / "progress.json"))
        return progress.read()
