"""How nbgrader grades this course: it runs nothing of what was handed in.

nbgrader would run a submission in a kernel, as whoever grades, with the checks in the same process. Here a submission
gives no more than the code of its exercises; `fsdp-sim teach grade` judges it apart, as another user, and what comes
back are points and words. This file is copied into the folder of a course, and read by nbgrader in its own environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbgrader.preprocessors import (
    AssignLatePenalties,
    CheckCellMetadata,
    ClearOutput,
    LimitOutput,
    NbGraderPreprocessor,
    OverwriteCells,
    SaveAutoGrades,
)

COURSE = Path(__file__).parent
GRADE = json.loads((COURSE / "grade.json").read_text())
COMMAND, TIMEOUT_S = GRADE["command"], GRADE["timeout_s"]  # the command itself ends an exercise after four minutes


class TakeAnswers(NbGraderPreprocessor):
    """In place of the submission: the assignment as it was given out, with the code of the submission's exercises."""

    def preprocess(self, nb, resources):
        of = resources["nbgrader"]
        given_out = nbformat.read(
            COURSE / "source" / of["assignment"] / f"{of['notebook']}.ipynb", as_version=nbformat.NO_CONVERT
        )
        handed_in = {}
        for cell in nb.cells:
            if cell.cell_type == "code" and "exercise" in cell.metadata:
                handed_in.setdefault(str(cell.metadata["exercise"]), cell.source)
        for cell in given_out.cells:
            if "exercise" in cell.metadata:
                missing = "# The notebook that was handed in has no cell for this exercise.\n"
                cell.source = handed_in.get(cell.metadata["exercise"], missing)
        return given_out, resources


class GradeApart(NbGraderPreprocessor):
    """In place of running the notebook: the points of each exercise and what was said, as the outputs of its check."""

    def preprocess(self, nb, resources):
        command = [*COMMAND, "-", "--json", "--hide", str(COURSE)]
        try:
            done = subprocess.run(command, input=nbformat.writes(nb), capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{' '.join(command)}: no answer within {TIMEOUT_S / 60:g} minutes") from None
        if done.returncode:
            raise RuntimeError(f"{' '.join(COMMAND)}: {done.stderr.strip()}")
        graded = {one["exercise"]: one for one in json.loads(done.stdout)}
        for cell in nb.cells:
            name = cell.metadata.get("nbgrader", {}).get("grade_id", "").removeprefix("check_")
            if cell.metadata.get("nbgrader", {}).get("grade"):
                cell.outputs = [output(graded[name])]
        return nb, resources


def output(graded):
    """nbgrader gives all points for a cell without an error, and none for one with it."""
    if graded["points"]:
        return nbformat.v4.new_output("stream", name="stdout", text=graded["feedback"])
    return nbformat.v4.new_output("error", ename="NotYet", evalue="", traceback=[graded["feedback"]])


os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # nbgrader starts alembic by its name
c = get_config()  # noqa: F821 - nbgrader defines it
c.CourseDirectory.course_id = "fsdp"
c.CourseDirectory.root = str(COURSE)
c.ClearSolutions.enabled = False  # the assignments have stubs already
c.Autograde.sanitize_preprocessors = [TakeAnswers, ClearOutput, OverwriteCells, CheckCellMetadata]
c.Autograde.autograde_preprocessors = [GradeApart, LimitOutput, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata]
