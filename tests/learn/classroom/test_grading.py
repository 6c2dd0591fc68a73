"""What is handed in is judged apart: code that is right gets its points, and no attack gets any or does any harm."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import fsdp_sim
from fsdp_sim.learn import exercises, mine
from fsdp_sim.learn.check import judge
from fsdp_sim.learn.classroom.grading import ExerciseGrade, answers, grade, points
from fsdp_sim.learn.classroom.grading.written_function import Written
from fsdp_sim.learn.exercise import ExerciseKind
from fsdp_sim.learn.find import load, names
from fsdp_sim.learn.folders import folders_in
from fsdp_sim.learn.sources import imports, solution_source, stub_source

grading = importlib.import_module("fsdp_sim.learn.classroom.grading.grade")  # whose name is also its function's
NAME = "all_gathers_per_step"
EXERCISES = Path(exercises.__path__[0])
CHECKER = EXERCISES.parent / "check.py"
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which alone can become another user")


def solved(name: str) -> str:
    return f"{imports(load(name))}\n\n\n{solution_source(load(name))}"


def of_every_kind() -> list[str]:
    """Names of exercises: of those that are tried in the same way one."""
    found: dict[object, str] = {}
    for name in names():
        exercise = load(name)
        trial = exercise.judge.trial(1)
        own = name if trial.metered or any(folders_in(trial.each)) else ""
        found[exercise.kind, trial.ranks > 1, trial.within is None, trial.issues == (), own] = name
    return [*found.values()]


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
            (b'{"cells": ' + b"[" * 100_000, "this is no notebook"),
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


RIGHT = ("case_18", "bytes_kept")  # on real ranks, with files and without
PART = "prefetch"  # of my_fsdp.py: judged beside the others' reference, which its code cannot read
ATTACKS = {  # code, and what it is told
    "reads what others handed in": ("return open('{course}/other.ipynb').read()", "FileNotFoundError"),
    "overwrites what others handed in": ("open('{course}/other.ipynb', 'w').write('mine')", "FileNotFoundError"),
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
        "os.truncate(os.path.dirname(os.environ['HOME']) + '/board', 0)\nimport time\ntime.sleep(600)",
        "a rank has cut short the file in which the ranks say what they do",
    ),
    "drives the terminal of whoever reads it": (
        "print('\\x1b[2J\\x1b]0;title\\x07')\nreturn -1",
        "\\x1b[2J\\x1b]0;title\\x07",
    ),
    "takes memory in many processes and in files without a name": (  # too much only together
        "import time\nfor _ in range(3):\n    if os.fork() == 0:\n        kept = b'x' * (400 << 20)\n"
        "        time.sleep(600)\nfor _ in range(6):\n    os.write(os.memfd_create('x'), bytes(200 << 20))\n"
        "time.sleep(600)",
        "used more than 2 GiB of memory with all it started",
    ),
}
QUOTES = """
from fsdp_sim.ranks.work import Context
records = Context.board.records[0]
for place, op, numel in (1, b"send", 4), (2, b"recv", 8):
    records[place] = (op, b"", b"peer=0", b"fp32", b"{course}/other.ipynb:1", numel, 7, 0, 1, 0.0, 0.0)
Context.board.status["issued"][0] = 3
import time
time.sleep(600)
"""
ATTACKS["has the checker quote what it may not read itself"] = (QUOTES, "receives into a tensor of another size")
ATTACKS |= {
    "reads the memory of its parent": ("return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "PermissionError"),
    "traces its parent": (
        "import ctypes\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) < 0:\n    raise SystemError('refused')",
        "SystemError: refused",
    ),
    "looks for the seed in its environment": ("return os.environ['FSDP_SIM_SEED']", "KeyError: 'FSDP_SIM_SEED'"),
    "looks for its judge among all objects": (
        "import gc\nkinds = ('Exercise', 'Numbers', 'Claim', 'Trial', 'TrialRun')\n"
        "return [o for o in gc.get_objects() if type(o).__name__ in kinds][0].judge",
        "IndexError",
    ),
    "makes every comparison true": (
        "import builtins, math, torch\ntorch.equal = torch.allclose = math.isclose = lambda *a, **k: True\nreturn -1",
        "-1",
    ),
    "answers with what is equal to nothing": ("return float('nan')", "found nan"),
    "turns the line round in which it prints a verdict": (
        "print('\u202e\u2713 Right')\nreturn -1",
        "\\u202e\u2713 Right",
    ),
    "leaves words for the next exercise where everyone may write": (
        "for place in ('/tmp', '/dev/shm', '/var/tmp'):\n    open(place + '/left', 'a').write('x' * 9)\nreturn -1",
        "-1",
    ),
    "looks for words that an earlier one left": ("return open('/tmp/left').read()", "FileNotFoundError"),
    "answers with a number that equals all": (
        "class Any(int):\n    def __eq__(self, other):\n        return True\nreturn Any(-1)",
        "",
    ),
    "prints a verdict of its own": (
        'import sys\nsys.__stdout__.write(\'{"exercise": "bytes_kept", "grade": 3, "feedback": ""}\\n\')\nreturn -1',
        "-1",
    ),
}
ON_FILES = {  # an exercise whose code is lent a folder, what it does there, and what it is told
    "code_in_a_checkpoint": (
        "own = 'written by code, number 1.'\nfrom pathlib import Path\n"
        "Path(args[0], 'sharded', '.metadata').write_text(own)\n"
        "return {'claim': False, 'torch.load': '', 'torch.load, weights_only=False': own, 'dcp.load': own}",
        "expected 'written by code, number",
    ),
    "load_onto_other_shards": (
        "import shutil\nshutil.copytree('{exercises}/checkpoints', f'{args[1]}/expected')\nreturn args[0]",
        "PermissionError",
    ),
    "case_19": (
        "import time\nfor i in range(100):\n    with open(f'{args[2]}/{os.getpid()}-{i}', 'wb') as file:\n"
        "        file.write(bytes(1 << 20))\ntime.sleep(600)",
        "wrote more than 64 MiB or 2,000 files into the folder it was lent",
    ),
}
FORKS = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
OUTLIVES = f"import time\n{FORKS}os.truncate(os.path.dirname(os.environ['HOME']) + '/board', 0)\nos.abort()"
SHARED = f"fsdp_sim_test_{os.getpid()}"
REMOVES = f"""
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"REGISTER:/{SHARED}:shared_memory\\n")
    except OSError:
        pass
return -1
"""
NUMBERS = [name for name in names() if load(name).kind in (ExerciseKind.NUMBER, ExerciseKind.TRACE)]
NUMBERS += [name for name in names() if load(name).kind is ExerciseKind.CLAIM and name not in ON_FILES]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("course")
    folder.chmod(0o777)  # whatever keeps the code out, it is not the folder's permissions
    for name, text in (("other.ipynb", "theirs"), ("check.py", CHECKER.read_text())):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def graded(course: Path) -> dict[str, ExerciseGrade]:
    """Each attack as the code of another exercise, then code that is right, untouched and no Python."""
    given: dict[str, str] = {}
    part = mine.source_of(load(PART).reference, PART)
    attacks = {name: body for name, (body, _) in [*zip(NUMBERS, ATTACKS.values(), strict=False), *ON_FILES.items()]}
    assert len(attacks) == len(ATTACKS) + len(ON_FILES)
    for name, body in attacks.items():
        given[name] = written(body.replace("{course}", str(course)).replace("{exercises}", str(EXERCISES)), name)
    given |= {name: solved(name) for name in RIGHT} | {PART: f"import torch\n\n\n{part}"}
    given |= {"hooks_in_forward": stub_source(load("hooks_in_forward")), "order_of_backward": "def order(:"}
    return {one.exercise: one for one in grade(given, [course])}


@NEEDS_ROOT
class TestGrade:
    @pytest.mark.parametrize(("name", "attack"), [*zip(NUMBERS, ATTACKS, strict=False)], ids=ATTACKS)
    def test_an_attack_gets_no_points(self, name: str, attack: str, graded: dict[str, ExerciseGrade]) -> None:
        assert graded[name].points == 0
        assert ATTACKS[attack][1].replace("{name}", name) in graded[name].feedback

    @pytest.mark.parametrize("name", ON_FILES)
    def test_nor_does_one_in_a_folder_that_it_is_lent(self, name: str, graded: dict[str, ExerciseGrade]) -> None:
        assert graded[name].points == 0
        assert ON_FILES[name][1] in graded[name].feedback

    def test_and_does_no_harm(self, course: Path, graded: dict[str, ExerciseGrade]) -> None:
        assert {path.name: path.read_text() for path in course.iterdir()} == {
            "other.ipynb": "theirs", "check.py": CHECKER.read_text()
        }  # fmt: skip
        assert not [one.exercise for one in graded.values() if "theirs" in one.feedback]

    def test_what_is_right_among_it_gets_all_its_points(self, graded: dict[str, ExerciseGrade]) -> None:
        for one in (graded[name] for name in (*RIGHT, PART)):
            assert one.points == one.out_of == load(one.exercise).difficulty
            assert one.feedback.startswith("✓ Right")

    def test_what_is_untouched_or_no_python_is_told_so(self, graded: dict[str, ExerciseGrade]) -> None:
        assert load("hooks_in_forward").stub_says in graded["hooks_in_forward"].feedback
        assert "SyntaxError" in graded["order_of_backward"].feedback

    def test_nothing_is_graded_where_the_code_could_not_run(self) -> None:
        """An error of the machine is no verdict on a learner."""
        with pytest.raises(ValueError, match=r"which every program here needs, cannot be read.*chmod go\+rx"):
            list(grade({"bytes_kept": solved("bytes_kept")}, [Path(sys.prefix)]))

    @pytest.mark.tail
    def test_a_second_checkout_that_could_be_read_is_found_before_anything_is_graded(self) -> None:
        """Also where a folder above it can be passed through, by who knows the way, and not listed."""
        place = Path(fsdp_sim.__file__).parent / "__pycache__" / SHARED
        second, third = place / "a", place / "unlisted/b"
        for checkout in (second, third):
            (checkout / "fsdp_sim/learn/exercises/unit").mkdir(parents=True)
            (checkout / "fsdp_sim/learn/exercises/unit/one.py").touch()
        third.parent.chmod(0o711)
        try:
            with pytest.raises(ValueError, match=rf"the solutions in {second} and in {third}; add --hide {second}"):
                list(grade({NAME: solved(NAME)}))
        finally:
            shutil.rmtree(place)

    @pytest.mark.slow
    def test_grading_hides_the_solutions_of_the_checkout_that_grades(self, tmp_path: Path) -> None:
        """Also where another one is installed."""
        root = Path(fsdp_sim.__file__).parents[1]
        for package in ("fsdp_sim", "labs"):
            shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        program = (
            "import sys\nfrom fsdp_sim.learn.classroom.grading import grade\n"
            "(one,) = grade({sys.argv[1]: sys.argv[2]})\nprint(one.points, one.feedback)"
        )
        attack = written(ATTACKS["imports the solution"][0])
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", program, NAME, attack], env=env, capture_output=True, text=True)
        assert done.stdout.startswith("0 "), done.stderr
        assert "ModuleNotFoundError" in done.stdout

    @pytest.mark.tail
    def test_solutions_of_every_kind_are_right_here_too(self) -> None:
        """Among them all whose memory is metered, and all that are lent a folder."""
        solutions = {name: solved(name) for name in of_every_kind()}
        graded = list(grade(solutions))
        assert [one.feedback for one in graded if one.points < one.out_of] == []
        assert {one.exercise for one in graded} == solutions.keys()


@NEEDS_ROOT
class TestWhatIsLeft:
    """Code that does what it can to be left, or to hold up who grades."""

    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """Where the files of a grading are, and by which its processes are known."""
        with tempfile.TemporaryDirectory(prefix="graded-") as folder:  # short: there are sockets in it
            monkeypatch.setattr(tempfile, "tempdir", folder)
            yield Path(folder)

    @pytest.mark.tail
    def test_a_process_that_outlives_its_rank_is_ended_and_what_is_right_beside_it_gets_its_points(
        self, folder: Path
    ) -> None:
        """Nor does root's resource tracker listen to what runs beside them."""
        shared = Path("/dev/shm", SHARED)
        shared.write_bytes(b"root's")
        beside = {"elements_sent": written(REMOVES, "elements_sent"), "who_computes_what": solved("who_computes_what")}
        try:
            first, _, last = list(grade({NAME: written(OUTLIVES)} | beside))
            assert (first.points, last.points) == (0, last.out_of)
            self.nothing_is_left(folder)
            assert shared.read_bytes() == b"root's"
        finally:
            shared.unlink(missing_ok=True)

    @pytest.mark.tail
    def test_a_checker_that_stands_still_is_ended_with_all_that_the_code_started(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grading, "EXERCISE_S", 5.0)
        (one,) = grade({NAME: written(f"import time\n{FORKS}time.sleep(600)")})
        assert (one.points, one.feedback) == (0, grading.HELD_UP)
        self.nothing_is_left(folder)

    def nothing_is_left(self, folder: Path) -> None:
        assert not list(folder.iterdir())
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(folder)) and process.status() != "zombie":
                    left.append(process)
        assert not left


FINDS_THE_METER = """
import sys

KEPT = []

def {name}(*given):
    frame = sys._getframe()
    while "meter" not in frame.f_locals:
        frame = frame.f_back
    meter, answer = frame.f_locals["meter"], solved(*given)
    {patch}
    return answer
"""
CLASS = "type(meter).peak_bytes = property(lambda self: {says})"
OTHER = "meter.__class__ = type('M', (type(meter),), {'peak_bytes': property(lambda self: {says}, lambda *_: None)})"


def keeps(name: str, edit: tuple[str, str], patch: str, says: int) -> str:
    """The solution that keeps what it should let go, and has its meter say what would be right."""
    source = solved(name).replace(f"def {name}(", "def solved(")
    assert edit[0] in source
    found = FINDS_THE_METER.replace("{patch}", patch).replace("{name}", name).replace("{says}", str(says))
    return source.replace(*edit) + found


DUMMIES = """
import torch
import torch.distributed as dist

from torch.distributed.tensor.debug import CommDebugMode

def freed_after_forward():
    with CommDebugMode() as counted:
        for _ in range(11):
            dist.all_gather_single(torch.empty(8), torch.ones(4))
        for _ in range(6):
            dist.reduce_scatter_single(torch.empty(4), torch.ones(8))
    return True, sum(n for op, n in counted.get_comm_counts().items() if "gather" in str(op))
"""
CHEATS = {
    "returns from memory what it should have loaded": (
        "case_18",
        "def case_18(weights, full, folder):\n    return weights[-2]",
        "none of the 0 files in the folder has the newest rows of rank 0",
    ),
    "makes its meter's class say less": (
        "case_11",
        keeps("case_11", ("shard /= ranks", "shard /= ranks\n            KEPT.append(gradient)"), CLASS, 1_641_600),
        "your code replaced CPUMeter.peak_bytes",
    ),
    "keeps units whole after their use, which no collective shows, and gives its meter another class": (
        "prefetch_one_ahead",
        keeps("prefetch_one_ahead", ("work.wait()", "work.wait()\n        KEPT.append(whole)"), OTHER, 2_053_120),
        "its meter shows 823,040 bytes taken while your code ran, and the kernel saw its process grow by",
    ),
    "does so where malloc has memory left, and nobody communicates": (
        "reshard_checkpoint",
        keeps(
            "reshard_checkpoint",
            ("return", "KEPT.append(torch.stack([torch.cat(shards)] * 2))\n    return"),
            OTHER,
            7_250_000,
        ),
        "and the kernel saw its process grow by",
    ),
    "keeps blocks whole after forward, where torch's FSDP takes memory of its own": (
        "case_06",
        keeps("case_06", ("fully_shard(block)", "fully_shard(block, reshard_after_forward=False)"), OTHER, 10_496_000),
        "and the kernel saw its process grow by",
    ),
    "has torch clip in its own FSDP, by a name that it puts together": (
        "clip_grad_norm",
        "import torch\n\ndef clip_grad_norm(parameters, most):\n"
        "    return getattr(torch.nn.utils, 'clip_gr' + 'ad_norm_')(parameters, most)",
        "it calls `clip_grad_norm_`; torch's own FSDP is what this file replaces",
    ),
    "has torch gather what its own FSDP is to save": (
        "whole_tensors",
        "import torch\nimport torch.distributed as dist\n\ndef whole_tensors(tensors):\n"
        "    whole = {name: tensor.full_tensor() for name, tensor in tensors.items()}\n"
        "    return whole if dist.get_rank() == 0 else {}",
        "it calls `full_tensor`; torch's own FSDP is what this file replaces",
    ),
    "settles a claim with a full set of empty collectives, which it even counts": (
        "freed_after_forward",
        DUMMIES,
        "times, your code answers 11; measure it",
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_what_the_code_says_of_itself_is_held_against_what_others_saw(cheat: str) -> None:
    name, code, said = CHEATS[cheat]
    verdict = judge(load(name), Written(name, code))
    assert not verdict.passed
    assert said in verdict.message


@pytest.mark.tail
def test_code_that_ends_its_checker_gets_no_points_and_the_next_has_a_checker_of_its_own() -> None:
    """As only code that is trusted can: its rank's parent is the fork server, whose parent is the checker."""
    kills = "import psutil\nos.kill(psutil.Process(os.getppid()).ppid(), 9)\nimport time\ntime.sleep(600)"
    first, second = grade({NAME: written(kills), "bytes_kept": solved("bytes_kept")}, as_other_user=False)
    assert (first.points, first.feedback) == (0, grading.DIED)
    assert second.points == second.out_of


def test_trusted_code_needs_no_root() -> None:
    (graded,) = grade({NAME: solved(NAME)}, as_other_user=False)
    assert graded.points == 1
