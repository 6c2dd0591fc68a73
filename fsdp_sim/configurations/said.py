"""What a reader is asked, and what it finds a configuration to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_sim.configurations.keys import Keys
from fsdp_sim.spec import Plan, value_of


@dataclass(frozen=True)
class Asked:
    """What is known beside the file.

    Attributes:
        gpus: how many there are, where somebody says so; it replaces the file's.
        given: fields of the plan that replace the file's.
        folder: of the file, against which a path in it may be meant.
    """

    gpus: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()


@dataclass
class Said:
    """Fields of `Plan`, `Cluster` and `Model`, and the model's name or folder, as a configuration says them.

    Attributes:
        model_file: a file that has the model's dimensions, where the reader itself knows it.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    dims: dict[str, Any] = field(default_factory=dict)
    model_file: str | None = None


def dtype_of(name: str) -> str:
    """fp32, bf16 or fp16, for torch's name of it."""
    found: str = value_of(Plan, "param_dtype", name)
    return found


def cluster_of(asked: Asked, gpus: int | None, nodes: int) -> dict[str, Any]:
    """The cluster's fields of so many GPUs on so many nodes; of another number that is asked for, nodes as large."""
    if gpus is None or gpus < 1:
        return {}
    of_a_node = {"gpus_per_node": gpus // nodes} if nodes > 1 and gpus % nodes == 0 else {}
    if asked.gpus is None:
        return {"gpus": gpus} | of_a_node
    return of_a_node if of_a_node and asked.gpus % of_a_node["gpus_per_node"] == 0 else {}


def need_gpus(keys: Keys, asked: Asked, found: Mapping[str, Any], what: str) -> int:
    """How many GPUs there are.

    Raises:
        ValueError: neither the file nor anybody else says it.
    """
    gpus = asked.gpus or found.get("gpus")
    if gpus is None:
        raise ValueError(f"{keys.where}: {what} follows from the number of GPUs, which it does not say; give it (gpus)")
    return int(gpus)
