"""The rooms of fsdp_sim stand in a row: each imports only rooms before it, and those before mini work without torch.

An import is one wherever it stands: at a file's top, in a function, under TYPE_CHECKING, or as the name of a module in
a string.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fsdp_sim

ROOT = Path(fsdp_sim.__file__).parent
ROOMS = ["setup", "packages", "words", "states", "timeline", "spec", "schedule", "cost", "engine", "diagnose"]
ROOMS += ["simulation", "configurations", "requests", "forms", "explore", "validate"]  # no torch up to here
ROOMS += ["mini", "accelerators", "ranks", "measure", "lint", "migrate", "viz", "learn", "cli"]
WITHOUT_TORCH = [*ROOMS[: ROOMS.index("mini")], "accelerators", "ranks", "lint", "migrate"]
WITH_TORCH = ["mini", "accelerators", "ranks", "measure", "lint", "learn"]
MAY_IMPORT = {room: set(ROOMS[: number + 1]) for number, room in enumerate(ROOMS)}
MAY_IMPORT |= {
    "mini": {"mini", "states", "timeline", "packages", "words"},
    "ranks": {"ranks", "timeline", "accelerators", "packages", "words"},
    "viz": MAY_IMPORT["viz"] - {"schedule"},  # figures read the record, which says of a program what they need
}

HOMES = {"Timeline": "timeline", "Cluster": "spec", "Model": "spec", "Plan": "spec"}
HOMES |= {"Simulation": "simulation", "simulate": "simulation", "tune": "explore"}
"""Where the names are at home that fsdp_sim itself gives."""

ASKED_OF_ALL = {
    ("simulation.simulation", "show"): "Simulation.show draws: figures come after it",
    ("ranks.preload", "import_for_ranks"): "the server of ranks imports what functions on ranks use: it comes after it",
}
"""What a room asks of the package, `fsdp_sim/__init__.py`, which comes after all rooms, and why."""

CIRCLES = {
    ("mini.*", "mini.group"): "types: a unit's group, and what the group uses to act on it and on other units",
    ("mini.extensions", "mini.param"): "types: a parameter and its extension",
    ("spec.model", "spec.blocks"): "a method for what the later file makes: Model.param_count",
    ("spec.model", "spec.hugging_face"): "a method for what the later file makes: Model.from_config",
    ("spec.plan", "spec.torchtitan"): "a method for what the later file makes: Plan.from_torchtitan",
    ("simulation.without_effect", "simulation.simulation"): "types: it compares what simulates it again",
    ("viz.picture", "viz.html"): "a method for what the later file makes: Picture.save",
    ("viz.debugger.stepping", "viz.debugger.view"): "a method for what the later file makes: Debugger.show",
    ("learn.exercise", "learn.apart"): "types: an exercise says what is tried, the file that tries it takes exercises",
}
"""Arrows that close a circle, from and to, and why: each in a function or for types alone."""

NAMED = {
    ("forms.torch_code", "fsdp_sim.mini.siblings"): "code for the reader to copy",
}
"""Modules of another room that are named in a string, and why."""


PAST_THE_DOOR = {
    ("cli.*", "learn.*"): "learn's folders are rooms to the command line; each command imports what it needs",
    ("cli.*", "measure.*"): "imported by the command that measures, with torch",
    ("cli.figures", "viz.*"): "one figure, without importing the others",
    ("cli.validate", "validate.*"): "the page is written, and a file's names read, by this command alone",
    ("cli.*", "explore.sweep"): "the columns of a sweep, which the command writes",
    ("cli.*", "requests.*"): "the structs whose schemas it prints",
    ("cli.diagnose", "timeline.limits"): "the most that it reads",
    ("learn.*", "viz.*"): "drawings of the course are made with what all figures share: theme, chart, picture, table",
    ("learn.*", "ranks.*"): "judges read the board, and look whether an answer went round the ranks' own group",
    ("learn.*", "measure.*"): "one function each, without importing the others",
    ("learn.*", "timeline.analysis"): "arithmetic on spans",
    ("forms.torchtitan", "spec.*"): "which flavors and words torchtitan has",
    ("explore.space", "spec.fields"): "values to try are checked as a plan's are",
    ("requests.*", "spec.fields"): "a request is checked as a spec is",
    ("viz.*", "timeline.*"): "types of what is drawn, and where a call came from",
    ("viz.*", "explore.sweep"): "types of what is drawn",
}
"""Files of a room that others import past its `__init__.py`, and why: from and to."""


class Import(NamedTuple):
    """``from module import name``; name is empty for ``import module``. ``late``: in a function or for types alone."""

    module: str
    name: str
    late: bool


def files_of(room: str) -> list[Path]:
    """The room's files: a folder's, or the one module's."""
    return sorted((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(tree: ast.Module, package: str) -> tuple[Import, ...]:
    """What a file in `package` imports, wherever it does. `fsdp_sim.x`, after ``import fsdp_sim``, imports x."""

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, "", late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield from (Import(base, alias.name, late) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            if isinstance(node.args[0], ast.Constant):
                yield Import(node.args[0].value, "", late)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "fsdp_sim" and node.attr[:2] != "__":
            yield Import("fsdp_sim", node.attr, late)
        for field, value in ast.iter_fields(node):
            in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and field == "body"
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, late or in_function or for_types)

    return tuple(walk(tree, False))


def imports_of(path: Path) -> tuple[Import, ...]:
    return imported(tree_of(path), ".".join(path.relative_to(ROOT.parent).parent.parts))


@cache
def named(tree: ast.Module) -> set[str]:
    """Modules of fsdp_sim and labs that are named in strings, in ``f"fsdp_sim.viz.{x}"`` too; docstrings are none."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in documents}
    found = (re.fullmatch(r"((?:fsdp_sim|labs)(?:\.\w+)+)(?::\w+|\.)?", text) for text in strings if type(text) is str)
    return {match[1] for match in found if match}


def dotted(path: Path) -> str:
    """``viz.explorer`` for the `__init__.py` of that folder, empty for that of fsdp_sim."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


FILES = {dotted(path): path for path in ROOT.rglob("*.py")}


def target_of(one: Import) -> str | None:
    """The file that is imported, as `FILES` names it."""
    package, _, rest = one.module.partition(".")
    if package != "fsdp_sim":
        return None
    inner = f"{rest}.{one.name}".strip(".")
    return inner if inner in FILES else rest or HOMES.get(one.name, "")


def room_of(one: Import) -> str | None:
    """The room that is imported; empty for fsdp_sim itself."""
    target = target_of(one)
    return None if target is None else target.partition(".")[0]


def is_explained(arrow: tuple[str, str], by: dict[tuple[str, str], str]) -> bool:
    return any(fnmatch(arrow[0], start) and fnmatch(arrow[1], end) for start, end in by)


def test_every_folder_and_file_of_the_package_is_a_room_of_the_row():
    found = {path.parent.name for path in ROOT.glob("*/*.py")} | {path.stem for path in ROOT.glob("*.py")}

    assert found - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room):
    wrong = {
        f"{dotted(path)} imports {one.module} {one.name}"
        for path in files_of(room)
        for one in imports_of(path)
        if room_of(one) not in {None, *MAY_IMPORT[room]}
        and not (room_of(one) == "" and (one.name == "" or (dotted(path), one.name) in ASKED_OF_ALL))
    }

    assert not wrong


def test_no_other_room_is_named_in_a_string():
    found = {
        (dotted(path), module)
        for path in FILES.values()
        for module in named(tree_of(path))
        if module.removeprefix("fsdp_sim.") in FILES
        and not f"{module}.".startswith(f"fsdp_sim.{dotted(path).partition('.')[0]}.")
    }

    assert found == set(NAMED)


def test_no_file_comes_round_to_itself_by_what_it_imports():
    arrows: dict[tuple[str, str], bool] = {}
    for name, path in FILES.items():
        for one in imports_of(path):
            target = target_of(one)
            asked = (name, one.name) in ASKED_OF_ALL or (one.module, one.name) == ("fsdp_sim", "")
            if target not in {None, name} and not asked:
                arrows[name, target] = arrows.get((name, target), True) and one.late
    kept: dict[str, set[str]] = {}
    for (start, end), late in arrows.items():
        if not (late and is_explained((start, end), CIRCLES)):
            kept.setdefault(start, set()).add(end)

    assert [name for name in kept if name in reached(name, kept)] == []
    assert [one for one in CIRCLES if not any(is_explained(arrow, {one: ""}) for arrow in arrows)] == []


def reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """The files to which arrows lead from one."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = arrows.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen


def test_a_room_is_used_through_its_init():
    past = {
        (name, str(target_of(one)))
        for name, path in FILES.items()
        for one in imports_of(path)
        if room_of(one) not in {None, "", name.partition(".")[0]}
        and FILES[str(target_of(one))].parent != ROOT
        and FILES[str(target_of(one))].name != "__init__.py"
        and not (one.module == f"fsdp_sim.{room_of(one)}" and one.name in exported(str(room_of(one))))
    }

    assert {arrow for arrow in past if not is_explained(arrow, PAST_THE_DOOR)} == set()
    assert [one for one in PAST_THE_DOOR if not any(is_explained(arrow, {one: ""}) for arrow in past)] == []


def exported(room: str) -> set[str]:
    """The names that a room's `__init__.py` gives."""
    path = FILES[room]
    return {one.name for one in imports_of(path)} if path.name == "__init__.py" else set()


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_no_room_but_the_command_line_imports_the_labs(room):
    wrong = [
        path
        for path in files_of(room)
        if any(
            name.split(".")[0] == "labs" for name in {*named(tree_of(path)), *(one.module for one in imports_of(path))}
        )
    ]

    assert not wrong


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in WITH_TORCH])
def test_torch_is_imported_by_mini_ranks_measure_and_learn_alone(room):
    def is_torch(one: Import, room: str) -> bool:
        return one.module.split(".")[0] == "torch" and not (room == "cli" and one.late)  # the doctor looks at torch

    wrong = [path for path in files_of(room) if any(is_torch(one, room) for one in imports_of(path))]

    assert not wrong


def test_importing_the_rooms_before_mini_and_ranks_brings_in_no_torch_and_starts_no_process():
    modules = ["fsdp_sim", *(f"fsdp_sim.{room}" for room in WITHOUT_TORCH), "fsdp_sim.cli.main"]
    question = f"""
import sys, {", ".join(modules)}
import psutil
print(sorted({{"torch", "plotly"}} & set(sys.modules)), psutil.Process().children())
"""
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, cwd=ROOT.parent)

    assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, "[] []", "")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fsdp_sim.viz.theme as theme", "viz.theme"),
        ("from fsdp_sim import viz", "viz"),
        ("from fsdp_sim.viz import show", "viz"),
        ("from fsdp_sim.viz import theme", "viz.theme"),
        ("from ..viz import show", "viz"),
        ("from .. import viz", "viz"),
        ("from . import board", "ranks.board"),
        ("def late():\n    from fsdp_sim.learn.check import check", "learn.check"),
        ("if TYPE_CHECKING:\n    from fsdp_sim.learn.check import check", "learn.check"),
        ("importlib.import_module('fsdp_sim.viz')", "viz"),
        ("fsdp_sim.viz.show()", "viz"),
        ("fsdp_sim.__file__", None),
        ("from fsdp_sim import Timeline", "timeline"),
        ("from fsdp_sim import simulate, Plan as P", "simulation spec"),
        ("from fsdp_sim import show", ""),
    ],
)
def test_every_way_to_import_is_seen(source, found):
    targets = {target_of(one) for one in imported(ast.parse(source), "fsdp_sim.ranks")}

    assert targets == (set() if found is None else {*found.split()} or {""})


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("PRELOAD = ['fsdp_sim.mini']", {"fsdp_sim.mini"}),
        ("run([python, '-m', 'labs.train'])", {"labs.train"}),
        ("command('fsdp_sim.cli.fit:fit')", {"fsdp_sim.cli.fit"}),
        ("import_module(f'fsdp_sim.viz.{name}')", {"fsdp_sim.viz"}),
        ("say('use fsdp_sim.viz for this')", set()),
        ("'fsdp_sim.viz'", set()),
    ],
)
def test_modules_named_in_strings_are_seen(source, found):
    assert named(ast.parse(source)) == found
