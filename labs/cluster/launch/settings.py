"""The settings of a job over several nodes, as data: name, value, what it does, when to use it, who says so."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
from rich.table import Table

FOLDER = Path(__file__).parent


class EnvironmentVariable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One that is set for a job, or may be.

    Attributes:
        what: what it does.
        when: when to set it.
        source: where that is written.
        value: what the launch files set it to; empty if they leave it.
    """

    name: str
    what: str
    when: str
    source: str
    value: str = ""


def read_settings() -> tuple[EnvironmentVariable, ...]:
    """All of settings.toml, in its order."""
    content = tomllib.loads((FOLDER / "settings.toml").read_text())
    return msgspec.convert(content["setting"], tuple[EnvironmentVariable, ...])


def table() -> Table:
    """For a terminal."""
    shown = Table(title="Settings of a job over several nodes", title_justify="left", show_lines=True)
    for column in ("variable", "what", "when"):
        shown.add_column(column, overflow="fold")
    for setting in read_settings():
        shown.add_row(setting.name + f"={setting.value}" * bool(setting.value), setting.what, setting.when)
    return shown
