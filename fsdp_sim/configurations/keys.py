"""A format's keys as data (a TOML file beside its reader), and a configuration checked against them.

A key is one of three: it is *read*, with what it takes and its default in that version; or *only* some of its values
are simulated, and another is refused; or it stands *beside* the step and says nothing of it. A key that is none of
these is refused, with the nearest name.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple

from fsdp_sim.spec import torchtitan_keys
from fsdp_sim.words import did_you_mean, nearest, shortened

TOP = "top"
MOST_SHOWN = 200  # characters of a value in a message


class Unread(NamedTuple):
    """A value that only running a program would give: of a Python file, with its line, or a resolver's (line 0)."""

    source: str
    line: int


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


class Key(NamedTuple):
    """What is known of a key.

    Attributes:
        takes: kinds and words, with `` | `` between them; empty for a key that stands beside the step.
        default: where it is not given; None has no default to speak of.
        only: it is not read: it must be what ``takes`` lists, and ``why`` says why.
    """

    takes: str = ""
    default: Any = None
    only: bool = False
    why: str = ""


class Schema(NamedTuple):
    """A format's keys.

    Attributes:
        name, package, source: the format, the package with its version, and the symbols that were read.
        signs: keys of which one shows that a file is of this format.
        calls: in a Python file: which call says what is in which section.
        sections: by dotted name; `TOP` is the file's own.
        prefixes: of a section's keys, which may be left out.
        alone: a section that a file of its own may hold.
        earlier: keys of earlier versions, by dotted name, and what this version calls them.
        open: sections that take whatever a class takes that the file names; a key that is not known stands beside.
        interpolates: ``${a.b}`` names another value of the file.
    """

    name: str
    package: str
    source: str
    signs: tuple[str, ...]
    calls: dict[str, str]
    sections: dict[str, dict[str, Key]]
    prefixes: dict[str, str]
    alone: str
    earlier: dict[str, str]
    open: frozenset[str] = frozenset()
    interpolates: bool = False

    @property
    def understood(self) -> int:
        """How many keys are read, or refused unless they say what is simulated."""
        return sum(bool(key.takes) for keys in self.sections.values() for key in keys.values())

    @property
    def known(self) -> int:
        return sum(len(keys) for keys in self.sections.values())


@functools.cache
def schema_of(name: str) -> Schema:
    """The keys of the format whose reader is ``<name>.py``, with those of the formats that it includes."""
    table = tomllib.loads(files("fsdp_sim.configurations").joinpath(f"{name}.toml").read_text())
    sections: dict[str, dict[str, Key]] = {TOP: {}}
    prefixes: dict[str, str] = {}
    earlier: dict[str, str] = {}
    opened: set[str] = set()
    for included in table.get("include", ()):
        other = schema_of(included)
        sections |= {section: {**sections.get(section, {}), **keys} for section, keys in other.sections.items()}
        prefixes |= other.prefixes
        earlier |= other.earlier
    of_spec = torchtitan_keys() if name == "torchtitan" else {}
    for section, of in (*of_spec.items(), *table.get("keys", {}).items()):
        keys = sections.setdefault(section, {})
        keys |= {key: Key() for key in of.get("beside", ())}
        keys |= {key: Key(**value) for key, value in of.get("read", {}).items()}
        keys |= {key: Key(only=True, **value) for key, value in of.get("only", {}).items()}
        if "prefix" in of:
            prefixes[section] = of["prefix"]
        if of.get("open"):
            opened.add(section)
    return Schema(
        table["name"], table["package"], table["source"], tuple(table.get("signs", ())), table.get("calls", {}),
        sections, prefixes, table.get("alone", ""), earlier | table.get("earlier", {}),
        frozenset(opened), table.get("interpolates", False),
    )  # fmt: skip


class Keys:
    """A configuration whose keys are all known. ``keys["section.key"]`` is its value or, said apart, its default.

    Attributes:
        where, file: the file for messages, and its name alone for remarks.
        defaults: keys that were asked for and not given, with their defaults.
        read: keys that were asked for and given.
        remarks: what a reader has to say besides.
    """

    def __init__(self, schema: Schema, tree: Mapping[str, Any], where: str) -> None:
        self.schema, self.where, self.file = schema, where, PurePath(where).name
        self.defaults: dict[str, Any] = {}
        self.read: list[str] = []
        self.remarks: list[str] = []
        self.given: dict[str, Any] = {}
        self._checked: list[str] = []
        self.add(TOP, tree)

    def add(self, section: str, tree: Mapping[str, Any]) -> None:
        """Take the keys of a section, and of those inside of it.

        Raises:
            ValueError: a key that the format does not have, or a value that it does not take or is not simulated.
        """
        known, prefix = self.schema.sections[section], self.schema.prefixes.get(section, "")
        start = "" if section == TOP else f"{section}."
        for written, value in tree.items():
            name = str(written).removeprefix(prefix)
            dotted = f"{start}{name}"
            if dotted in self.schema.sections and isinstance(value, Mapping):
                self.add(dotted, value)
            elif name in known:
                self._take(dotted, known[name], value)
            elif section in self.schema.open and dotted not in self.schema.sections:
                self._take(dotted, Key(), value)
            elif dotted in self.schema.earlier:
                self._take_earlier(dotted, value)
            elif dotted in self.schema.sections:
                if value is not None:
                    raise self.wrong(dotted, value, "a table")
            else:
                names = [f"{prefix}{key}" for key in known] if name != str(written) else list(known)
                names += [key for key in self.schema.sections if section == TOP and "." not in key and key != TOP]
                owner = f"{section} of {self.schema.package}" if start else self.schema.package
                raise ValueError(
                    f"{self.where}: {owner} has no key {shortened(str(written), MOST_SHOWN)}; "
                    f"{did_you_mean(str(written), names, 'it has')}"
                )

    def _take_earlier(self, dotted: str, value: Any) -> None:
        now = self.schema.earlier[dotted]
        section, _, name = now.rpartition(".")
        self._take(now, self.schema.sections[section or TOP][name], value)
        self.remarks.append(f"{dotted} of {self.file} is an earlier version's; {self.schema.package} calls it {now}.")

    def _take(self, dotted: str, key: Key, value: Any) -> None:
        if dotted in self.given:
            raise ValueError(f"{self.where}: {dotted} is given twice; give it once")
        self.given[dotted] = value
        if value is None or not key.takes:
            return
        if isinstance(value, Unread) and key.takes != "any":
            at = f", line {value.line}" if value.line else ""
            raise ValueError(
                f"{self.where}{at}: {dotted} is {shortened(value.source, MOST_SHOWN)}, which only running the program "
                f"would tell; write its value: {in_words(key.takes)}"
            )
        try:
            self.given[dotted] = converted(key.takes, value)
        except Wrong:
            raise self.wrong(dotted, value, in_words(key.takes), key.why) from None
        if key.only:
            self._checked.append(dotted)

    def wrong(self, dotted: str, value: Any, right: str, why: str = "") -> ValueError:
        """The error of a key with a value that it does not take, or that is not simulated."""
        shown = shortened(repr(value), MOST_SHOWN)
        words = right.replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(value, words) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near and near[0] != value else ""
        return ValueError(f"{self.where}: {dotted} is {shown}; it must be {right}{why and f' ({why})'}{hint}")

    def __contains__(self, dotted: str) -> bool:
        """Whether a key is given."""
        return self.given.get(dotted) is not None

    def __getitem__(self, dotted: str) -> Any:
        section, _, name = dotted.rpartition(".")
        key = self.schema.sections[section or TOP][name]
        if dotted in self:
            if dotted not in self.read:
                self.read.append(dotted)
            return self.given[dotted]
        if key.default is not None:
            self.defaults[dotted] = key.default
            return converted(key.takes, key.default)
        return None

    def below(self, section: str) -> Iterator[str]:
        """The keys of a section that are given."""
        return (key for key in self.given if key.startswith(f"{section}.") and key in self)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Of each default that was filled in."""
        return tuple(
            f"{self.file} says nothing of {key}: {value!r}, the default of {self.schema.package}."
            for key, value in self.defaults.items()
        )

    @property
    def understood(self) -> tuple[str, ...]:
        return tuple(key for key in self.given if key in self.read or key in self._checked)

    @property
    def without_effect(self) -> tuple[str, ...]:
        return tuple(key for key in self.given if key not in self.understood)
