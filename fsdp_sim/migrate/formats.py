"""What a format needs for FSDP2: ``formats.toml`` as a table, and keys put where a text has them."""

from __future__ import annotations

import functools
import re
import tomllib
from importlib.resources import files
from typing import Any

from fsdp_sim.configurations import schema_of
from fsdp_sim.migrate.call_text import CallText
from fsdp_sim.migrate.yaml_text import YamlText

DEFAULTS: dict[str, Any] = {
    "plugin": True, "is": 2, "place": "", "reshard": "",
    "on": {}, "off": {}, "prefix": {}, "also": {}, "moved": {}, "says": {},
    "beside": [], "bare": [], "silent": [], "mesh": [], "when": [],
}  # fmt: skip


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("fsdp_sim.migrate").joinpath("formats.toml").read_text("utf-8"))


@functools.cache
def table_of(format: str) -> dict[str, Any]:
    """A format's table, with what it has of the one that it is like; empty for a format that is not migrated."""
    own = _tables().get(format)
    if own is None:
        return {}
    base = table_of(own["like"]) if "like" in own else DEFAULTS
    return base | own | {"when": [*base["when"], *own.get("when", ())]}


def gone() -> dict[str, str]:
    """Keys of FSDP1 that FSDP2 has not, and why."""
    return _tables()["gone"]


def text_of_configuration(text: str, where: str, format: str) -> YamlText | CallText:
    """A text whose keys can be changed where they stand: YAML, JSON, or a call in a Python file."""
    if where.endswith(".py"):
        schema = schema_of(format)
        return CallText(text, schema.calls.keys() - schema.along)
    return YamlText(text, where)


def calls_a_trainer(text: str) -> bool:
    """Whether a Python text calls what says a configuration that is migrated, such as TrainingArguments."""
    formats = [name for name in _tables() if name != "gone" and "refuse" not in _tables()[name]]
    names = {call for format in formats for call in schema_of(format).calls.keys() - schema_of(format).along}
    return re.search(rf"\b({'|'.join(sorted(names))})\(", text) is not None


class Keys:
    """A text's keys by their dotted names, with whatever prefix the text writes them."""

    def __init__(self, text: YamlText | CallText, format: str) -> None:
        schema = schema_of(format)
        self.text, self._prefixes, self._new = text, schema.prefixes, table_of(format)["prefix"]
        keys, section = set(text.keys(())), schema.alone
        own = {key.removeprefix(schema.prefixes.get(section, "")) for key in keys}
        is_alone = section and not keys <= set(schema.sections["top"]) and own <= set(schema.sections[section])
        self.alone = section if is_alone else ""  # the one section that the file holds

    def written(self, dotted: str) -> tuple[str, ...] | None:
        """A key as the text has it; None where it has not."""
        above, prefix, name = self._place(dotted)
        found = next((key for key in self.text.keys(above) if key.removeprefix(prefix) == name), None)
        return None if found is None else (*above, found)

    def put(self, dotted: str, value: Any, instead: str = "") -> None:
        """Give a key a value, in the place of ``instead`` where the text has that."""
        above, prefix, name = self._place(dotted)
        if self.alone and self.alone != dotted.rpartition(".")[0]:
            return  # of another section than the one that the file holds
        keys, own, other = self.text.keys(above), self.written(dotted), self.written(instead) if instead else None
        if own is not None:
            self.text.set(own, value)
            self.drop(instead)
        elif other is not None:
            self.text.set(other, value, name=f"{prefix if other[-1].startswith(prefix) else ''}{name}")
        elif above and not keys:
            new = self._new.get(".".join(above), "")
            self.text.set(above, {f"{new}{name}": value})
        else:
            has_prefix = any(key.startswith(prefix) for key in keys)
            self.text.set((*above, f"{prefix if has_prefix else ''}{name}"), value)

    def drop(self, dotted: str) -> None:
        """Take out a key, or a section, where the text has it."""
        if path := self.written(dotted):
            self.text.remove(path)

    def bare(self, section: str) -> None:
        """Write the keys of a section without their prefix."""
        above, prefix, _ = self._place(f"{section}.")
        for key in self.text.keys(above):
            if key.startswith(prefix):
                self.text.rename((*above, key), key.removeprefix(prefix))

    def _place(self, dotted: str) -> tuple[tuple[str, ...], str, str]:
        """The section of a key as a path, its prefix, and its name."""
        section, _, name = dotted.rpartition(".")
        above = tuple(section.split(".")) if section and section != self.alone else ()
        return above, self._prefixes.get(section, ""), name
