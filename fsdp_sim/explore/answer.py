"""The answer to a request: its simulation as a result, with the changes that would make it fit or faster."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from fsdp_sim.explore.changes import WORTH, changes_that_fit, changes_that_help
from fsdp_sim.requests import Change, Job, Result, result_of
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import Model


def answer(job: Job, simulation: Simulation, *, id: str | int | UnsetType = UNSET, explained: bool = True) -> Result:
    """See `result_of`; changes are simulated, which takes many times as long as the job itself."""
    notes = job.notes_of(simulation)
    if not isinstance(job.model, Model):  # what would help can be said of dimensions alone
        return result_of(simulation, notes=notes, id=id, explained=explained)
    model = job.model
    return result_of(
        simulation, notes=notes, id=id, explained=explained,
        changes=lambda: changes_that_fit(model, job.cluster, job.plan, **job.options),
        help=lambda: changes_that_help(model, simulation, **job.options),
    )  # fmt: skip


Advice = tuple[str, Sequence[Change]]
"""A sentence, and the changes that it announces."""


def advice(result: Result) -> list[Advice]:
    """What a person is told of the changes of a result."""
    told: list[Advice] = []
    if isinstance(result.would_help, list) and result.would_help:
        told.append(("What would help (each simulated, the best first):", result.would_help))
    elif isinstance(result.would_help, list) and result.exposed_comm_s >= (WORTH - 1) * result.step_time_s:
        told.append((f"None of the changes that were simulated makes it {WORTH - 1:.0%} faster and finds room.", ()))
    if isinstance(result.would_fit, list):
        told.append(to_fit(result.would_fit))
    return told


def to_fit(changes: Sequence[Change]) -> Advice:
    """What a person is told of the changes that would make a plan fit."""
    if not changes:
        return "No change that was simulated makes it fit, alone, in pairs or in threes.", ()
    return "What would make it fit (each simulated, the fastest first):", changes
