"""Learn Fully Sharded Data Parallel: a mini-FSDP to read, a simulator to predict it, figures to see it.

`import fsdp_sim` imports nothing but this file; each name brings its room when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_sim.explore import tune  # type: ignore[no-redef]  # a file there has that name too
    from fsdp_sim.simulation import Simulation, simulate
    from fsdp_sim.spec import Cluster, Model, Plan
    from fsdp_sim.timeline import Timeline

__all__ = ["Cluster", "Model", "Plan", "Simulation", "Timeline", "simulate", "tune"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in ("Cluster", "Model", "Plan"):
        from fsdp_sim import spec

        return getattr(spec, name)
    if name in ("Simulation", "simulate"):
        from fsdp_sim import simulation

        return getattr(simulation, name)
    if name == "tune":
        from fsdp_sim import explore

        return explore.tune
    if name == "Timeline":
        from fsdp_sim.timeline import Timeline

        return Timeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def import_for_ranks() -> None:
    """Import what functions on ranks use most: once, in the server that `fsdp_sim.ranks` forks them from."""
    import fsdp_sim.learn.judges
    import fsdp_sim.measure
    import fsdp_sim.mini  # noqa: F401


def show(what: Any, **options: Any) -> None:
    """`fsdp_sim.viz.show`, for rooms that come before viz: `Simulation.show` (needs plotly)."""
    from fsdp_sim import viz

    viz.show(what, **options)
