"""The judge of a plan: simulated, it must fit, and is compared with the best of a stated space."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_sim import simulate
from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.judges.answers import looks_like, not_yet
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.requests import does_not_fit
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.words import human_rate

GOOD, OPTIMAL = 0.95, 0.999  # of the best plan's speed
GIB = 2**30


@dataclass(frozen=True)
class BestPlan:
    """A plan for a model on a cluster, as a dict of the fields of `Plan`, each from a list of values.

    Attributes:
        space: the fields to be chosen and their values.
        fixed: the other fields of the plan.
        passes: what share of the speed of the best plan that fits is enough.
    """

    model: str
    cluster: Cluster
    space: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any]
    passes: float = 0.8

    def trial(self, seed: int) -> Trial:
        return Trial((((),),))

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        answer = ran.answers[0][0]
        if not isinstance(answer, dict) or set(answer) != set(self.space):
            names = ", ".join(self.space)
            return Finding(Grade.NOT_YET, f"a dict with a value for each of {names} is asked for, not {answer!r:.120}.")
        for name, value in answer.items():
            if not any(type(value) is type(allowed) and value == allowed for allowed in self.space[name]):
                allowed = ", ".join(map(str, self.space[name]))
                return Finding(Grade.NOT_YET, f"{name}: expected one of {allowed}, found {value!r:.60}.")
        sim = self._simulated(answer)
        cause = looks_like([answer], [()], wrong)
        if not sim.fits:
            return not_yet(does_not_fit(sim).rstrip("."), cause)
        speed, best = sim.tokens_per_s_per_gpu, self.best
        share = speed / best
        what = (
            f"{sim.peak_memory_bytes / GIB:.1f} of {sim.memory_limit_bytes / GIB:.1f} GiB, {human_rate(speed)} "
            f"tokens/s per GPU, {share:.0%} of the {human_rate(best)} of the best of {len(self._choices())} plans"
        )
        if share < self.passes:
            return not_yet(f"it fits, but is slow: {what}; a pass begins at {self.passes:.0%}", cause)
        grade = Grade.OPTIMAL if share >= OPTIMAL else Grade.GOOD if share >= GOOD else Grade.PASS
        return Finding(grade, f"it fits: {what} (simulated).")

    @cached_property
    def best(self) -> float:
        """Tokens per second and GPU of the fastest plan of the space that fits."""
        sims = sorted(map(self._simulated, self._choices()), key=lambda sim: -sim.tokens_per_s_per_gpu)
        return next(sim for sim in sims if sim.fits).tokens_per_s_per_gpu

    def _choices(self) -> list[dict[str, Any]]:
        return [dict(zip(self.space, values, strict=True)) for values in itertools.product(*self.space.values())]

    def _simulated(self, choice: Mapping[str, Any]) -> Simulation:
        return simulate(self.model, self.cluster, Plan(**{**self.fixed, **choice}))
