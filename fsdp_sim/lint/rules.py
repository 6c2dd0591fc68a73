"""The catalogue: what each rule is called, what the trap costs, what to do, where it is from. Data, in rules.toml."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

from fsdp_sim.words import did_you_mean

LEVELS = ("error", "warning", "note")
PLACES = ("script", "config", "module")


class Rule(NamedTuple):
    """A trap of FSDP.

    Attributes:
        id: its name, as ``--rule`` and ``# fsdp-sim: ignore[...]`` have it.
        title: what is found, in a few words.
        where: in which of `PLACES` it is looked for.
        level: one of `LEVELS`: it fails, hangs or trains something else; it costs; it is worth knowing.
        costs: what happens, with its formula where there is one (Ψ parameters, N ranks).
        fix: what to do.
        source: the symbol of torch, the thread or the paper that says so.
        trap, instead: fields of `fsdp_sim.Plan` with the trap and without it, where a plan can say it: what it costs is
            then simulated.
    """

    id: str
    title: str
    where: tuple[str, ...]
    level: str
    costs: str
    fix: str
    source: str
    trap: MappingProxyType[str, Any] = MappingProxyType({})
    instead: MappingProxyType[str, Any] = MappingProxyType({})


@functools.cache
def rules() -> dict[str, Rule]:
    """All rules by their ids, in the order of the catalogue."""
    table = tomllib.loads(files("fsdp_sim.lint").joinpath("rules.toml").read_text("utf-8"))
    found = {}
    for id, of in table.items():
        plans: dict[str, Any] = {key: MappingProxyType(of.pop(key)) for key in ("trap", "instead") if key in of}
        found[id] = Rule(id=id, where=tuple(of.pop("where")), **of, **plans)
    return found


def chosen(only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> dict[str, Rule]:
    """The rules that are looked for.

    Args:
        only: their ids; none stands for all. without: ids of those that are left out.

    Raises:
        ValueError: there is no such rule; names the nearest.
    """
    for id in (*only, *without):
        if id not in rules():
            raise ValueError(f"there is no rule {id!r}; {did_you_mean(id, rules())}")
    return {id: rule for id, rule in rules().items() if (not only or id in only) and id not in without}
