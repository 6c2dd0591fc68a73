"""The code that a figure needs, of all that its notebook ran before it: what "Copy as Python" copies."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def stored(statement: ast.stmt) -> set[str]:
    """The names that a statement of a cell defines, or changes something of."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return names


def loaded(statement: ast.stmt) -> set[str]:
    """The names that it reads, at once or when it is called."""
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def needed(before: Sequence[str], code: str) -> str:
    """``code`` with the statements of earlier cells that it builds on, in their order.

    Args:
        before: the sources of the cells before it.

    Raises:
        SyntaxError: a cell is no plain Python.
    """
    wanted: set[str] = set().union(*(loaded(statement) for statement in ast.parse(code).body))
    kept: list[str] = []
    for source in reversed(before):
        for statement in reversed(ast.parse(source).body):
            names = stored(statement)
            # A call whose value nobody keeps is there for what it changes: `manual_seed`, `append`.
            if names & wanted or (called(statement) & wanted and not is_last(statement, source)):
                wanted |= loaded(statement)
                decorators = [ast.get_source_segment(source, one) for one in getattr(statement, "decorator_list", [])]
                lines = [*(f"@{one}" for one in decorators), ast.get_source_segment(source, statement)]
                kept.append("\n".join(line for line in lines if line))
    return "\n".join([*reversed(kept), code]) + "\n"


def called(statement: ast.stmt) -> set[str]:
    """Of a statement that is a call of a method, the name at its front."""
    node: ast.AST = statement.value if isinstance(statement, ast.Expr) else statement
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def is_last(statement: ast.stmt, source: str) -> bool:
    """Whether it ends its cell, which then shows its value."""
    return ast.parse(source).body[-1].lineno == statement.lineno
