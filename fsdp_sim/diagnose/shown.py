"""What is shown of a diagnosis, in a terminal or on a page: which culprits, and rows of texts."""

from __future__ import annotations

from typing import Any

import msgspec

from fsdp_sim.diagnose.findings import Blame, CollectiveCost, Diagnosis
from fsdp_sim.words import harmless, human_ms

LITTLE = 1e-3  # of a step: less is not shown; JSON has every culprit


def shown(found: Diagnosis) -> Diagnosis:
    """The same with the names that a stranger's trace gives to units made harmless."""
    return msgspec.convert(_harmless(msgspec.to_builtins(found)), Diagnosis)


def _harmless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _harmless(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_harmless(item) for item in value]
    return harmless(value) if isinstance(value, str) else value


def main_blames(found: Diagnosis) -> list[Blame]:
    """The culprits to show: all but those that cost next to nothing."""
    return [blame for blame in found.culprits if blame.idle_s >= LITTLE * found.step_s]


def totals(found: Diagnosis) -> list[tuple[str, float]]:
    """Where the step's time goes, in words and seconds."""
    return [
        ("step", found.step_s),
        ("computing", found.compute_s),
        ("communicating", found.comm_s),
        ("exposed: communicating, not computing", found.exposed_s),
        ("idle: neither", found.idle_s),
    ]


COLUMNS = ("operation", "phase", "times", "in flight", "exposed", "MiB", "Gbit/s", "why")


def cells(row: CollectiveCost) -> tuple[str, ...]:
    """A collective as texts, one for each of `COLUMNS`."""
    rate = f"{row.bus_gbps:,.0f}" if row.bus_gbps >= 10 else f"{row.bus_gbps:.2g}"
    return (
        f"{row.op}({row.unit})" if row.unit else str(row.op),
        str(row.phase), str(row.times), human_ms(row.total_s), human_ms(row.exposed_s) if row.exposed_s else "",
        f"{row.bytes / 2**20:,.1f}" if row.bytes else "", rate if row.bus_gbps else "",
        str(row.culprit or "hidden"),
    )  # fmt: skip
