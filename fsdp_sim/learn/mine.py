"""The learner's own FSDP, ``my_fsdp.py``: a module of plain torch that grows by a part with each accepted answer.

It begins as the reference, with a line before each part that says whose it is, and a digest of what was written there:

    # 04 put_hooks: yours, accepted [1f0c93ab]

A part whose digest no longer fits was edited by hand; such a part is never overwritten. Nor is what stands between
parts.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdp_sim.learn import kept
from fsdp_sim.timeline import written

VARIABLE = "FSDP_SIM_MINE"
FILE = "my_fsdp.py"
MAX_LINES = 400
MAX_BYTES = 10**6
REFERENCE = Path(__file__).parent / "exercises" / FILE
MARKER = re.compile(r"^# (\d\d) (\w+)(?:: (.*?)(?: \[([0-9a-f]{8})\])?)?$", re.MULTILINE)


class Whose(StrEnum):
    """Whose a part of the file is."""

    YOURS = "yours, accepted"
    BY_HAND = "yours, edited by hand"
    NOT_YET = "the reference; not yet yours"
    SKIPPED = "the reference; you skipped this step"


@dataclass(frozen=True)
class ChapterPart:
    """A part of a file: its chapter, its function's name, its marker and source, and where both stand in the text."""

    chapter: str
    name: str
    whose: Whose
    source: str
    start: int
    end: int


def path() -> Path:
    """Where the file is: where the variable ``FSDP_SIM_MINE`` says, else in the current folder or in ``notebooks``."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    beside = Path("notebooks", FILE)
    return (beside if beside.is_file() and not Path(FILE).is_file() else Path(FILE)).absolute()


def read(file: Path) -> str:
    """The text of a learner's file; errors are those of `kept.read_text`."""
    return kept.read_text(file, MAX_BYTES)


def parts(text: str) -> dict[str, ChapterPart]:
    """The parts of a file's text, in its order.

    Raises:
        ValueError: it is no Python, or a marker stands before something else than its function.
    """
    try:
        functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} is no Python ({error.msg})") from None
    except (RecursionError, MemoryError):
        raise ValueError("it nests too deep for Python") from None
    lines = text.splitlines(keepends=True)
    found = {}
    for marker in MARKER.finditer(text):
        chapter, name, whose, digest = marker.groups()
        if name not in functions or functions[name].lineno <= text.count("\n", 0, marker.start()):
            raise ValueError(f"the line {marker[0]!r} has no function {name} after it")
        end = sum(map(len, lines[: functions[name].end_lineno]))
        source = text[marker.end() : end].strip()
        if digest and digest != digest_of(source):
            whose = Whose.BY_HAND
        found[name] = ChapterPart(chapter, name, Whose(whose or Whose.NOT_YET), source, marker.start(), end)
    return found


def begun() -> str:
    """The file before any answer."""
    text = REFERENCE.read_text()
    for part in reversed(parts(text).values()):
        text = _with(text, part, part.source, Whose.NOT_YET)
    return text


def chapters() -> dict[str, str]:
    """The parts there are, and the number of the chapter of each."""
    return {part.name: part.chapter for part in parts(REFERENCE.read_text()).values()}


def with_part(name: str, source: str) -> str:
    """The reference with another source of one part: what an answer is tried in."""
    text = REFERENCE.read_text()
    return _with(text, parts(text)[name], source, Whose.YOURS)


def put(name: str, source: str) -> str:
    """Put an accepted answer into the learner's file, which is begun if there is none.

    Returns:
        what was done, or why it was not, as a sentence.
    """
    file = path()
    try:
        if lacking := _lacking(source):
            return f"It is not in {file.name}: it uses `{lacking}`, which is not there; put that into the function."
        text = read(file) if file.is_file() else begun()
        held = parts(text)
        if name not in held:
            return (
                f"{file.name} has no line `# {chapters()[name]} {name}` before a function {name}: it is left as it is."
            )
        if held[name].whose is Whose.BY_HAND:
            return (
                f"{file.name} keeps the {name} that you edited there; to have this one instead, delete the digest "
                f"in brackets in the line `# {held[name].chapter} {name}: ...` and check again."
            )
        order = list(held)
        for part in reversed(held.values()):
            if part.name == name:
                text = _with(text, part, source, Whose.YOURS)
            elif part.whose is Whose.NOT_YET and order.index(part.name) < order.index(name):
                text = _with(text, part, part.source, Whose.SKIPPED)
        _write(file, text)
    except (OSError, ValueError) as error:
        return f"It could not be put into {file} ({error}); mend that file, or move it away for a new one to be begun."
    left = sum(part.whose in (Whose.NOT_YET, Whose.SKIPPED) for part in parts(text).values())
    return f"It now stands in {file.name}, where {left} of {len(held)} parts are still the reference's."


def source_of(function: Callable[..., Any], name: str) -> str:
    """The source of an answer, as a function called ``name``.

    Raises:
        ValueError: it cannot be found, or is no function that begins with ``def``.
    """
    text = getattr(function, "source", None)  # of an edit, and of a cell that was handed in
    try:
        text = text if isinstance(text, str) else textwrap.dedent(inspect.getsource(function))
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        found = next((node for node in functions if node.name == name), functions[-1])
    except (OSError, TypeError, SyntaxError, IndexError):
        raise ValueError("the text of your function cannot be found: write it in a cell, beginning with def") from None
    lines = text.splitlines()[found.lineno - 1 : found.end_lineno]
    lines[0] = lines[0].replace(f"def {found.name}", f"def {name}", 1)
    return "\n".join(line.rstrip() for line in lines)


def _lacking(source: str) -> str:
    """A name that a part uses, and that neither its function nor the file has; empty if there is none."""
    known = {*dir(builtins), *_bound(ast.parse(REFERENCE.read_text())), *_bound(ast.parse(source))}
    used = (node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return next((name for name in used if name not in known), "")


def _bound(tree: ast.AST) -> set[str]:
    """All names that are given a value, wherever."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
    return found


def _with(text: str, part: ChapterPart, source: str, whose: Whose) -> str:
    marker = f"# {part.chapter} {part.name}: {whose} [{digest_of(source)}]"
    return f"{text[: part.start]}{marker}\n{source}\n{text[part.end :]}"


def digest_of(source: str) -> str:
    """Of a part, or of the whole file: whether it is still the same."""
    return hashlib.sha256(source.strip().encode()).hexdigest()[:8]


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with written(file) as new:
        new.write_text(text)
