"""The learner's choice: a model, a cluster and a budget, each in words; and what a step costs of the budget."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

from fsdp_sim import Cluster, Model, Plan, Simulation, simulate
from fsdp_sim.explore import Candidate, Tuned, results, tune
from fsdp_sim.simulation import Fit
from fsdp_sim.viz import Picture, Table, pareto
from fsdp_sim.words import did_you_mean, human_bytes, human_ms

LEVERS = ("reshard_after_forward", "forward_prefetch", "activation_checkpointing", "micro_batch")
"""What is tuned: what the trainer of the labs can do as well, so that the plan that is found can be run here."""
COUNTED = re.compile(r"\s*(\d+)\s*x?\s+([^,]+?)\s*(?:,\s*(.+?)\s*)?")
BUDGET = {"tokens": 0.0, "days": math.inf, "usd": math.inf, "usd_per_gpu_hour": 0.0, "memory_gib": math.inf}
"""The keys of a budget, with what holds where it does not say."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is to be trained, on what, with how much.

    Attributes:
        budget: every key of `BUDGET`.
        plan: where tuning begins.
    """

    model: Model
    cluster: Cluster
    budget: Mapping[str, float]
    plan: Plan

    @property
    def memory_limit_bytes(self) -> float | None:
        """What a rank may need; None: what the GPU has."""
        limit_gib = self.budget["memory_gib"]
        return None if math.isinf(limit_gib) else limit_gib * 2**30

    def simulate(self, plan: Plan | None = None) -> Simulation:
        """A step of the plan, or of another one."""
        return simulate(self.model, self.cluster, plan or self.plan)

    def tune(self) -> Tuned:
        """The fastest plan that fits, by `LEVERS`; the tokens of a step stay."""
        return tune(self.model, self.cluster, self.plan, vary=LEVERS, memory_limit_bytes=self.memory_limit_bytes)

    def fits(self, step: Simulation) -> bool:
        """Into the GPU's memory, and into the budget's."""
        return bool(step.fits) and step.peak_memory_bytes <= (self.memory_limit_bytes or math.inf)


def chosen(model: str, cluster: str, budget: Mapping[str, float], plan: Plan) -> Choice:
    """Read a choice.

    Args:
        model: a name of the catalogue, or the path of a ``config.json``.
        cluster: as in ``8 H100`` or ``64 H100, 400 Gb/s per GPU``, or the path of a cluster's TOML.
        budget: any keys of `BUDGET`.

    Raises:
        ValueError: what is not understood; names it and the remedy. OSError: there is no such file.
    """
    for key, value in budget.items():
        if key not in BUDGET:
            raise ValueError(f"a budget has no {key}; {did_you_mean(key, BUDGET)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"the budget's {key} is {value!r}; give a number, at least 0")
    is_file = model.endswith(".json") or Path(model).is_dir()
    shapes = Model.from_config(model) if is_file else Model.preset(model)
    return Choice(shapes, cluster_of(cluster), BUDGET | dict(budget), plan)


def cluster_of(words: str) -> Cluster:
    """A cluster from words, or from its file.

    Raises:
        ValueError: these are no words for a cluster.
    """
    if words.endswith(".toml"):
        return Cluster.from_file(words)
    found = COUNTED.fullmatch(words)
    if not found:
        raise ValueError(f"the cluster is {words!r}; say how many of which GPU, as in '8 H100' or '64 H100, IB NDR x8'")
    count, gpu, inter = found.groups()
    return Cluster(gpu, gpus=int(count), inter=inter)


def bill(choice: Choice, step: Simulation) -> Table:
    """What the budget's tokens take with this step, and whether it is in the budget."""
    low, high = step.step_time_interval_s
    gpus, budget = choice.cluster.gpus, choice.budget
    days = [
        budget["tokens"] / (step.tokens_per_s_per_gpu * gpus) / 86400 * seconds / step.step_time_s
        for seconds in (step.step_time_s, low, high)
    ]
    usd = [24 * gpus * budget["usd_per_gpu_hour"] * day for day in days]
    limit = step.memory_limit_bytes or math.inf
    memory = min(limit, choice.memory_limit_bytes or math.inf)
    rows = [
        ("step time", human_ms(step.step_time_s), f"{human_ms(low)} to {human_ms(high)}", "", ""),
        ("peak memory", human_bytes(step.peak_memory_bytes), "", human_bytes(memory), _yes(choice.fits(step))),
    ]
    if budget["tokens"]:
        for name, (mid, least, most), key in (("days", days, "days"), ("USD", usd, "usd")):
            there = not math.isinf(budget[key])
            limit_text, answer = (f"{budget[key]:,.4g}", _yes(mid <= budget[key])) if there else ("", "")
            rows.append((name, f"{mid:,.3g}", f"{least:,.3g} to {most:,.3g}", limit_text, answer))
    return Table("your budget", ("what", "simulated", "four times in five", "allowed", "in it?"), tuple(rows))


def front(choice: Choice, found: Tuned) -> Picture:
    """The plans that no other beats in both time and memory, the start among them."""

    def row(name: str, one: Candidate) -> dict[str, str]:
        fit = Fit.FITS if one.fits else Fit.DOES_NOT_FIT
        return {"model": choice.model.name, "plan": name} | results(
            one.step_time_s, one.tokens_per_s_per_gpu, None, 0.0, one.peak_memory_bytes, found.memory_limit_bytes, fit
        )

    plans = {"your start": found.start} | {changes(found.start.plan, one.plan): one for one in found.front}
    return pareto([row(name, one) for name, one in plans.items()], varied=["plan"], limit="at most")


def changes(before: Plan, after: Plan) -> str:
    """What differs between two plans, in words."""
    fields = (f.name for f in dataclasses.fields(Plan))
    differ = {name: getattr(after, name) for name in fields if getattr(before, name) != getattr(after, name)}
    return ", ".join(f"{name}={value}" for name, value in differ.items()) or "your start"


def worth(found: Tuned) -> Table:
    """What each change of the best plan is worth: the same plan without it."""
    rows = []
    for one in found.worth if found.best else ():
        change = ", ".join(f"{key}: {one.before[key]} → {value}" for key, value in one.after.items())
        fits = "fits" if one.without.fits else "does not fit"
        rows.append((change, human_ms(one.without.step_time_s), human_bytes(one.without.peak_memory_bytes), fits))
    best = found.best or found.nearest
    if best:
        rows.append(("with all of them", human_ms(best.step_time_s), human_bytes(best.peak_memory_bytes),
                     "fits" if best.fits else "does not fit"))  # fmt: skip
    return Table("each change taken back", ("without", "step", "peak", ""), tuple(rows))


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
