"""`result_of`: turns a simulation into a `Result`, which is written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import UNSET, UnsetType

from fsdp_sim.requests.structs import PLAN_FIELDS, Alive, Change, Peak, Result
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.spec import text_of
from fsdp_sim.words import human_bytes, human_ms, human_rate

CATEGORIES = {  # of memory, for those who do not speak torch's
    "sharded": "parameter shards", "optimizer": "optimizer states", "rs_output": "sharded gradients",
    "unsharded": "unsharded parameters", "ag_output": "all-gather buffers", "unsharded_grad": "unsharded gradients",
    "rs_input": "reduce-scatter buffers", "activation": "activations", "checkpoint": "checkpoints",
    "logits": "logits and loss", "temporary": "temporaries",
}  # fmt: skip
WHOLE = {  # where parameters are not sharded: ddp, zero1 and zero2
    "sharded": "parameters", "unsharded": "parameters cast for compute", "unsharded_grad": "gradients",
}  # fmt: skip
LARGEST = 8  # parts of the peak that a result names


def result_of(
    simulation: Simulation,
    *,
    notes: Iterable[str] = (),
    id: str | int | UnsetType = UNSET,
    explained: bool = True,
    changes: Callable[[], list[Change]] | None = None,
    help: Callable[[], list[Change]] | None = None,
) -> Result:
    """Summarise a simulation as a `Result`.

    Args:
        notes: of `Job`.
        id: of the request.
        explained: with the sentences of `Simulation.explain`.
        changes: finds what would make it fit; called only if it does not, or is on the edge.
        help: finds what would make it faster; called only if it runs and is explained.
    """
    sim, memory = simulation, simulation.memory
    moment = memory.peak_instruction
    result = Result(
        id=id, model=sim.workload.name, parameters=sim.workload.param_count, gpu=sim.cluster.gpu.name,
        gpus=sim.cluster.gpus, nodes=sim.cluster.nodes,
        plan={f: getattr(sim.plan, f) for f in PLAN_FIELDS},
        step_time_s=sim.step_time_s, step_time_interval_s=sim.step_time_interval_s,
        tokens_per_step=sim.workload.tokens * sim.plan.grad_accum * sim.cluster.gpus,
        tokens_per_s_per_gpu=sim.tokens_per_s_per_gpu, mfu=sim.mfu, exposed_comm_s=sim.exposed_comm_s,
        between_steps_s=sim.between_steps_s, checkpoint_s=sim.checkpoint_s,
        fits=sim.fits, fit=str(sim.fit), peak_memory_bytes=sim.peak_memory_bytes,
        reserved_memory_bytes=memory.reserved_bytes, memory_limit_bytes=int(sim.memory_limit_bytes),
        host_memory_bytes=sim.host_memory_bytes,
        peak=Peak(
            phase=str(moment.phase) if moment else "", operation=moment.what if moment else "",
            seconds=memory.peak_s,
            by_category={str(category): n_bytes for category, n_bytes in memory.peak_by_category.items()},
            largest=[Alive(str(p.category), p.unit, p.bytes) for p in memory.peak[:LARGEST]],
        ),
        notes=list(notes),
    )  # fmt: skip
    if explained:
        result.explanation = sim.explain().sentences
    if sim.fit is Fit.EDGE:
        result.notes.append(f"{on_the_edge(sim)}.")
    if not sim.fits:
        result.error = does_not_fit(sim)
    if sim.fit is not Fit.FITS and changes is not None:
        result.would_fit = changes()
    if sim.fits and explained and help is not None:
        result.would_help = help()
    return result


def does_not_fit(sim: Simulation) -> str:
    """One sentence about a plan that does not fit."""
    largest = next(iter(sim.memory.peak_by_category.items()))
    needs = f"a rank needs {human_bytes(sim.peak_memory_bytes)}"
    if sim.peak_memory_bytes <= sim.memory_limit_bytes:
        needs += " at a time, for which torch's allocator finds no room between what it holds in pieces,"
    return (
        f"{sim.workload.name} does not fit {sim.cluster.gpus} x {sim.cluster.gpu.name}: {needs} and can use "
        f"{human_bytes(sim.memory_limit_bytes)}; most of it is "
        f"{category_name(largest[0], sim.plan.api)} ({human_bytes(largest[1])})"
    )


def on_the_edge(sim: Simulation) -> str:
    """One sentence about a plan that is on the edge of memory."""
    held, limit = sim.memory.pools, sim.memory_limit_bytes
    often = "once" if held.retries == 1 else f"{held.retries:,} times"
    what = (
        f"asks the GPU for more than it has {often} a step; then it waits for all streams and gives back what it caches"
        if held.retries
        else f"holds {human_bytes(held.reserved_bytes)} of the {human_bytes(limit)} that a process can use, "
        f"{held.reserved_bytes / limit:.0%}"
    )
    return (
        f"It is on the edge of memory: torch's allocator {what}. Published runs that close were slower by up to a "
        f"quarter, and a little more of anything ends in out of memory"
    )


def category_name(category: str, api: str) -> str:
    """A category of memory in words, for a way to train."""
    names = CATEGORIES if api.startswith("fsdp") else CATEGORIES | WHOLE
    return names.get(category, category)


def change_in_words(change: Change) -> str:
    """A change, what it costs, and the fields that make it."""
    fields = " ".join(f"{key}={text_of(value)}" for key, value in change.set.items())
    edge = "" if change.fit == "fits" else f" ({change.fit}, with what the allocator holds)"
    return (
        f"{change.what}: {human_bytes(change.peak_memory_bytes)}{edge}, {human_ms(change.step_time_s)} a step, "
        f"{human_rate(change.tokens_per_s_per_gpu)} tokens/s per GPU  ({fields})"
    )
