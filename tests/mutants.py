"""Draws small edits of the code, and says which of them the tests notice: what `tests.mutation` does by hand, by lot.

    python -m tests.mutants build/mutants.jsonl                   300 of them, which takes hours
    python -m tests.mutants build/mutants.jsonl --room engine     those of one room

Wants cosmic-ray, whose operators make the edits: ``pip install cosmic-ray``. Each mutant is one edit of one line, in a
copy of the checkout; tests of its file, then of its room, run until one fails, and a mutant that none notices has
survived. The file gets a line for each as it ends, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from tests.mutation import COPIED, ROOT

TIMEOUT_S = 600
SEED = 19


class Room(NamedTuple):
    """What is drawn from a folder, and the tests that should notice: the second list only if none of the first does."""

    mutants: int
    folder: str
    tests: tuple[str, ...]


ACROSS_ROOMS = "tests/laws tests/test_simulation.py tests/test_examples.py"
ROOMS = {
    "schedule": Room(110, "fsdp_sim/schedule", ("tests/schedule", f"tests/engine {ACROSS_ROOMS}")),
    "engine": Room(100, "fsdp_sim/engine", ("tests/engine", f"{ACROSS_ROOMS} tests/diagnose")),
    "checkpoint": Room(30, "labs/checkpoint", ("tests/labs/checkpoint -m 'not tail'",)),
    "mini": Room(
        40,
        "fsdp_sim/mini",
        ("tests/mini -m 'not tail' --ignore=tests/mini/readings --ignore=tests/mini/siblings", "tests/mini/siblings"),
    ),
    "ranks": Room(20, "fsdp_sim/ranks", ("tests/ranks -m 'not tail'",)),
}
BESIDE = {"__init__.py", "siblings", "readings"}  # files and folders with tests of their own kind

OPERATORS = [
    *(f"ReplaceBinaryOperator_{swap}" for swap in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")),
    *(f"ReplaceBinaryOperator_{swap}" for swap in ("Mod_Mul", "BitOr_BitAnd", "BitAnd_BitOr")),
    *(f"ReplaceComparisonOperator_{swap}" for swap in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_Gt", "LtE_Lt")),
    *(f"ReplaceComparisonOperator_{swap}" for swap in ("Gt_GtE", "Gt_Lt", "GtE_Gt", "Is_IsNot", "IsNot_Is")),
    *("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "AddNot", "ReplaceTrueWithFalse"),
    *("ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue"),
    *("ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop"),
]


class Mutant(msgspec.Struct, frozen=True):
    """An edit, and once it was tried the test that noticed it (empty: it survived)."""

    room: str
    file: str
    line: int
    old: str
    new: str
    noticed_by: str = ""


def behaviour(source: str) -> str:
    """What a source does: its syntax tree without annotations, which nobody evaluates."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in {"annotation", "returns"} & set(node._fields):
            setattr(node, field, None)
    return ast.dump(tree)


def drawn(room: str, root: Path, seed: int = SEED) -> Iterator[tuple[Mutant, str]]:
    """The mutants of a room and the text of the edited file: files by their length, operators alike.

    Args:
        root: of the copy that is edited; the checkout may change meanwhile.
    """
    try:
        from cosmic_ray import plugins
        from cosmic_ray.mutating import mutate_code
    except ModuleNotFoundError:
        sys.exit("cosmic-ray makes the edits, and is not here: .venv/bin/pip install cosmic-ray")

    lot = random.Random(seed)
    paths = sorted((root / ROOMS[room].folder).rglob("*.py"))
    texts = {str(p.relative_to(root)): p.read_text() for p in paths if not BESIDE & set(p.parts)}
    seen: set[str] = set()
    while len(seen) < ROOMS[room].mutants:
        (file,) = lot.choices(list(texts), [text.count("\n") for text in texts.values()])
        text, operator = texts[file], plugins.get_operator(f"core/{lot.choice(OPERATORS)}")()
        try:
            edited = mutate_code(text, operator, lot.randrange(12))
            if not edited or edited in seen or behaviour(edited) == behaviour(text):
                continue
        except (AttributeError, SyntaxError):  # edits that cosmic-ray cannot make: of `except a.b`, of `if x := y`
            continue
        seen.add(edited)
        lines = zip(text.splitlines(), edited.splitlines(), strict=False)
        line, old, new = next((n, a.strip(), b.strip()) for n, (a, b) in enumerate(lines, 1) if a != b)
        yield Mutant(room, file, line, old, new), edited


def tests_of(room: str, file: str, root: Path) -> list[str]:
    """Those of the file's own name first, where there are any, then the others of its room."""
    path = Path(file.removeprefix("fsdp_sim/"))
    own = Path("tests") / path.with_name(f"test_{path.name}")
    if not (root / own).exists():
        return [*ROOMS[room].tests]
    return [f"{own} -m 'not tail'", *(f"{some} --ignore={own}" for some in ROOMS[room].tests)]


def noticed_by(root: Path, file: str, edited: str, tests: list[str]) -> str:
    """The first test that fails with an edit, or nothing."""
    path, environment = root / file, os.environ | {"PYTHONPATH": str(root)}
    before = path.read_text()

    def write(text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):  # known by whole seconds alone
            compiled.unlink()

    write(edited)
    try:
        for some in tests:
            command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {some}"
            with subprocess.Popen(
                command, shell=True, cwd=root, env=environment, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            ) as running:  # fmt: skip
                try:
                    printed, _ = running.communicate(timeout=TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(running.pid, signal.SIGKILL)  # all of it, not the shell alone: an edit may loop for ever
                    return f"{some} did not end"
            if running.returncode == 4:
                sys.exit(f"the tests that should notice cannot be run: pytest {some}: {printed[-200:]}")
            if running.returncode:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
                return failed[1] if failed else printed[-200:]
        return ""
    finally:
        write(before)
        shutil.rmtree(root / ".hypothesis", ignore_errors=True)  # examples that failed with this edit alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines, one for each mutant that was tried")
    parser.add_argument("--room", choices=ROOMS, action="append", help="of these rooms only")
    chosen = parser.parse_args()
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    chosen.results.touch()
    tried = {
        msgspec.structs.replace(m, noticed_by=""): m
        for m in map(msgspec.json.Decoder(Mutant).decode, chosen.results.read_text().splitlines())
    }
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, root / name)
        for room in chosen.room or ROOMS:
            file = next((root / ROOMS[room].folder).glob("*.py"))
            if failed := noticed_by(root, str(file.relative_to(root)), file.read_text(), [*ROOMS[room].tests]):
                sys.exit(f"without an edit {failed} fails already")
            for mutant, edited in tqdm(list(drawn(room, root)), desc=room, disable=None):
                if mutant in tried:
                    continue
                by = noticed_by(root, mutant.file, edited, tests_of(room, mutant.file, root))
                tried[mutant] = msgspec.structs.replace(mutant, noticed_by=by)
                with chosen.results.open("ab") as file:
                    file.write(msgspec.json.encode(tried[mutant]) + b"\n")
            of_room = [m for m in tried.values() if m.room == room]
            survived = [m for m in of_room if not m.noticed_by]
            print(f"{room}: {len(of_room) - len(survived)} of {len(of_room)} were noticed; these were not:")
            print(*(f"  {m.file}:{m.line}: {m.old}  ->  {m.new}" for m in survived), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
