"""`model_of_flavor`: the model that torchtitan's TOML names in its ``[model]`` table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp_sim.spec.catalogue import tables
from fsdp_sim.spec.model import Model
from fsdp_sim.words import did_you_mean

TABLE = "torchtitan.toml"


def is_torchtitan(table: object) -> bool:
    """Whether a TOML is torchtitan's: its model has a flavor."""
    model = table.get("model") if isinstance(table, Mapping) else None
    return isinstance(model, Mapping) and "flavor" in model


def model_of_flavor(table: Mapping[str, Any], where: str) -> Model:
    """The model of ``[model] name = ..., flavor = ...``; the other tables of the file are not read.

    Raises:
        ValueError: a name or flavor that is not known; gives those that are.
    """
    asked, known = table["model"], tables(TABLE)
    name, flavor = str(asked.get("name")), str(asked["flavor"])
    if name not in known:
        raise ValueError(f"{where}: model.name is {name!r}; {did_you_mean(name, known, 'known are')}")
    if flavor not in known[name]:
        raise ValueError(f"{where}: model.flavor is {flavor!r}; {did_you_mean(flavor, known[name], f'{name} has')}")
    changes: dict[str, Any] = {key: None if value is False else value for key, value in known[name][flavor].items()}
    if "window" in changes:
        changes |= {"full_attention_every": None, "chunked_window": False}
    return replace(Model.preset(changes.pop("preset")), name=f"torchtitan {name} {flavor}", **changes)
