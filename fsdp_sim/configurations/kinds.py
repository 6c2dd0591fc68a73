"""What a key may take: kinds of values and bare words, as a TOML beside a reader lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


class Wrong(Exception):  # noqa: N818 (a value is none of a kind, which the caller may try as another)
    """A value is not of a kind."""


def _flag(value: Any) -> bool:
    said = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in said:
        raise Wrong
    return said[str(value).lower()]


def _whole(value: Any, least: int) -> int:
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # 1e8 in YAML and JSON
        value = int(value)
    if type(value) is not int or value < least:
        raise Wrong
    return value


def _number(value: Any) -> float:
    if isinstance(value, str):  # 1e-5 is a text to YAML 1.1
        try:
            value = float(value)
        except ValueError:
            raise Wrong from None
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise Wrong
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Wrong
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """A list of texts, or one text with commas."""
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(part, str) and part for part in found):
        raise Wrong
    return tuple(found)


def _words(value: Any) -> tuple[str, ...]:
    """A list of texts, or one text with spaces."""
    return _texts(value.split() if isinstance(value, str) else value)


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Wrong
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise Wrong
    return list(value)


def _empty(value: Any) -> list[Any]:
    if value not in ([], (), ""):
        raise Wrong
    return []


KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("True or False", _flag),
    "whole": ("a whole number", lambda value: _whole(value, -(2**62))),
    "whole>=0": ("a whole number >= 0", lambda value: _whole(value, 0)),
    "whole>=1": ("a whole number >= 1", lambda value: _whole(value, 1)),
    "number": ("a number", _number),
    "text": ("a text", _text),
    "texts": ("a list of names", _texts),
    "words": ("words", _words),
    "table": ("a table", _table),
    "list": ("a list", _list),
    "empty": ("an empty list", _empty),
    "any": ("a value", lambda value: value),  # which the reader itself checks
}


def converted(takes: str, value: Any) -> Any:
    """A value as one of the kinds, or the words in whatever case, that ``takes`` lists with bars between them.

    Raises:
        Wrong: it is none.
    """
    for kind in takes.split(" | "):
        if kind in KINDS:
            try:
                return KINDS[kind][1](value)
            except Wrong:
                continue
        said = _SAID[value] if isinstance(value, bool) else (str(value).lower(),)
        if kind.lower() in said and isinstance(value, str | int | float):
            return int(kind) if kind.lstrip("-").isdecimal() else kind
    raise Wrong


_SAID = {True: ("true", "yes", "on"), False: ("false", "no", "off")}  # what YAML 1.1 makes of a bare word


def in_words(takes: str) -> str:
    said = [
        KINDS[kind][0] if kind in KINDS else kind if kind.isdecimal() else repr(kind) for kind in takes.split(" | ")
    ]
    return ", ".join(said[:-1]) + " or " * bool(said[1:]) + said[-1]
