"""`Migration`: what changes, what stays the same, what differs and what to test, for a person and as JSON."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import msgspec

from fsdp_sim.lint import rules
from fsdp_sim.migrate.numbers import Numbers


class LookAt(msgspec.Struct):
    """A place that a person has to look at. ``must``: it does not run, or trains something else, until it is done."""

    line: int
    what: str
    must: bool
    rule: str = ""


class Difference(msgspec.Struct):
    """What differs, and the trap's id in ``fsdp-sim lint`` where it has one."""

    what: str
    rule: str = ""


class Migration(msgspec.Struct, omit_defaults=True, kw_only=True):
    """From what to what.

    Attributes:
        file: what was read. source: ``fsdp1``, ``ddp``, ``deepspeed``, or a configuration's format.
        changed: whether there is anything to do. new_file: the name of the new text where it is another file.
        diff, new: the changes as a unified diff, and the new text.
        look: places for a person, by lines of the old file.
        same, differs, test: sentences.
        before, after: of a simulated step, where the model and the GPUs are known. order: where what is issued parts.
        notes: how it was read, and what is not simulated. defaults: what the file leaves to its package, by key.
    """

    file: str
    source: list[str]
    changed: bool
    new_file: str = ""
    diff: str = ""
    new: str = ""
    look: list[LookAt] = []
    same: list[str] = []
    differs: list[Difference] = []
    test: list[str] = []
    before: Numbers | None = None
    after: Numbers | None = None
    order: str = ""
    notes: list[str] = []
    defaults: list[str] = []

    @property
    def by_hand(self) -> list[LookAt]:
        """What has to be done before the new text can be used."""
        return [one for one in self.look if one.must]


@functools.cache
def _said() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("fsdp_sim.migrate").joinpath("said.toml").read_text("utf-8"))


def told(uses: Iterable[str]) -> tuple[list[str], list[Difference], list[str]]:
    """What stays the same, what differs and what to test, of what was found."""
    same, differs, test = list[str](), list[Difference](), list[str]()
    for use in ("always", *uses):
        of = _said().get(use, {})
        rule = of.get("rule", use if use in rules() else "")
        same += of.get("same", ())
        differs += [Difference(what, rule) for what in of.get("differs", ())]
        test += of.get("test", ())
    return list(dict.fromkeys(same)), differs, list(dict.fromkeys(test))


def diff_of(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff, which ``patch`` and ``git apply`` take."""
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (old, new))  # no other sign ends a line for patch
    lines = difflib.unified_diff(before, after, f"a/{old_name.lstrip('/')}", f"b/{new_name.lstrip('/')}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
