"""What a trap costs, simulated: a step with it and a step without it, where model, GPUs and plan are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_sim.lint.rules import Rule
from fsdp_sim.requests import Job, request_of_texts, resolve
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.spec import SETTINGS_OF, text_of
from fsdp_sim.words import human_bytes, human_ms

SAME = 0.005  # of a step or of its memory: what nobody would notice


class Costs:
    """Simulates with what is known of a run: ``texts``, as the options of the command line give it."""

    def __init__(self, texts: Mapping[str, str], has_model: bool = False) -> None:
        self.texts, self.has_model = dict(texts), has_model
        self._seen: dict[tuple[str, ...], str] = {}

    def knows(self) -> bool:
        """Whether there is a model and a GPU to simulate."""
        has_model = self.has_model or bool({"model", "model_file", "n_layer"} & set(self.texts))
        return has_model and bool({"gpu", "cluster"} & set(self.texts))

    def job(self, **plan: Any) -> Job:
        """The run, with other fields of its plan.

        Raises:
            ValueError: it is impossible, or something is missing.
        """
        texts = self.texts | {name: text_of(value) for name, value in plan.items()}
        if "api" in plan:  # what the other API alone has
            texts = {k: v for k, v in texts.items() if k in plan or plan["api"] in SETTINGS_OF.get(k, (plan["api"],))}
        return resolve(request_of_texts(texts))

    def sentence(self, rule: Rule) -> str:
        """What the trap costs; empty where that cannot be said."""
        if not rule.trap or not self.knows():
            return ""
        if (rule.id,) not in self._seen:
            self._seen[(rule.id,)] = self.compared(dict(rule.trap), dict(rule.instead))
        return self._seen[(rule.id,)]

    def compared(self, trap: Mapping[str, Any], instead: Mapping[str, Any]) -> str:
        """A step with the one plan beside a step with the other; empty where one of them is impossible."""
        try:
            job = self.job(**trap)
            one, other = job.simulate(), self.job(**instead).simulate()
        except ValueError:
            return ""
        if abs(one.step_time_s - other.step_time_s) < SAME * one.step_time_s and _same_memory(one, other):
            return f"no difference to {job.model.name} on {job.cluster.gpus} {job.cluster.gpu.name} with this plan"
        where = f"{job.model.name} on {job.cluster.gpus} {job.cluster.gpu.name}"
        return f"{where}: {in_words(one)} a step, {in_words(other)} with the fix"


def _same_memory(one: Simulation, other: Simulation) -> bool:
    return abs(one.peak_memory_bytes - other.peak_memory_bytes) < SAME * one.peak_memory_bytes


def in_words(simulation: Simulation) -> str:
    """``412 ms and 61.2 GiB``, with a word where it does not fit."""
    full = " (which does not fit)" if simulation.fit == Fit.DOES_NOT_FIT else ""
    return f"{human_ms(simulation.step_time_s)} and {human_bytes(simulation.peak_memory_bytes)}{full}"
