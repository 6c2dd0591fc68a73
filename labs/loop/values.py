"""What a key of the trainer may be, one meaning for each: the same from Python, from TOML and from the command line.

A kind is what the annotation of a key allows, as a tuple of types and of words: ``bool | int | None`` is
``(bool, int, NoneType)``, and ``Literal["off"]`` gives the word ``off``. A text from the command line is the first of
these that it can be: a word of the key's own, none, true or false, a number as TOML writes it, the text as it is.
"""

from __future__ import annotations

import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdp_sim.words import nearest

Kind = tuple[type | str, ...]

_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?(([0-9]+(_[0-9]+)*\.?|\.(?=[0-9]))([0-9]+(_[0-9]+)*)?(e[+-]?[0-9]+)?|inf|nan)", re.I)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None}
_MOST_DIGITS = 4300  # of a text that Python's int takes
_SAID = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "none"}
_SHOWN = {bool: "true|false", int: "N", float: "NUMBER", str: "TEXT", types.NoneType: "none"}


def kinds(of: type) -> dict[str, Kind]:
    """The kind of each annotated name of a class."""
    return {name: tuple(_members(hint)) for name, hint in get_type_hints(of).items()}


def _members(hint: Any) -> list[type | str]:
    if get_origin(hint) in (Union, types.UnionType):
        return [member for one in get_args(hint) for member in _members(one)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def is_of(value: object, kind: Kind) -> bool:
    """Whether a Python value is of a kind. True and False are no numbers; a whole number is a number."""
    if isinstance(value, str):
        return str in kind or value in kind
    return type(value) in kind or (type(value) is int and float in kind and _has_float(value))


def _has_float(number: int) -> bool:
    try:
        float(number)
    except OverflowError:
        return False
    return True


def from_text(text: str, kind: Kind) -> object:
    """What a text on the command line stands for; of what the kind has not, what it would be elsewhere."""
    found: list[object] = [text] if text in kind else []
    if text.lower() in _WORDS:
        found.append(_WORDS[text.lower()])
    if _INT.fullmatch(text) and len(text) < _MOST_DIGITS:
        found.append(int(text))
    elif _FLOAT.fullmatch(text):
        found.append(float(text))
    found.append(text)
    return next((value for value in found if is_of(value, kind)), found[0])


def shown(value: object) -> str:
    """As it is written in TOML and in messages."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def wanted(kind: Kind, value: object = None) -> str:
    """What would be right, in words; for a text that is no word of the kind with the nearest one."""
    words = [one for one in kind if isinstance(one, str)]
    said = [_SAID[one] for one in kind if not isinstance(one, str)] + [repr(word) for word in words]
    near = nearest(value, words) if isinstance(value, str) else []
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return ", ".join(said[:-1]) + " or " * (len(said) > 1) + said[-1] + guess


def metavar(kind: Kind) -> str:
    """For --help."""
    return "|".join(one if isinstance(one, str) else _SHOWN[one] for one in kind)
