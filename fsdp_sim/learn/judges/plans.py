"""The judge of a plan: simulated, it must fit, and is compared with the best of a stated space."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_sim import simulate
from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.judges.answers import looks_like, not_yet
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.spec import Cluster, Plan

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
        speeds = self.speeds()
        speed, peak_bytes, limit_bytes = speeds[tuple(answer[name] for name in self.space)]
        cause = looks_like([answer], [()], wrong)
        if peak_bytes > limit_bytes:
            what = f"expected at most {limit_bytes / GIB:.1f} GiB, found a peak of {peak_bytes / GIB:.1f} GiB"
            return not_yet(f"it does not fit: {what}", cause)
        best = max(tokens for tokens, peak, limit in speeds.values() if peak <= limit)
        share = speed / best
        what = (
            f"{peak_bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB, {speed:,.0f} tokens/s per GPU, "
            f"{share:.0%} of the {best:,.0f} of the best of {len(speeds)} plans"
        )
        if share < self.passes:
            return not_yet(f"it fits, but expected {self.passes:.0%}, found {what}", cause)
        grade = Grade.OPTIMAL if share >= OPTIMAL else Grade.GOOD if share >= GOOD else Grade.PASS
        return Finding(grade, f"it fits: {what} (simulated).")

    def speeds(self) -> dict[tuple[Any, ...], tuple[float, float, float]]:
        """For each choice, in the order of the space: tokens per second and GPU, peak bytes, and the limit."""
        return _speeds(self.model, self.cluster, tuple(self.space.items()), tuple(self.fixed.items()))


@functools.cache
def _speeds(
    model: str, cluster: Cluster, space: tuple[tuple[str, tuple[Any, ...]], ...], fixed: tuple[tuple[str, Any], ...]
) -> dict[tuple[Any, ...], tuple[float, float, float]]:
    found = {}
    for values in itertools.product(*(values for _, values in space)):
        chosen = dict(zip((name for name, _ in space), values, strict=True))
        sim = simulate(model, cluster, Plan(**dict(fixed) | chosen))
        found[values] = (sim.tokens_per_s_per_gpu, float(sim.peak_memory_bytes), float(sim.memory_limit_bytes))
    return found
