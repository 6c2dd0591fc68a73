"""What a check of ``fsdp-sim doctor`` finds, and torch where it may be absent."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["works", "absent", "broken"]


@dataclass(frozen=True)
class DoctorFinding:
    """What a check found.

    Attributes:
        part: what was checked.
        state: ``works``; ``absent``, which only its own part of the project needs; ``broken``, which should work.
        found: in a few words.
        needed_for: what cannot be had without it.
        remedy: what to do; empty where there is nothing to do.
    """

    part: str
    state: State
    found: str
    needed_for: str
    remedy: str = ""


def torch_here() -> Any:
    """torch, if it is there: doctor has to run where it is not."""
    return importlib.import_module("torch")
