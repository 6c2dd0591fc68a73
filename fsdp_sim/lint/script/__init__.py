"""Traps in a Python script, which is read and never run. A detector has the name of its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fsdp_sim.lint.rules import rules
from fsdp_sim.lint.script import calling, gradients, making, on_ranks, saving
from fsdp_sim.lint.script.ask import Found
from fsdp_sim.lint.script.record import Script
from fsdp_sim.lint.script.walk import read_script

DETECTORS: dict[str, Callable[[Script], Iterator[Found]]] = {
    id: found
    for module in (making, calling, on_ranks, gradients, saving)
    for name, found in vars(module).items()
    if (id := name.replace("_", "-")) in rules() and getattr(found, "__module__", "") == module.__name__
}
"""By rule."""


def traps_of(script: Script, ids: Iterable[str]) -> Iterator[tuple[str, Found]]:
    """Each trap of some rules that a script has, once per place."""
    for id in ids:
        seen = set()
        for found in DETECTORS[id](script) if id in DETECTORS else ():
            place = getattr(found.node, "lineno", 1), getattr(found.node, "col_offset", 0)
            if place not in seen:
                seen.add(place)
                yield id, found


__all__ = ["DETECTORS", "Found", "Script", "read_script", "traps_of"]
