"""Assignments for nbgrader are made of the masters, and graded by it from the first cell to the last point.

nbgrader is the real one, in its own environment (`make nbgrader`); so is every submission: a notebook as it was given
out, with other code in its exercises' cells.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from fsdp_sim.learn.find import load
from fsdp_sim.learn.sources import imports, solution_source
from notebooks.masters import assignments
from notebooks.masters.build import STUDENTS, exercises, masters

ROOT = Path(__file__).parents[2]
NBGRADER = ROOT / ".venv-nbgrader" / "bin" / "nbgrader"
NAME = "01_where_the_memory_goes"
MASTER = next(master for master in masters() if master.stem == NAME)
NAMES = exercises(MASTER)


@pytest.fixture(scope="module")
def made() -> nbformat.NotebookNode:
    return assignments.assignment(MASTER)


def cells(notebook: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    """The cells that nbgrader knows, by its id."""
    return {c.metadata.nbgrader.grade_id: c for c in notebook.cells if "nbgrader" in c.metadata}


def test_an_exercise_is_a_solution_and_its_check_has_the_points(made: nbformat.NotebookNode) -> None:
    known = cells(made)
    assert list(known) == ["assignment", *(n for name in NAMES for n in (name, f"check_{name}"))]
    for name in NAMES:
        assert known[name].metadata.nbgrader.solution
        assert not known[name].metadata.nbgrader.locked
        assert known[f"check_{name}"].source.startswith(f'checked = check("{name}", {name})')
        assert known[f"check_{name}"].metadata.nbgrader.points == load(name).difficulty
    assert (
        f"of {sum(load(name).difficulty for name in NAMES)} points, in {len(NAMES)} exercises" in made.cells[1].source
    )


def test_no_solution_is_given_out(made: nbformat.NotebookNode) -> None:
    text = nbformat.writes(made)
    for name in NAMES:
        body = solution_source(load(name)).partition("\n")[2]
        assert json.dumps(body)[1:-1] not in text
    assert [cell.outputs for cell in made.cells if cell.cell_type == "code" and cell.outputs] == []


def test_an_unknown_chapter_is_answered_with_the_nearest(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["assignments", str(tmp_path), "01_where_the_memory_went"])
    assert assignments.main() == 2
    assert f"did you mean {NAME!r}?" in capsys.readouterr().err


def test_there_is_one_for_each_chapter_with_exercises_and_only_its_owner_may_look(tmp_path: Path) -> None:
    written = assignments.write(tmp_path / "course", [])
    assert [path.stem for path in written] == [m.stem for m in masters() if exercises(m)]
    assert (tmp_path / "course").stat().st_mode & 0o077 == 0


def test_nothing_of_nbgrader_is_in_the_learners_environment() -> None:
    listed = subprocess.run(
        [ROOT / ".venv/bin/python", "-m", "pip", "list"], capture_output=True, text=True, check=True
    )
    assert "jupyterlab" in listed.stdout
    assert "nbgrader" not in listed.stdout
    extensions = ROOT / ".venv" / "share" / "jupyter" / "labextensions"
    assert not [path for path in extensions.rglob("*") if "nbgrader" in path.name]


# ------------------------------------------------------------------------------------------------ from end to end


def handed_in(release: Path, to: Path, code: dict[str, str], tamper: bool = False) -> None:
    notebook = nbformat.read(release, as_version=nbformat.NO_CONVERT)
    known = cells(notebook)
    for name, source in code.items():
        known[name].source = source
    if tamper:  # with every check, its points, and with what the check said
        for name in NAMES:
            check = known[f"check_{name}"]
            check.source = "print('all right')"
            check.metadata.nbgrader.update(points=1000, locked=False)
            check.outputs = [nbformat.v4.new_output("stream", text="✓ Right")]
        notebook.cells.remove(known[f"check_{NAMES[-1]}"])
    to.parent.mkdir(parents=True)
    nbformat.write(notebook, to)


def solved(name: str) -> str:
    return f"{imports(load(name))}\n\n\n{solution_source(load(name))}"


def malicious(course: Path) -> dict[str, str]:
    gradebook, other = course / "gradebook.db", course / "submitted" / "right" / NAME / f"{NAME}.ipynb"
    bodies = [
        "while True: pass",
        f"return open({str(other)!r}).read()",
        f"import sqlite3; sqlite3.connect({str(gradebook)!r}).execute('update grade set auto_score = 100')",
        "from fsdp_sim.learn import judges; judges.Claim.grade = judges.Numbers.grade = None",
        "import os; os.kill(os.getppid(), 9)",
    ]
    return {name: f"def {name}(*args):\n    {body}\n" for name, body in zip(NAMES, bodies, strict=False)}


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with one assignment, three submissions, graded, with feedback and exported grades."""
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone can grade as another user")
    if not NBGRADER.exists():
        pytest.skip("needs nbgrader: make nbgrader")
    folder = tmp_path_factory.mktemp("nbgrader") / "course"
    assignments.write(folder, [NAME])
    nbgrader(folder, "generate_assignment", NAME)
    release = folder / "release" / NAME / f"{NAME}.ipynb"
    every = {name: solved(name) for name in NAMES}
    half = dict(list(every.items())[: len(NAMES) // 2])
    for learner, code in {"right": every, "half": half, "malicious": malicious(folder)}.items():
        handed_in(release, folder / "submitted" / learner / NAME / release.name, code, tamper=learner == "malicious")
    for command in ("autograde", "generate_feedback"):
        nbgrader(folder, command, NAME)
    nbgrader(folder, "export")
    return folder


def nbgrader(folder: Path, *command: str) -> None:
    done = asked(folder, *command)
    assert done.returncode == 0, done.stderr


def asked(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder.parent)}
    return subprocess.run([NBGRADER, *command], cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.tail  # needs nbgrader, which make test-all installs
def test_each_gets_the_points_of_what_is_right(course: Path) -> None:
    rows = csv.DictReader((course / "grades.csv").read_text().splitlines())
    points = {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in rows}
    worth = [float(load(name).difficulty) for name in NAMES]
    assert points == {
        "right": (sum(worth), sum(worth)),
        "half": (sum(worth[: len(NAMES) // 2]), sum(worth)),
        "malicious": (0.0, sum(worth)),
    }


@pytest.mark.tail
def test_each_is_told_what_check_would_say(course: Path) -> None:
    def feedback(learner: str) -> str:
        return re.sub(r"<[^>]+>", "", (course / "feedback" / learner / NAME / f"{NAME}.html").read_text())

    assert feedback("right").count("✓ Right") + feedback("right").count("★ Right") == len(NAMES)
    assert feedback("half").count(load(NAMES[-1]).stub_says) >= 1
    assert "still running after" in feedback("malicious")
    assert all(error in feedback("malicious") for error in ("PermissionError", "FileNotFoundError"))
    assert "all right" not in feedback("malicious")


@pytest.mark.tail
def test_what_was_handed_in_is_as_it_was(course: Path) -> None:
    submitted = course / "submitted" / "right" / NAME / f"{NAME}.ipynb"
    notebook = nbformat.read(submitted, as_version=nbformat.NO_CONVERT)
    assert {name: cells(notebook)[name].source for name in NAMES} == {name: solved(name) for name in NAMES}


@pytest.mark.tail
def test_grading_that_stands_still_is_ended_and_the_others_go_on(course: Path, tmp_path: Path) -> None:
    folder = tmp_path / "course"
    shutil.copytree(course, folder)
    (folder / "grade.json").write_text(json.dumps({"command": ["sh", "-c", "exec sleep 600"], "timeout_s": 3}))
    done = asked(folder, "autograde", NAME, "--force")
    assert done.returncode == 1
    assert done.stderr.count("no answer within 0.05 minutes") >= 3  # one of each submission


def test_the_students_notebook_is_the_one_of_the_course() -> None:
    """Who hands in the course's own notebook hands in the same exercises."""
    ours = nbformat.read(STUDENTS / f"{NAME}.ipynb", as_version=nbformat.NO_CONVERT)
    assert [c.metadata["exercise"] for c in ours.cells if "exercise" in c.metadata] == NAMES
