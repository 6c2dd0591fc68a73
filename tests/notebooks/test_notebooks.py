"""The saved notebooks: built from their masters, executed, with pictures, and without anything of this machine."""

import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
MAX_MARKDOWN_LINES, MAX_CODE_LINES = 8, 16
MAX_BYTES = 3_000_000


def builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "notebooks" / "masters" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BUILD = builder()
MASTERS = BUILD.masters()
WITH_SOLUTIONS = [master for master in MASTERS if BUILD.has_solutions(master)]
EDITIONS = [(master, False) for master in MASTERS] + [(master, True) for master in WITH_SOLUTIONS]
IDS = [f"{master.stem}-{'solutions' if solutions else 'students'}" for master, solutions in EDITIONS]


def saved(master: Path, solutions: bool) -> nbformat.NotebookNode:
    folder = ROOT / "notebooks" / ("solutions" if solutions else "")
    return nbformat.read(folder / f"{master.stem}.ipynb", as_version=4)


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_the_notebook_is_what_its_master_says(master: Path, solutions: bool) -> None:
    fresh, old = BUILD.edition(master, solutions=solutions), saved(master, solutions)
    assert [c.source for c in old.cells] == [c.source for c in fresh.cells], "run `make notebooks`"
    assert [c.id for c in old.cells] == [c.id for c in fresh.cells]


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_every_code_cell_was_executed_without_error(master: Path, solutions: bool) -> None:
    for cell in saved(master, solutions).cells:
        if cell.cell_type == "code":
            assert cell.execution_count is not None, cell.source  # nbval compares nothing in a cell that was not run
            assert all(output.output_type != "error" for output in cell.outputs)


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_every_figure_has_a_picture_for_readers_without_javascript(master: Path, solutions: bool) -> None:
    figures = [
        output.data
        for cell in saved(master, solutions).cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert figures
    assert all("image/png" in data for data in figures)
    assert all(data["application/vnd.plotly.v1+json"]["config"]["showSendToCloud"] is False for data in figures)


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_nothing_of_the_machine_it_was_built_on_is_in_it(master: Path, solutions: bool) -> None:
    folder = ROOT / "notebooks" / ("solutions" if solutions else "")
    text = (folder / f"{master.stem}.ipynb").read_text()
    assert str(ROOT) not in text
    assert not re.search(r"/(home|root|Users)/\w", text)
    assert "widget-view" not in text  # "model not found" when it is opened again
    assert len(text.encode()) < MAX_BYTES


@pytest.mark.parametrize("master", MASTERS, ids=[m.stem for m in MASTERS])
def test_cells_are_short(master: Path) -> None:
    for cell in saved(master, solutions=master in WITH_SOLUTIONS).cells:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        limit = MAX_CODE_LINES if cell.cell_type == "code" else MAX_MARKDOWN_LINES
        assert len(lines) <= limit, cell.source


@pytest.mark.parametrize("master", WITH_SOLUTIONS, ids=[m.stem for m in WITH_SOLUTIONS])
def test_the_students_edition_has_stubs_where_the_solutions_have_code(master: Path) -> None:
    students, solutions = (
        {c.source for c in saved(master, edition).cells if "exercise" in c.metadata.get("tags", [])}
        for edition in (False, True)
    )
    assert students
    assert all("# your code here" in source for source in students)
    assert not students & solutions
    assert not any("SOLUTION" in c.source for c in saved(master, False).cells)
