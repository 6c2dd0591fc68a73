"""What is handed in is judged apart: code that is right gets its points, and no attack gets any or does any harm."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import pytest

from fsdp_sim.learn import exercises
from fsdp_sim.learn.classroom.grading import NOT_GRADED, Graded, answers, grade, points
from fsdp_sim.learn.classroom.grading.written import Written
from fsdp_sim.learn.exercise import Kind
from fsdp_sim.learn.find import load, names
from fsdp_sim.learn.sources import imports, solution_source, stub_source

NAME = "all_gathers_per_step"
EXERCISES = Path(exercises.__path__[0])
CHECKER = EXERCISES.parent / "check.py"
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which alone can become another user")


def solved(name: str) -> str:
    return f"{imports(load(name))}\n\n\n{solution_source(load(name))}"


def written(body: str, name: str = NAME) -> str:
    """A cell with a function of any arguments."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"import os\n\ndef {name}(*args):\n{lines}\n"


def notebook(*cells: tuple[str, object]) -> bytes:
    code = [{"cell_type": "code", "metadata": {"exercise": name}, "source": source} for name, source in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "metadata": {}, "source": "# Title"}, *code]}).encode()


class TestHandedIn:
    def test_the_code_of_each_exercise_is_found_and_of_two_the_first(self) -> None:
        cells = notebook((NAME, ["a = 1\n", "b = 2"]), ("of_another_course", "x"), (NAME, "late"), ("bytes_kept", "c"))
        assert answers(cells) == {NAME: "a = 1\nb = 2", "bytes_kept": "c"}

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"\x80\x04pickle", "this is no notebook"),
            (b"[]", "this is no notebook"),
            (b'{"cells": [1]}', "this is no notebook"),
            (b'{"cells": [{"cell_type": "code", "metadata": {"exercise": ["x"]}}]}', "no cell of this notebook"),
            (notebook(("of_another_course", "x")), "no cell of this notebook is an exercise's"),
            (notebook((NAME, "x" * 200_000)), "has 200,000 characters"),
        ],
    )
    def test_what_is_no_such_notebook_is_refused(self, data: bytes, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            answers(data)


class TestWritten:
    def test_it_becomes_a_function_only_when_it_is_called(self) -> None:
        assert Written("double", "def double(x):\n    return 2 * x")(21) == 42
        broken = Written("double", "raise SystemError('it runs')")  # and nothing has run
        with pytest.raises(SystemError):
            broken(1)

    def test_a_cell_that_defines_something_else_says_so(self) -> None:
        with pytest.raises(NameError, match="the cell defines no function double"):
            Written("double", "triple = len")(1)


def test_points_are_given_for_difficulty() -> None:
    assert points(load(NAME)) == load(NAME).difficulty
    assert {points(load(name)) for name in names()} <= {1, 2, 3, 4, 5}


RIGHT = ("who_computes_what", "bytes_kept")  # on real ranks
ATTACKS = {  # code, and what it is told
    "loops for ever": ("while True: pass", "still running after 10 s of computing"),
    "reads what others handed in": ("return open('{course}/other.ipynb').read()", "PermissionError"),
    "overwrites what others handed in": ("open('{course}/other.ipynb', 'w').write('mine')", "PermissionError"),
    "reads the solution": ("return open('{exercises}/unit/all_gathers_per_step.py').read()", "PermissionError"),
    "imports the solution": (
        "from fsdp_sim.learn.exercises.unit.all_gathers_per_step import EXERCISE\nreturn EXERCISE.reference(*args)",
        "ModuleNotFoundError",
    ),
    "tampers with the judge": (
        "from fsdp_sim.learn import check, judges\njudges.Numbers.grade = check.judge = len\nreturn -1",
        "-1",
    ),
    "writes into the checker": ("open('{exercises}/../check.py', 'a').write('#')", "PermissionError"),
    "ends the checker": ("os.kill(os.getppid(), 9)", "PermissionError"),
    "sends a pickle that runs": (
        "class Bomb:\n    def __reduce__(self):\n        return os.system, ('touch {course}/mark',)\nreturn Bomb()",
        "returned a Bomb, which cannot be sent back as plain data",
    ),
    "runs a program": ("os.system('touch {course}/mark')\nreturn -1", "-1"),
    "has a mistake": ("return helper(*args)", "NameError: name 'helper' is not defined, in {name}, at `return helper"),
    "cuts the board that the checker reads": (
        "os.truncate(os.path.dirname(os.environ['HOME']) + '/board', 0)\nreturn 5",
        "brought down the process that checks it",
    ),
}
NUMBERS = [name for name in names() if load(name).kind is Kind.NUMBER]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("course")
    folder.chmod(0o777)  # whatever keeps the code out, it is not the folder's permissions
    for name, text in (("other.ipynb", "theirs"), ("check.py", CHECKER.read_text())):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def graded(course: Path) -> dict[str, Graded]:
    """Each attack as the code of another exercise, then code that is right, untouched and no Python."""
    given = {}
    for name, (body, _) in zip(NUMBERS, ATTACKS.values(), strict=False):
        places = {"{course}": str(course), "{exercises}": str(EXERCISES)}
        given[name] = written(functools.reduce(lambda text, place: text.replace(*place), places.items(), body), name)
    given |= {name: solved(name) for name in RIGHT}
    given |= {"hooks_in_forward": stub_source(load("hooks_in_forward")), "order_of_backward": "def order(:"}
    return {one.exercise: one for one in grade(given, [course])}


@NEEDS_ROOT
class TestGrade:
    @pytest.mark.parametrize(("name", "attack"), [*zip(NUMBERS, ATTACKS, strict=False)], ids=ATTACKS)
    def test_an_attack_gets_no_points(self, name: str, attack: str, graded: dict[str, Graded]) -> None:
        assert graded[name].points == 0
        assert ATTACKS[attack][1].replace("{name}", name) in graded[name].said

    def test_and_does_no_harm(self, course: Path, graded: dict[str, Graded]) -> None:
        assert {path.name: path.read_text() for path in course.iterdir()} == {
            "other.ipynb": "theirs", "check.py": CHECKER.read_text()
        }  # fmt: skip
        assert not [one.exercise for one in graded.values() if "theirs" in one.said]

    def test_what_is_right_among_it_gets_all_its_points(self, graded: dict[str, Graded]) -> None:
        for one in (graded[name] for name in RIGHT):
            assert one.points == one.out_of == load(one.exercise).difficulty
            assert one.said.startswith("✓ Right")

    def test_what_is_untouched_or_no_python_is_told_so(self, graded: dict[str, Graded]) -> None:
        assert load("hooks_in_forward").stub_says in graded["hooks_in_forward"].said
        assert "SyntaxError" in graded["order_of_backward"].said

    def test_nothing_is_graded_where_the_code_could_not_run(self) -> None:
        """An error of the machine is no verdict on a learner."""
        with pytest.raises(ValueError, match=r"which every program here needs, cannot be read.*chmod go\+rx"):
            list(grade({"bytes_kept": solved("bytes_kept")}, [Path(sys.prefix)]))

    @pytest.mark.tail
    def test_every_solution_of_the_course_is_right_here_too(self) -> None:
        assert names().keys() > NOT_GRADED
        graded = list(grade({name: solved(name) for name in names()}))
        assert [one.said for one in graded if one.points < one.out_of] == []
        assert {one.exercise for one in graded} == names().keys() - NOT_GRADED


def test_trusted_code_needs_no_root() -> None:
    (graded,) = grade({NAME: solved(NAME)}, as_other_user=False)
    assert graded.points == 1
