"""What a migration does to a step, simulated: time, memory, bytes on the wire, which collectives and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from fsdp_sim.requests import Job, request_of_texts, resolve
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import SETTINGS_OF, Plan, text_of
from fsdp_sim.timeline import COLLECTIVES, Op, Timeline, compare, ring_share

NAMES = {Op.FWD: "forward", Op.BWD: "backward", Op.OPTIM: "step of the optimizer"}


class Numbers(msgspec.Struct):
    """A step of one rank. Seconds and bytes; ``collectives`` by name.

    Attributes:
        wire_bytes: what a rank sends in a step, with rings.
    """

    api: str
    step_time_s: float
    peak_memory_bytes: int
    wire_bytes: float
    exposed_comm_s: float
    collectives: dict[str, int]


def numbers_of(simulation: Simulation) -> Numbers:
    events = [event for event in simulation.timeline.events if event.op in COLLECTIVES and event.rank == 0]
    return Numbers(
        simulation.plan.api, simulation.step_time_s, simulation.peak_memory_bytes,
        sum(event.bytes * ring_share(event.op.value, event.group_size) for event in events),
        simulation.exposed_comm_s, dict(Counter(event.op.value.lower() for event in events)),
    )  # fmt: skip


def order_of(before: Timeline, after: Timeline) -> str:
    """Where the CPU first issues something else, in a sentence."""
    found = compare(before, after)
    at = found.divergence
    if at is None:
        return "Both issue the same operations in the same order."
    old, new = (
        "has ended" if event is None else f"the {NAMES.get(event.op, event.op.value.lower())} of {event.unit}"
        for event in (at.a, at.b)
    )
    same = f"The first {at.place:,} operations are the same; then" if at.place else "From the first on they differ:"
    return f"What the CPU issues: {same} before it was {old}, now it is {new}."


def both_jobs(texts: Mapping[str, str], old: Mapping[str, Any]) -> tuple[Job, Job]:
    """The job as a script was, and as it is with FSDP2, of what options say and of what the script says.

    Args:
        texts: of the options, which win. old: fields of `Plan` that were read from the script.

    Raises:
        ValueError: see `fsdp_sim.requests.resolve`.
    """
    strategy = str(old.get("sharding_strategy", "FULL_SHARD"))
    shared = {name: value for name, value in old.items() if name not in ("api", "sharding_strategy", "bucket_cap_mb")}
    new = {"api": "fsdp2"} | shared
    if "ZERO2" in strategy or strategy == "SHARD_GRAD_OP" or old.get("api") in ("zero1", "zero2"):
        new["reshard_after_forward"] = False
    before = dict(old)
    if "HYBRID" in strategy:
        cluster = resolve(request_of_texts(_texts(texts, {"api": "fsdp2"}))).cluster
        before["shard_size"] = new["shard_size"] = cluster.node_size
    if old.get("api") != "fsdp1":
        before.pop("sharding_strategy", None)
    before = {
        name: value for name, value in before.items() if old.get("api") in SETTINGS_OF.get(name, (old.get("api"),))
    }
    return resolve(request_of_texts(_texts(texts, before))), resolve(request_of_texts(_texts(texts, new)))


SAID = ("api", "param_dtype")


def _texts(texts: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, str]:
    said = {"param_dtype": None} | dict(fields)  # both compute in the same dtype, which nobody chooses
    own = {name: text_of(value) for name, value in said.items() if value != getattr(Plan, name) or name in SAID}
    return own | {name: text for name, text in texts.items() if name != "api"}


def is_enough(texts: Mapping[str, str]) -> bool:
    """Whether options name a model and a cluster."""
    return has_model(texts) and ("cluster" in texts or {"gpu", "gpus"} <= set(texts))


def has_model(texts: Mapping[str, str]) -> bool:
    """Whether options name a model."""
    return bool({"model", "model_file", "layers", "n_layer"} & set(texts))
