"""Learn Fully Sharded Data Parallel: a mini-FSDP to read, a simulator to predict it, figures to see it.

`import fsdp_sim` imports nothing but this file; each name brings its room when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_sim.simulate import Simulation, simulate
    from fsdp_sim.spec import Cluster, Model, Plan
    from fsdp_sim.timeline import Timeline

_HOMES = {
    "Cluster": "spec", "Model": "spec", "Plan": "spec", "Simulation": "simulate", "Timeline": "timeline"
}  # fmt: skip

__all__ = ["Cluster", "Model", "Plan", "Simulation", "Timeline", "simulate"]
__version__ = "0.1.0"


class _Package(ModuleType):
    """`fsdp_sim.simulate` is the function, even where the module of that name has been imported."""

    @property
    def simulate(self) -> Any:
        return importlib.import_module("fsdp_sim.simulate").simulate

    @simulate.setter
    def simulate(self, module: ModuleType) -> None:
        """The import system puts the module here."""


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fsdp_sim.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
