"""A format's keys as data (a TOML file beside its reader), and a configuration checked against them.

A key is one of three: it is *read*, with what it takes and its default in that version; or *only* some of its values
are simulated, and another is refused; or it stands *beside* the step and says nothing of it. A key that is none of
these is refused, with the nearest name.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple

from fsdp_sim.configurations.kinds import Wrong, converted, in_words
from fsdp_sim.spec import torchtitan_keys
from fsdp_sim.words import did_you_mean, nearest, shortened

TOP = "top"
MOST_SHOWN = 200  # characters of a value in a message
PLACEHOLDER = re.compile(r"\$\{|\$[A-Za-z_]|\{\{")  # what a shell, a template or a resolver fills in
MOST_NAMES = 20  # keys in a message that has no nearest one
ALIKE = 0.88  # of two keys, from which on one is the other, written wrongly


class Unread(NamedTuple):
    """A value that only running a program would give: of a Python file, with its line, or a resolver's (line 0)."""

    source: str
    line: int


class Call(dict[str, Any]):
    """A call that is the value of an argument: its name under ``call``, and its arguments."""

    unread: Unread  # what it is where no call is taken


class Key(NamedTuple):
    """What is known of a key.

    Attributes:
        takes: kinds and words, with `` | `` between them; empty for a key that stands beside the step.
        default: where it is not given; None has no default to speak of.
        only: it is not read: it must be what ``takes`` lists, and ``why`` says why.
        option: the field of `Plan` that says the same, and may in place of what only running the program would tell.
    """

    takes: str = ""
    default: Any = None
    only: bool = False
    why: str = ""
    option: str = ""


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
        along: calls that say nothing of a step without those beside which they stand.
        shared: a key that shows that a file is read by a script, into classes of its own beside the package's.
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
    along: frozenset[str] = frozenset()
    shared: str = ""

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
        of_calls = {*other.calls.values()} - {TOP, *table.get("calls", {}).values()}  # which this format does not have
        sections |= {
            section: {**sections.get(section, {}), **keys}
            for section, keys in other.sections.items()
            if section not in of_calls
        }
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
        frozenset(opened), table.get("interpolates", False), frozenset(table.get("along", ())),
        table.get("shared", ""),
    )  # fmt: skip


class Keys:
    """A configuration whose keys are all known. ``keys["section.key"]`` is its value or, said apart, its default.

    Attributes:
        where, file: the file for messages, and its name alone for remarks.
        defaults: keys that were asked for and not given, with their defaults.
        read: keys that were asked for and given.
        remarks: what a reader has to say besides.
        sections: those that are given.
        called: in a Python file: the calls that are read.
        halved: the dtype of parameters of 2 bytes, beside an fp32 copy of which a rank has its part; None are none.
        others: keys at the top that the package does not have, of a file that it shares with a script.
    """

    def __init__(
        self, schema: Schema, tree: Mapping[str, Any], where: str, variables: Collection[str] = (),
        options: Collection[str] = (), called: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.schema, self.where, self.file = schema, where, PurePath(where).name
        self.defaults: dict[str, Any] = {}
        self.read: list[str] = []
        self.remarks: list[str] = []
        self.given: dict[str, Any] = {}
        self.sections: set[str] = set()
        self.halved: str | None = None
        self.called = frozenset(called)
        self.others: dict[str, Any] = {}
        self._checked: list[str] = []
        self._variables, self._options = variables, options
        self._is_shared = schema.shared in tree and not where.endswith(".py")
        self.add(TOP, tree)
        if self.others:
            names = shortened(", ".join(self.others), MOST_SHOWN)
            self.remarks.append(
                f"{schema.package} has none of these keys of {self.file}: {names}. They are taken to be its script's "
                f"own, as HfArgumentParser gives them to classes beside the package's, and are not read: what they say "
                f"of the step give as options beside the file."
            )

    def add(self, section: str, tree: Mapping[str, Any]) -> None:
        """Take the keys of a section, and of those inside of it.

        Raises:
            ValueError: a key that the format does not have, or a value that it does not take or is not simulated.
        """
        self.sections.add(section)
        known, prefix = self.schema.sections[section], self.schema.prefixes.get(section, "")
        start = "" if section == TOP else f"{section}."
        for written, value in tree.items():
            name = str(written).removeprefix(prefix)
            dotted = f"{start}{name}"
            if dotted in self.schema.sections and isinstance(value, Mapping):
                self.add(dotted, value)
            elif name in known:
                self._take(dotted, known[name], value)
            elif dotted in self.schema.earlier:
                self._take_earlier(dotted, value)
            elif dotted in self.schema.sections:
                if isinstance(value, Unread):
                    raise self._unread(dotted, value, "a table")
                if value is not None:
                    raise self.wrong(dotted, value, "a table")
            elif section == TOP and self._is_shared and not nearest(name, known, cutoff=ALIKE):
                self.others[name] = value
            elif section in self.schema.open or (section == TOP and name in self._variables):
                self._take(dotted, Key(), value)
            else:
                raise self._unknown(section, str(written), name != str(written))

    def _unknown(self, section: str, written: str, has_prefix: bool) -> ValueError:
        """The error of a key that the format does not have: with the nearest, or all where they are few."""
        known, prefix = self.schema.sections[section], self.schema.prefixes.get(section, "") * has_prefix
        names = [f"{prefix}{key}" for key in known]
        names += [key for key in self.schema.sections if section == TOP and "." not in key and key != TOP]
        owner = self.schema.package if section == TOP else f"{section} of {self.schema.package}"
        hint = did_you_mean(written, names, "it has")
        if len(names) > MOST_NAMES and hint.startswith("it has"):
            hint = "leave it out, or write what the package calls it"
        return ValueError(f"{self.where}: {owner} has no key {shortened(written, MOST_SHOWN)}; {hint}")

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
        if isinstance(value, Unread) and key.option in self._options:
            self.given[dotted] = converted(key.takes, key.default)  # which the option replaces
            return
        if isinstance(value, Unread) and key.takes != "any":
            beside = f", or give --{key.option.replace('_', '-')}" * bool(key.option)
            raise self._unread(dotted, value, in_words(key.takes) + beside)
        try:
            self.given[dotted] = converted(key.takes, value)
        except Wrong:
            if isinstance(value, Call):
                raise self._unread(dotted, value.unread, in_words(key.takes)) from None
            if isinstance(value, str) and PLACEHOLDER.search(value):
                raise self._unread(dotted, Unread(value, 0), in_words(key.takes)) from None
            raise self.wrong(dotted, value, in_words(key.takes), key.why) from None
        if key.only:
            self._checked.append(dotted)

    def _unread(self, dotted: str, value: Unread, right: str) -> ValueError:
        at = f", line {value.line}" if value.line else ""
        return ValueError(
            f"{self.where}{at}: {dotted} is {shortened(value.source, MOST_SHOWN)}, which only running the program "
            f"would tell; write its value: {right}"
        )

    def wrong(self, dotted: str, value: Any, right: str, why: str = "") -> ValueError:
        """The error of a key with a value that it does not take, or that is not simulated."""
        shown = shortened(repr(value), MOST_SHOWN)
        words = right.replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(value, words) if isinstance(value, str) else []
        if why and near and not (value.startswith(near[0]) or near[0].startswith(value)):
            near = []  # its package has the value, which is not simulated: it was meant
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
            f"{self.file} {f'leaves {key} empty' if key in self.given else f'says nothing of {key}'}: {value!r}, the "
            f"default of {self.schema.package}."
            for key, value in self.defaults.items()
        )

    @property
    def understood(self) -> tuple[str, ...]:
        return tuple(key for key in self.given if key in self.read or key in self._checked)

    @property
    def without_effect(self) -> tuple[str, ...]:
        return tuple(key for key in self.given if key not in self.understood)
