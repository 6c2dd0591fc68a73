"""Assignments for nbgrader: ``python -m notebooks.masters.assignments COURSE [NAME ...]``.

Made of the masters: the students' edition of a chapter, in which an exercise's code is what is handed in and its check
carries the points. Writes the folder of a course: an assignment in ``source/`` for each chapter, and the configuration
with which nbgrader grades them (`notebooks/instructor/nbgrader_config.py`). What follows is nbgrader's:

    nbgrader generate_assignment 01_where_the_memory_goes
    sudo nbgrader autograde 01_where_the_memory_goes
    nbgrader generate_feedback 01_where_the_memory_goes
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell

from fsdp_sim.learn.classroom.grading import points
from fsdp_sim.learn.find import load
from fsdp_sim.words import nearest
from notebooks.masters.build import STUDENTS, edition, exercises, masters

CONFIGURATION = STUDENTS / "instructor" / "nbgrader_config.py"
SCHEMA = 3  # of nbgrader's metadata
NOTEBOOK_S = 3600  # to grade one notebook
HEADER = """\
**This notebook is an assignment** of {points} points, in {exercises} exercises. Handed in is the notebook as you \
save it; of it only the cell of each exercise is graded, the one that begins as a stub, and each for itself: what a \
function needs, an import or a helper, stands in its cell. The rest is yours to change.
"""


def assignment(master: Path) -> nbformat.NotebookNode:
    """The students' edition of a master with nbgrader's metadata.

    The cell of an exercise is a *solution* with the exercise's name as its id; the check below it, ``check_NAME``, is
    a locked *grade* with the exercise's points.
    """
    notebook = edition(master, solutions=False)
    names, cells = exercises(master), notebook.cells
    total = sum(points(load(name)) for name in names)
    for exercise, check in pairwise(cells):
        name = exercise.metadata.get("exercise")
        if name in names:
            exercise.metadata.nbgrader = marks(name, solution=True, locked=False)
            check.metadata.nbgrader = marks(f"check_{name}", grade=True, points=points(load(name)))
    header = new_markdown_cell(HEADER.format(points=total, exercises=len(names)), id="assignment")
    header.metadata.nbgrader = marks("assignment")
    cells.insert(1, header)
    return notebook


def marks(grade_id: str, **marks: object) -> dict[str, object]:
    """nbgrader's metadata of a cell: not graded and locked, but for ``marks``."""
    every = {"grade": False, "solution": False, "task": False, "locked": True, "schema_version": SCHEMA}
    return every | {"grade_id": grade_id} | marks


def write(course: Path, names: list[str]) -> list[Path]:
    """Write the folder of a course, for nobody else to read: it will hold what everyone hands in.

    Args:
        names: of chapters; all that have exercises if there are none.

    Returns:
        the notebooks of the assignments.

    Raises:
        ValueError: there is no such chapter, or it has no exercises.
    """
    chapters = {master.stem: master for master in masters() if exercises(master)}
    for name in names:
        if name not in chapters:
            near = nearest(name, chapters) or list(chapters)[:1]
            raise ValueError(f"there is no chapter {name!r} with exercises; did you mean {near[0]!r}?")
    course.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy(CONFIGURATION, course)
    command = [str(Path(sys.executable).with_name("fsdp-sim")), "teach", "grade"]
    (course / "grade.json").write_text(json.dumps({"command": command, "timeout_s": NOTEBOOK_S}, indent=1))
    written = []
    for name in names or chapters:
        path = course / "source" / name / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(assignment(chapters[name]), path)
        written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("course", type=Path, help="the folder of the course; made if there is none")
    parser.add_argument("names", nargs="*", help="chapters, such as 05_overlap  [default: all that have exercises]")
    arguments = parser.parse_args()
    try:
        written = write(arguments.course, arguments.names)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(os.path.relpath(path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
