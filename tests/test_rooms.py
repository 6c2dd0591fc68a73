"""The rooms of fsdp_sim stand in a row: each imports only rooms before it, and those before mini work without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_sim

ROOT = Path(fsdp_sim.__file__).parent
ROOMS = ["packages", "words", "timeline", "spec", "schedule", "cost", "engine", "simulate", "requests", "explore"]
ROOMS += ["validate", "diagnose"]  # no torch up to here
ROOMS += ["mini", "accelerators", "ranks", "measure", "viz", "learn", "cli"]
WITHOUT_TORCH = ROOMS[: ROOMS.index("mini")]
WITH_TORCH = ["mini", "accelerators", "ranks", "measure", "learn"]
MAY_IMPORT = {room: set(ROOMS[: number + 1]) for number, room in enumerate(ROOMS)}
MAY_IMPORT |= {
    "mini": {"mini", "timeline", "packages", "words"},
    "ranks": {"ranks", "timeline", "accelerators", "packages", "words"},
}


def files_of(room: str) -> list[Path]:
    """The room's files: a folder's, or the one module's; none where the room is not built yet."""
    return sorted((ROOT / room).rglob("*.py")) or [path for path in [ROOT / f"{room}.py"] if path.exists()]


def imported(source: str, package: str) -> set[str]:
    """Full names of the modules that `source`, in `package`, imports, at its top or inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            # `from fsdp_sim import viz` imports a room, `from fsdp_sim.viz import show` a name of it.
            names |= {f"{base}.{alias.name}" for alias in node.names} if base == "fsdp_sim" else {base}
    return names


def imports_of(path: Path) -> set[str]:
    return imported(path.read_text(), ".".join(path.relative_to(ROOT.parent).parent.parts))


def room_of(module: str) -> str | None:
    """The room of a module; names that fsdp_sim itself exports count as timeline's or simulate's, fsdp_sim not."""
    package, _, rest = module.partition(".")
    if package != "fsdp_sim" or not rest:
        return None
    room = rest.split(".")[0]
    return room if room in ROOMS else "timeline" if room == "Timeline" else "simulate"


def test_every_folder_and_file_of_the_package_is_a_room_of_the_row():
    found = {path.parent.name for path in ROOT.glob("*/*.py")} | {path.stem for path in ROOT.glob("*.py")}

    assert found - {"__init__", "__main__"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room):
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files_of(room)
        for module in imports_of(path)
        if room_of(module) is not None and room_of(module) not in MAY_IMPORT[room]
    }

    assert not wrong


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_no_room_but_the_command_line_imports_the_labs(room):
    assert not [path for path in files_of(room) if any(name.split(".")[0] == "labs" for name in imports_of(path))]


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in WITH_TORCH])
def test_torch_is_imported_by_mini_ranks_measure_and_learn_alone(room):
    wrong = [path for path in files_of(room) if any(name.split(".")[0] == "torch" for name in imports_of(path))]

    assert not wrong


def test_importing_the_rooms_before_mini_brings_in_no_torch():
    modules = ["fsdp_sim", *(f"fsdp_sim.{room}" for room in WITHOUT_TORCH if files_of(room)), "fsdp_sim.cli.main"]
    question = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'plotly'}} & set(sys.modules)))"

    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, cwd=ROOT.parent)

    assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, "[]", "")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fsdp_sim.viz.theme as theme", "viz"),
        ("from fsdp_sim import viz", "viz"),
        ("from fsdp_sim.viz import show", "viz"),
        ("from ..viz import show", "viz"),
        ("from .. import viz", "viz"),
        ("from . import board", "ranks"),
        ("def late():\n    from fsdp_sim.learn.check import check", "learn"),
        ("from fsdp_sim import Timeline", "timeline"),
        ("from fsdp_sim import simulate, Plan", "simulate"),
    ],
)
def test_every_way_to_write_an_import_is_seen(source, found):
    assert {room_of(module) for module in imported(source, "fsdp_sim.ranks")} == {found}
