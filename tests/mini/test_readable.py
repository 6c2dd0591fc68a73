"""The mini is there to be read: its files stay short, say what they are about, and name what they mirror in torch."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import fsdp_sim.mini

FOLDER = Path(fsdp_sim.mini.__file__).parent
PATH_OF_EVERY_STEP = ("api", "state", "group", "param", "collectives")
FILES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
AT_MOST = {name: 285 for name in (*PATH_OF_EVERY_STEP, "observer")}  # lines of code; an extra has at most half of that


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    numbered = enumerate(source.splitlines(), start=1)
    return sum(1 for i, line in numbered if i not in docstrings and line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_in_one_go(name):
    lines = lines_of_code(FOLDER / f"{name}.py")
    print(f"{name}: {lines} lines of code")  # pytest -s -k read_in_one_go
    assert lines <= AT_MOST.get(name, 130)


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_its_idea_first(name):
    assert len(ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())).splitlines()) >= 3


def test_what_it_names_in_torch_is_there():
    text = "".join((FOLDER / f"{name}.py").read_text() for name in FILES)
    named = set(re.findall(r"torch: `(_fsdp_\w+)\.(\w+)`", text))
    assert len(named) >= 6
    for module, symbol in named:
        assert hasattr(importlib.import_module(f"torch.distributed.fsdp._fully_shard.{module}"), symbol)


def test_the_mini_knows_nothing_of_timelines():
    """A recording is attached from outside, by `observer`, in the words of `recording`."""
    for name in set(FILES) - {"observer", "recording"}:
        modules = re.findall(r"^ *(?:from|import) (\S+)", (FOLDER / f"{name}.py").read_text(), flags=re.MULTILINE)
        assert not [m for m in modules if m.startswith("fsdp_sim.timeline") or m.endswith((".recording", ".observer"))]
