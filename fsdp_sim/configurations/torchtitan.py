"""torchtitan's TOML: `fsdp_sim.spec.torchtitan` reads it; here keys of earlier versions get the names they have now."""

from __future__ import annotations

from typing import Any

from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.said import Asked, Said, cluster_of
from fsdp_sim.spec import FLOAT8, gpus_of_job, model_of_flavor, plan_of_job, torchtitan_keys


def read(keys: Keys, asked: Asked) -> Said:
    table: dict[str, Any] = {}
    sections = torchtitan_keys()
    for dotted, value in keys.given.items():
        section, _, name = dotted.rpartition(".")
        of = sections.get(section, {})
        if name in (*of.get("beside", ()), *of.get("read", {}), *of.get("only", {})):
            inside = table
            for part in section.split("."):
                inside = inside.setdefault(part, {})
            inside[name] = value
    if table.get("model", {}).get("converters") == ["float8"]:  # 0.1.0's name of it
        table["model"]["converters"] = [FLOAT8]
        keys.remarks.append(f"float8 in model.converters of {keys.file} is an earlier version's name of {FLOAT8}.")
    for section, of in sections.items():
        for name in of["read"]:
            keys[f"{section}.{name}"]  # its default is said
    plan = plan_of_job(table, keys.where, asked.gpus, asked.given)
    said = Said(plan, cluster_of(asked, gpus_of_job(table, keys.where), 1))
    if "flavor" in table.get("model", {}):
        said.model, said.model_file = model_of_flavor(table, keys.where).name, keys.where
    return said
