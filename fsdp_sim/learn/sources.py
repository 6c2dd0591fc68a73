"""The source text of an exercise's solution and of its stub, as cells of a notebook that can be read alone."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
from collections.abc import Callable
from typing import Any

from fsdp_sim.learn.edit import Edit, source_of
from fsdp_sim.learn.exercise import Exercise, ExerciseKind

A_STUB = "# A stub: write your code in place of the dots."
FAULTY = "# The faulty code: find what is wrong in it, and mend it."


def solution_source(exercise: Exercise) -> str:
    """The reference solution."""
    return source_of(exercise.reference)


def stub_source(exercise: Exercise) -> str:
    """The stub under the name of the exercise, with a first line that says it is one."""
    stub = source_of(exercise.stub).replace("def stub(", f"def {exercise.name}(", 1)
    return f"{FAULTY if exercise.kind is ExerciseKind.FAULT else A_STUB}\n{stub}"


def imports(exercise: Exercise) -> str:
    """The import lines that the solution and the stub need."""
    return "\n".join(map(ast.unparse, _imports(exercise)))


def missing(exercise: Exercise) -> set[str]:
    """Names that the solution or the stub takes from its file and that no import brings: they would lack in a cell."""
    brought = {_bound(alias) for node in _imports(exercise) for alias in node.names}
    known = brought | set(dir(builtins)) | {exercise.name}
    return {name for function in (exercise.reference, exercise.stub) for name in _globals_of(function) - known}


def unknown(exercise: Exercise) -> set[str]:
    """Names that a wrong answer or a shortcut uses and nobody has defined."""
    functions = [wrong.function for wrong in (*exercise.wrong, *exercise.shortcuts)]
    edits = [function for function in functions if isinstance(function, Edit)]
    known = set(dir(builtins)) | set(vars(inspect.getmodule(exercise.reference)))
    return {name for edit in edits for name in _globals_of(edit)} - known


def _imports(exercise: Exercise) -> list[ast.Import | ast.ImportFrom]:
    """The imports of the exercise's file, of each what the solution and the stub use."""
    used = {name for function in (exercise.reference, exercise.stub) for name in _names(source_of(function))}
    tree = ast.parse(inspect.getsource(inspect.getmodule(exercise.reference)))  # type: ignore[arg-type]
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            node.names = [alias for alias in node.names if _bound(alias) in used]
            if node.names:
                found.append(node)
    return found


def _bound(alias: ast.alias) -> str:
    """The name that an import brings."""
    return alias.asname or alias.name.partition(".")[0]


def _names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _globals_of(function: Callable[..., Any]) -> set[str]:
    """The names that the function's code, and code inside it, looks up among globals."""
    codes, names = [(function.function if isinstance(function, Edit) else function).__code__], set()
    while codes:
        code = codes.pop()
        names |= {order.argval for order in dis.get_instructions(code) if order.opname == "LOAD_GLOBAL"}
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return names
