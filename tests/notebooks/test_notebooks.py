"""The saved notebooks: built from their masters, executed, with pictures, and without anything of this machine."""

import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from fsdp_sim.learn.find import load, load_all
from notebooks.masters import build

ROOT = Path(__file__).parents[2]
MAX_MARKDOWN_LINES, MAX_CODE_LINES = 8, 16
MAX_BYTES = 3_000_000


MASTERS = build.masters()
WITH_SOLUTIONS = [master for master in MASTERS if re.search(r"^# %% exercise=", master.read_text(), re.MULTILINE)]
EDITIONS = [(master, solutions) for solutions in (False, True) for master in MASTERS]
IDS = [f"{master.stem}-{'solutions' if solutions else 'students'}" for master, solutions in EDITIONS]


def saved(master: Path, solutions: bool) -> nbformat.NotebookNode:
    folder = ROOT / "notebooks" / ("solutions" if solutions else "")
    return nbformat.read(folder / f"{master.stem}.ipynb", as_version=4)


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_the_notebook_is_what_its_master_says(master: Path, solutions: bool) -> None:
    fresh, old = build.edition(master, solutions=solutions), saved(master, solutions)
    assert [c.source for c in old.cells] == [c.source for c in fresh.cells], "run `make notebooks`"
    assert [c.id for c in old.cells] == [c.id for c in fresh.cells]


@pytest.mark.parametrize("master", build.masters(), ids=lambda master: master.stem)
def test_it_opens_with_its_title(master: Path) -> None:
    first = saved(master, False).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")


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
    assert figures or not solutions
    assert all({"image/png", "image/jpeg"} & data.keys() for data in figures)
    assert all(data["application/vnd.plotly.v1+json"]["config"]["showSendToCloud"] is False for data in figures)


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_nothing_of_the_machine_it_was_built_on_is_in_it(master: Path, solutions: bool) -> None:
    folder = ROOT / "notebooks" / ("solutions" if solutions else "")
    text = (folder / f"{master.stem}.ipynb").read_text()
    assert str(ROOT) not in text
    assert "/site-packages/" not in text  # of whatever folder it was built in
    assert not re.search(r"/(home|root|Users)/\w", text)
    assert "widget-view" not in text  # "model not found" when it is opened again
    assert len(text.encode()) < MAX_BYTES


@pytest.mark.parametrize(("master", "solutions"), EDITIONS, ids=IDS)
def test_cells_are_short(master: Path, solutions: bool) -> None:
    for cell in saved(master, solutions).cells:
        if "exercise" not in cell.metadata:  # a solution may take 30 lines: see tests/learn
            lines = [line for line in cell.source.splitlines() if line.strip() and line not in build.FOLDED]
            limit = MAX_CODE_LINES if cell.cell_type == "code" else MAX_MARKDOWN_LINES
            if cell.cell_type == "code" and build.sets_up(cell.source):
                continue  # a chapter's imports, which are folded
            assert len(lines) <= limit, cell.source


@pytest.mark.parametrize("master", WITH_SOLUTIONS, ids=[m.stem for m in WITH_SOLUTIONS])
def test_every_exercise_stands_between_its_header_and_its_check_and_a_picture_follows(master: Path) -> None:
    for solutions in (False, True):
        cells = saved(master, solutions).cells
        numbers = [number for number, cell in enumerate(cells) if "exercise" in cell.metadata]
        assert [cells[number].metadata["exercise"] for number in numbers] == build.exercises(master)
        for number in numbers:
            exercise = load(cells[number].metadata["exercise"])
            header, check = cells[number - 1], cells[number + 1]
            assert exercise.title in header.source
            assert exercise.contract in header.source
            assert f'check("{exercise.name}"' in check.source
            if solutions:  # whose cells show something; before it there may be one that defines what it draws
                picture = next(
                    cell for cell in cells[number + 2 :] if cell.get("outputs") and "cause" not in cell.metadata
                )
                assert any(shows(output) for output in picture.outputs), f"no picture after {exercise.name}"


def shows(output: nbformat.NotebookNode) -> bool:
    return bool({"image/png", "image/jpeg", "text/html"} & set(output.get("data", {})))


@pytest.mark.parametrize("master", MASTERS, ids=[m.stem for m in MASTERS])
def test_no_answer_is_on_the_page_before_one_has_given_ones_own(master: Path) -> None:
    """Neither what a prediction or an exercise asks for, nor the asserts that know it."""
    students, solved = saved(master, False), saved(master, True)
    waits = False
    for cell in students.cells:
        if cell.cell_type == "markdown":
            waits = False
        elif {"predict", "exercise", "cause"} & cell.metadata.keys():
            waits = True
        else:
            assert not (waits and cell.outputs), cell.source
            assert "assert " not in cell.source
    checks = [cell for cell in solved.cells if "check" in cell.metadata.get("tags", [])]
    for name, cell in zip(build.exercises(master), checks, strict=True):
        assert "Right" in cell.outputs[-1]["data"]["text/plain"], name


def test_asserts_go_and_the_rest_of_the_code_stays() -> None:
    source = "x = 1\nassert x\nfor i in range(3):\n    assert i < 3\n\n\ndef f():\n    assert x\n    return x\n"
    assert build.without_claims(source) == "x = 1\n\n\ndef f():\n    return x"
    assert build.without_claims("%matplotlib inline") == "%matplotlib inline"
    assert build.without_claims("assert (\n    1\n)") == ""


@pytest.mark.parametrize("master", MASTERS, ids=lambda path: path.stem)
def test_a_question_is_asked_after_predict_was_imported(master: Path) -> None:
    sources = [cell.source for cell in saved(master, True).cells if cell.cell_type == "code"]
    asks = [n for n, source in enumerate(sources) if source.startswith("predict(")]
    imports = [n for n, source in enumerate(sources) if re.search(r"import .*\bpredict\b", source)]
    assert not asks or min(imports) < min(asks)


def test_a_wall_of_imports_is_one_line_for_a_student() -> None:
    imports = "import ast\nimport re\nfrom math import pi\n\nfrom os import path, sep\n"
    assert build.sets_up(imports + "folder = path.join(sep, 'tmp')")
    assert not build.sets_up(imports + "print(folder)")  # whoever reads an output sees where it comes from
    assert not build.sets_up("import ast\ntree = ast.parse('')")


def test_every_exercise_is_in_one_notebook() -> None:
    times = Counter(name for master in MASTERS for name in build.exercises(master))
    assert times == Counter(exercise.name for exercise in load_all())
