"""`Training`: what a hunt runs, and `Fault`: what can be wrong in it, as texts that stand in place of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdp_sim.learn.edit import Edit
from fsdp_sim.ranks import Network


@dataclass(frozen=True)
class Fault:
    """What is wrong, in a clause, and the texts of the sound training that it replaces."""

    cause: str
    texts: Mapping[str, str]


class Leaves(Enum):
    """What a run leaves behind, beside what its ranks log."""

    LOGS = "logs alone"
    DUMPS = "the dump of each rank's flight recorder"
    MEMORY = "the bytes alive on each rank"
    TIMELINE = "a timeline"
    LOSSES = "its losses, drawn"
    BESIDE_ONE = "its numbers, drawn beside those of one process"


@dataclass(frozen=True)
class Training:
    """A training that is called with a seed on every rank, and what can be wrong in it.

    Attributes:
        title: the symptom.
        network: over which its collectives go.
        rel, abs_: how far results may be off, see `difference`; more where a gradient is rounded to bfloat16.
    """

    title: str
    sound: Callable[[int], Any]
    faults: tuple[Fault, ...]
    ranks: int = 2
    leaves: Leaves = Leaves.LOGS
    network: Network | None = None
    rel: float = 1e-4
    abs_: float = 1e-5

    def faulty(self, fault: Fault) -> Edit:
        return Edit(fault.texts, of=self.sound, name=fault.cause)
