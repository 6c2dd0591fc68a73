"""Which modules become units, as data: one list of names, so that every api makes the same units.

A unit is what is gathered at once: the parameters of its module but those of units inside. The root takes the rest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_sim.measure.trace_wrap import wrap_names
from fsdp_sim.spec import Plan, text_of, value_of
from labs.model.gpt import did_you_mean


@dataclass(frozen=True)
class Units:
    """The units of a model.

    Attributes:
        names: full names of the modules that become units, the root left out, in the order of ``named_modules``.
        tied: units the policy asked for that stay with the unit around them, because they share a parameter with
            another: a parameter belongs to one unit, or FSDP1 would train copies of it (fully_shard refuses).
    """

    names: tuple[str, ...]
    tied: tuple[str, ...] = ()

    def modules(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.names]

    def __str__(self) -> str:
        text = f"{len(self.names) + 1} units" if self.names else "1 unit"
        if self.tied:
            own = "a unit of its own" if len(self.tied) == 1 else "units of their own"
            text += f" ({' and '.join(self.tied)} not {own}: a weight is tied)"
        return text


def find_units(plain: nn.Module, wrap: str | int | tuple[str, ...]) -> Units:
    """The units that a policy makes of a model; it may be on the meta device.

    Args:
        wrap: ``block`` (the members of ``model.layers``), ``root`` (one unit), a number (the rule of torch's
            ``size_based_auto_wrap_policy``: a module becomes a unit when it has at least so many parameters that are
            in no unit inside it), or names of module classes: as in a `Plan`, or as a text with commas.

    Raises:
        ValueError: a class that the model does not have; the nearest name is suggested.
    """
    if isinstance(wrap, str):
        wrap = value_of(Plan, "wrap", wrap)
    if isinstance(wrap, str):
        asked = wrap_names(plain, wrap)
    elif isinstance(wrap, int):
        asked = wrap_names(plain, functools.partial(size_based_auto_wrap_policy, min_num_params=wrap))
    else:
        asked = wrap_names(plain, _classes(plain, wrap))
    names = _keep_ties_whole(plain, asked)
    return Units(tuple(names), tuple(name for name in asked if name not in names))


def _classes(plain: nn.Module, wrap: tuple[str, ...]) -> list[type[nn.Module]]:
    containers = (nn.ModuleList, nn.ModuleDict)  # they have no forward around which to gather
    known = {type(m).__name__: type(m) for m in plain.modules() if m is not plain and not isinstance(m, containers)}
    for name in wrap:
        if name not in known:
            raise ValueError(
                f"wrap={text_of(wrap)}: {name!r} is not block, root, a number of parameters, or a module class of "
                f"{type(plain).__name__}{did_you_mean(name, known)}"
            )
    return [known[name] for name in wrap]


def _keep_ties_whole(plain: nn.Module, names: list[str]) -> list[str]:
    """The names without those units that would have one of several places of a tied parameter."""
    for places in ties(plain):
        while len(owners := {_owner(place, names) for place in places}) > 1:
            names = [name for name in names if name not in owners or all(_inside(place, name) for place in places)]
    return names


def ties(model: nn.Module) -> list[list[str]]:
    """The parameters that are registered in several places: all names of each."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        places.setdefault(param, []).append(name)
    return [names for names in places.values() if len(names) > 1]


def _owner(param_name: str, names: list[str]) -> str:
    return max((name for name in names if _inside(param_name, name)), key=len, default="")


def _inside(param_name: str, unit: str) -> bool:
    return param_name.startswith(f"{unit}.")
