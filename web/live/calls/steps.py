"""A step in numbers and sentences: what `FormState.simulate` says of a line of words."""

from __future__ import annotations

from typing import Any

from fsdp_sim.forms import FormState


def step(argument: dict[str, Any]) -> dict[str, Any]:
    """The step of a plan.

    Args:
        argument: ``line``: the plan in words, as `FormState` reads them.

    Raises:
        ValueError: the line cannot be read, or the plan is impossible.
    """
    state = FormState.read(argument["line"])
    sim = state.simulate()
    return {
        "line": state.line,
        "step_time_s": sim.step_time_s,
        "exposed_comm_s": sim.exposed_comm_s,
        "peak_memory_bytes": sim.peak_memory_bytes,
        "mfu": sim.mfu,
        "why": str(sim.explain()),
    }
