"""Will it fit: a model, GPUs and a plan as a form gives them, and what `fsdp-sim simulate` says of them."""

from __future__ import annotations

from typing import Any

from fsdp_sim.explore import advice, answer
from fsdp_sim.requests import (
    Job,
    category_name,
    change_in_words,
    does_not_fit,
    on_the_edge,
    request_of_texts,
    resolve,
    result_of,
    with_config,
)
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.words import human_bytes, human_count, human_ms, human_rate


def fit(argument: dict[str, Any]) -> dict[str, Any]:
    """Whether a plan fits, what is in memory when most is, and how long a step takes.

    Args:
        argument: ``texts``: by name what `request_of_texts` reads, ``config``: the text of a config.json, or empty.

    Raises:
        ValueError: something is missing, unknown or impossible.
    """
    job = _job(argument)
    sim = job.simulate()
    result = result_of(sim, explained=False)
    peak, api = result.peak, sim.plan.api
    gpus = "GPU" if result.gpus == 1 else "GPUs"
    return {
        "fit": result.fit,
        "answer": f"{job.model.name}, {human_count(result.parameters)} parameters, on {result.gpus:,} {gpus} "
        f"({result.gpu}): {result.fit}.",
        "why": f"{_why(sim)}.",
        "moment": f"in {peak.phase}, at {peak.operation}" if peak.operation else "all the time",
        "limit_bytes": result.memory_limit_bytes,
        "limit": human_bytes(result.memory_limit_bytes),
        "peak": human_bytes(result.peak_memory_bytes),
        "memory": [
            {"category": category, "name": category_name(category, api), "bytes": n, "text": human_bytes(n)}
            for category, n in peak.by_category.items()
        ],
        "numbers": [
            ["step time", human_ms(result.step_time_s)],
            ["four times in five", " to ".join(map(human_ms, result.step_time_interval_s))],
            ["throughput", f"{human_rate(result.tokens_per_s_per_gpu)} tokens/s per GPU"],
            ["MFU", f"{result.mfu:.1%}"],
            ["held by the allocator", human_bytes(result.reserved_memory_bytes)],
        ],
        "notes": job.notes_of(sim),
    }


def changes(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """What would make the same plan fit, or faster: sentences, each with the changes that it announces."""
    job = _job(argument)
    told = advice(answer(job, job.simulate()))
    return [{"sentence": sentence, "changes": list(map(change_in_words, some))} for sentence, some in told]


def _job(argument: dict[str, Any]) -> Job:
    request = request_of_texts(argument["texts"])
    return resolve(with_config(request, argument["config"]) if argument["config"].strip() else request)


def _why(sim: Simulation) -> str:
    if sim.fit is Fit.DOES_NOT_FIT:
        return does_not_fit(sim)
    if sim.fit is Fit.EDGE:
        return on_the_edge(sim)
    needs, has = map(human_bytes, (sim.peak_memory_bytes, sim.memory_limit_bytes))
    return f"A rank needs {needs} of the {has} that a process can use"
