"""A Python text in which one call says a configuration: its keywords, and the keys of tables among them, are changed
where they stand. It is read, and never run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A keyword of a call, or a key of a table: where it and its parts stand, in bytes of UTF-8, and in which of them:
    of ``call(**table)`` the keys are the call's too."""

    name: str
    start: int
    end: int
    key_end: int
    value: ast.expr
    of: ast.Call | ast.Dict

    @property
    def is_quoted(self) -> bool:
        return isinstance(self.of, ast.Dict)


class CallText:
    """The text. A key is named by its path: ``("fsdp_config", "version")``. The same methods as `YamlText` has.

    Args:
        calls: names of the calls of which the text has one.
    """

    def __init__(self, text: str, calls: Collection[str]) -> None:
        self.text, self._calls = text, calls
        self._end_of_line = "\r\n" if "\r\n" in text else "\n"

    def keys(self, path: tuple[str, ...]) -> list[str]:
        """The keys of a table; none of what is not there or is no table."""
        return [one.name for one in self._entries(self._at(path))]

    def set(self, path: tuple[str, ...], value: Any, *, name: str = "") -> None:
        """Give a key another value, and another name if one is said; a key that is not there comes last."""
        *above, key = path
        table = self._at(tuple(above))
        own = next((one for one in self._entries(table) if one.name == key), None)
        if own is None:
            self._append(table, name or key, value)
        else:
            self._put(*self._span(own.value), _literal(value))
            if name:
                self.rename(path, name)

    def rename(self, path: tuple[str, ...], name: str) -> None:
        """Give a key another name."""
        *above, key = path
        own = next(one for one in self._entries(self._at(tuple(above))) if one.name == key)
        self._put(own.start, own.key_end, json.dumps(name) if own.is_quoted else name)

    def remove(self, path: tuple[str, ...]) -> None:
        """Take out a key with its value, and with its lines where it has them for itself; if it is there."""
        *above, key = path
        own = next((one for one in self._entries(self._at(tuple(above))) if one.name == key), None)
        if own is None:
            return
        entries = [one for one in self._entries(own.of) if one.of is own.of]
        at, data = entries.index(own), self.text.encode()
        line = data.rfind(b"\n", 0, own.start) + 1
        after = re.compile(rb"[ \t]*,?[ \t]*(#[^\n]*)?\r?\n").match(data, own.end)
        if after and not data[line : own.start].strip():
            self._put(line, after.end(), "")
        elif at + 1 < len(entries):
            self._put(own.start, entries[at + 1].start, "")
        else:
            self._put(entries[at - 1].end if at else own.start, own.end, "")

    def _at(self, path: tuple[str, ...]) -> ast.expr | None:
        tree = ast.parse(self.text)
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last(node.func) in self._calls)
        node: ast.expr | None = next(calls, None)
        for key in path:
            node = next((one.value for one in self._entries(node) if one.name == key), None)
            if isinstance(node, ast.Name):
                node = _given(tree, node.id)
        return node

    def _entries(self, node: ast.expr | None) -> list[Entry]:
        found = []
        if isinstance(node, ast.Call):
            for word in node.keywords:
                start, end = self._span(word)
                if word.arg is not None:
                    found.append(Entry(word.arg, start, end, start + len(word.arg.encode()), word.value, node))
                elif isinstance(word.value, ast.Name):
                    found += self._entries(_given(ast.parse(self.text), word.value.id))
                else:
                    found += self._entries(word.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    start, key_end = self._span(key)
                    found.append(Entry(key.value, start, self._span(value)[1], key_end, value, node))
        return found

    def _append(self, table: ast.expr | None, name: str, value: Any) -> None:
        assert isinstance(table, ast.Call | ast.Dict)
        data, start = self.text.encode(), self._span(table)[0]
        parts = [*table.args, *table.keywords] if isinstance(table, ast.Call) else table.values
        new = f"{json.dumps(name)}: {_literal(value)}" if isinstance(table, ast.Dict) else f"{name}={_literal(value)}"
        if not parts:
            end = self._span(table)[1] - 1
            self._put(end, end, new)
            return
        last = max(self._span(one)[1] for one in parts)
        entries = [one for one in self._entries(table) if one.of is table]
        line = data.rfind(b"\n", 0, entries[-1].start) + 1 if entries else 0
        indent = data[line : entries[-1].start] if entries else b"x"
        apart = line > start and not indent.strip()
        self._put(last, last, f",{self._end_of_line}{indent.decode()}{new}" if apart else f", {new}")

    def _span(self, node: Any) -> tuple[int, int]:
        lines = self.text.encode().split(b"\n")
        before = [0]
        for line in lines:
            before.append(before[-1] + len(line) + 1)
        return before[node.lineno - 1] + node.col_offset, before[node.end_lineno - 1] + node.end_col_offset

    def _put(self, start: int, end: int, new: str) -> None:
        data = self.text.encode()
        self.text = (data[:start] + new.encode() + data[end:]).decode()


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _given(tree: ast.Module, name: str) -> ast.expr | None:
    """What a name is given, where it is given something once."""
    given = [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets)
    ]  # fmt: skip
    return given[0] if len(given) == 1 else None


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
