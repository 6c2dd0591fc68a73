"""What settles a statement in a moment: a call that torch refuses, a name it does not have, a program it issues."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

LAYERS, RANKS = 4, 8
ADAM_BYTES = 16  # a parameter in fp32: itself, its gradient, Adam's two moments


def find(where: str) -> Any:
    """An object by its place, ``module:name.name``.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, names = where.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def absent(*places: str) -> bool:
    """Whether none of these is there: ``module`` or ``module:name.name``, in a module or class that is.

    Raises:
        ImportError, AttributeError: what it should be in does not exist either.
    """

    def there(where: str) -> bool:
        at = max(where.rfind("."), where.rfind(":"))
        find(where[:at])
        try:
            find(where)
        except (ImportError, AttributeError):
            return False
        return True

    return not any([there(where) for where in places])


def refused(where: str, error: type[Exception], *args: Any, **kwargs: Any) -> bool:
    """Whether a call raises an error."""
    function: Callable[..., Any] = find(where)
    try:
        function(*args, **kwargs)
    except error:
        return True
    return False


def defaults(where: str, **expected: Any) -> bool:
    """Whether parameters of a function have these defaults."""
    parameters = inspect.signature(find(where)).parameters
    return all(parameters[name].default == value for name, value in expected.items())


def takes(where: str, *names: str) -> bool:
    """Whether a function has all these parameters."""
    return set(names) <= set(inspect.signature(find(where)).parameters)


def issued(phase: str = "", **plan: Any) -> list[str]:
    """What torch issues for the toy model of `LAYERS` layers on `RANKS` ranks: ``OP(unit)``, in order.

    Args:
        phase: ``forward``, ``backward`` or ``optimizer``; all of a step by default.
        plan: fields of `fsdp_sim.spec.Plan`.
    """
    from fsdp_sim.schedule import build, toy
    from fsdp_sim.spec import Plan

    lines: list[str] = []
    now = ""
    for line in build(toy(LAYERS), Plan(**plan), RANKS).lines():
        if line.startswith("---"):
            now = line
        elif line.startswith("op ") and phase in now:
            lines.append(line[28:].split(" n=")[0])
    return lines


def count(op: str, phase: str = "", **plan: Any) -> int:
    """How many operations of a name `issued` lists."""
    return sum(line.startswith(f"{op}(") for line in issued(phase, **plan))


def collectives(phase: str = "", **plan: Any) -> set[str]:
    """The names of the collectives among what `issued` lists."""
    return {
        name for name, called, _ in (line.partition("(") for line in issued(phase, **plan)) if called and name.isupper()
    }


def parameters(model: str) -> int:
    """The parameters of a published model."""
    from fsdp_sim.spec import Model

    return Model.preset(model).param_count
