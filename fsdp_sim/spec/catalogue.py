"""A TOML catalogue: named tables and their aliases. An unknown name is answered with the nearest ones."""

from __future__ import annotations

import functools
import json
import tomllib
from importlib.resources import files
from typing import Any

from fsdp_sim.words import in_brief, meant

TOML_BYTES, TOML_DOTS = 10**5, 1_000
"""The most that is read: the time that tomllib takes grows with the square of tables, and of the parts of a key."""


def toml_or_json(text: str, kind: str = "TOML") -> Any:
    """What a text in TOML or JSON says.

    Raises:
        ValueError: it is none, or nests too deep to be read.
    """
    if kind == "TOML" and (len(text) > TOML_BYTES or max(line.count(".") for line in text.split("\n")) > TOML_DOTS):
        raise ValueError(f"it has more than {TOML_BYTES / 1e3:g} kB, or a line with more than {TOML_DOTS:,} dots")
    try:
        return tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


@functools.cache
def tables(file: str) -> dict[str, dict[str, Any]]:
    """The tables of a catalogue of this room, by name."""
    return tomllib.loads(files("fsdp_sim.spec").joinpath(file).read_text())


@functools.cache
def _names(file: str) -> dict[str, str]:
    """Every name and alias, in lower case, and the table it stands for."""
    found: dict[str, str] = {}
    for name, table in tables(file).items():
        for known in (name, *table.get("aliases", ())):
            if found.setdefault(known.lower(), name) != name:
                raise ValueError(f"{file}: {known} stands for both {found[known.lower()]} and {name}")
    return found


def find(file: str, what: str, name: str) -> str:
    """The name of the table that ``name``, or an alias of any case, stands for.

    Raises:
        ValueError: there is none; gives the nearest names.
    """
    names = _names(file)
    if name.lower() in names:
        return names[name.lower()]
    near = list(dict.fromkeys(names[one] for one in meant(name, names, cutoff=0.5)))
    begins = "the nearest names are" if near else "there are"
    raise ValueError(f"no {what} is called {in_brief(name)}; {begins} {', '.join(near or sorted(tables(file)))}")
