"""The toy model that torch was recorded with, and its program: the quickest way to see what a plan makes torch do."""

from __future__ import annotations

from fsdp_sim.schedule.build import build
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.unit import Param, Unit
from fsdp_sim.spec import Plan

MATRIX = (4, 4)


def toy(layers: int, wrap: str | int | tuple[str, ...] = "block") -> list[Unit]:
    """``embed``, layers and ``head``, each one 4 x 4 weight.

    Args:
        layers: how many, at least 0.
        wrap: as `Plan.wrap`. By default each layer is a unit and the root owns ``embed`` and ``head``.

    Raises:
        ValueError: a negative number of layers; ``wrap`` names no module of the toy, or some that are not one after
            the other.

    Example:
        >>> [unit.name for unit in toy(2)], [unit.name for unit in toy(2, wrap="root")]
        (['root', 'layers.0', 'layers.1'], ['root'])
    """
    if type(layers) is not int or layers < 0:
        raise ValueError(f"layers is {layers!r}; it must be a whole number >= 0")
    modules = ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    wrapped = _wrapped(modules, wrap)
    first = modules.index(wrapped[0]) if wrapped else 1
    if modules[first : first + len(wrapped)] != wrapped:
        raise ValueError(f"Plan.wrap is {wrap!r}; the units of the toy must follow one another in {', '.join(modules)}")
    before, after = modules[:first], modules[first + len(wrapped) :]
    params = tuple(Param(name, MATRIX) for name in (*before, *after))
    if wrap == "root":
        return [Unit("root", params, segments=tuple(modules))]
    root = Unit("root", params, segments=(*before, ..., *after))
    return [root, *(Unit(name, (Param("weight", MATRIX),)) for name in wrapped)]


def _wrapped(modules: list[str], wrap: str | int | tuple[str, ...]) -> list[str]:
    """Names of the units but the root, in order."""
    if wrap == "block":
        return modules[1:-1]
    if isinstance(wrap, int):  # the smallest modules of at least so many parameters
        return modules if wrap <= MATRIX[0] * MATRIX[1] else []
    if isinstance(wrap, str):
        return []
    unknown = [name for name in wrap if name not in modules]
    if unknown:
        raise ValueError(f"Plan.wrap names {unknown[0]!r}, which is no module of the toy; it has {', '.join(modules)}")
    return sorted(wrap, key=modules.index)


def toy_program(layers: int, world_size: int, steps: int = 1, plan: Plan | None = None) -> Program:
    """The program of the toy model under a plan.

    Raises:
        ValueError: see `toy` and `build`.

    Example:
        >>> print(toy_program(layers=1, world_size=8).lines()[8])
        op          all_gather      ALL_GATHER(root) n=8
    """
    plan = plan or Plan()
    return build(toy(layers, plan.wrap), plan, world_size, steps)
