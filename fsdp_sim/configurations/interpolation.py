"""OmegaConf's ``${a.b}`` in a tree of torchtune, verl or LLaMA-Factory: what stands there is looked up in the tree.

Source: omegaconf 2.3's grammar: ``${a.b}`` from the root, ``${.a}`` and ``${..a}`` from the table that has it,
``${oc.select:a.b,1}`` with a default. What asks another resolver (``${oc.env:NAME}``) only a running program knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_sim.configurations.keys import Unread

REFERENCE = re.compile(r"\$\{(\.*)([\w.@/-]+)\}")
SELECT = re.compile(r"\$\{oc\.select:([\w.]+)\s*(?:,([^${}]*))?\}")
WORDS = {"true": True, "false": False, "null": None, "none": None, "": None}
DEEPEST = 20


def variables(text: str) -> frozenset[str]:
    """The keys at the root of which a text has references."""
    return frozenset(match[2].partition(".")[0] for match in REFERENCE.finditer(text) if not match[1])


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the values that its references name; where one names nothing, an `Unread`."""
    return {key: _value(value, tree, (tree,), 0) for key, value in tree.items()}


def _value(value: Any, root: Mapping[str, Any], path: tuple[Mapping[str, Any], ...], depth: int) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _value(one, root, (*path, value), depth) for key, one in value.items()}
    if isinstance(value, list):
        return [_value(one, root, path, depth) for one in value]
    if value == "???":  # OmegaConf's mark of a value that somebody else gives
        return None
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > DEEPEST:
        return Unread(value, 0)
    if whole := REFERENCE.fullmatch(value):
        found = _named(whole, root, path)
        return Unread(value, 0) if found is None else _value(found[0], root, found[1], depth + 1)
    if select := SELECT.fullmatch(value):
        found = _at(select[1], root, (root,))
        return _default(select[2] or "") if found is None else _value(found[0], root, found[1], depth + 1)
    text = value
    for match in REFERENCE.finditer(value):
        found = _named(match, root, path)
        part = Unread(value, 0) if found is None else _value(found[0], root, found[1], depth + 1)
        if isinstance(part, Unread | Mapping | list):
            return Unread(value, 0)
        text = text.replace(match[0], str(part))
    return Unread(value, 0) if "${" in text else text


def _named(
    match: re.Match[str], root: Mapping[str, Any], path: tuple[Mapping[str, Any], ...]
) -> tuple[Any, tuple[Mapping[str, Any], ...]] | None:
    """The value that a reference names, and the tables that it is in."""
    up = len(match[1])
    if up > len(path):
        return None
    tables = path[: len(path) - up + 1] if up else (root,)
    return _at(match[2], tables[-1], tables)


def _default(text: str) -> Any:
    """The value after the comma of ``${oc.select:a.b,value}``."""
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text


def _at(
    dotted: str, value: Any, tables: tuple[Mapping[str, Any], ...]
) -> tuple[Any, tuple[Mapping[str, Any], ...]] | None:
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        tables, value = ((*tables, value) if value is not tables[-1] else tables), value[name]
    return value, tables
