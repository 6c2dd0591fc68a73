"""The simulations behind a scaling curve: the same training on more and more GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from fsdp_sim.cost import Workload
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Model, Plan

Kind = Literal["weak", "strong"]
What = str | Model | Workload
Case = tuple[What, Cluster, Plan]


class Point(NamedTuple):
    """One simulation of a line."""

    gpus: int
    sim: Simulation

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.sim.tokens_per_s_per_gpu

    @property
    def exposed(self) -> float:
        """Part of the step in which communication is exposed."""
        return self.sim.exposed_comm_s / self.sim.step_time_s


@dataclass(frozen=True)
class ScalingLine:
    """One case on several numbers of GPUs.

    Attributes:
        points: at least one, by their number of GPUs.
        impossible: the numbers that the case cannot have, and why.
    """

    points: tuple[Point, ...]
    impossible: dict[int, str]

    @property
    def first(self) -> Point:
        return self.points[0]

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def kept(self) -> float:
        """What the last point has of the first's tokens per second and GPU."""
        return self.last.rate / self.first.rate

    @property
    def drops(self) -> list[tuple[float, Point, Point]]:
        """What is lost from each point to the next, the most first."""
        lost = [(1 - b.rate / a.rate, a, b) for a, b in pairwise(self.points)]
        return sorted(lost, key=lambda one: -one[0])


def cases_of(model: What | Mapping[str, Case], cluster: Cluster | None, plan: Plan | None) -> dict[str, Case]:
    """One case, or several by name.

    Raises:
        ValueError: no cluster was given, no case, or several and something besides.
    """
    if isinstance(model, Mapping):
        if not model or cluster is not None or plan is not None:
            raise ValueError("several lines are a dict of name to (model, cluster, plan), and nothing besides")
        return dict(model)
    if cluster is None:
        raise ValueError("scaling needs a cluster, for example Cluster('H100', gpus=8)")
    name = model if isinstance(model, str) else model.name
    return {f"{name}, {cluster.gpu.name}": (model, cluster, plan or Plan())}


def line_of(name: str, case: Case, counts: Sequence[int], kind: Kind) -> ScalingLine:
    """A case on each number of GPUs.

    Raises:
        ValueError: none of them is possible; says why not.
    """
    model, cluster, plan = case
    sequences = plan.micro_batch * plan.grad_accum * counts[0]  # of a step, where that stays
    points, impossible = [], {}
    for n in counts:
        try:
            of_plan = plan if kind == "weak" else _strong(plan, sequences, n)
            points.append(Point(n, simulate(model, replace(cluster, gpus=n), of_plan)))
        except ValueError as error:
            impossible[n] = str(error)
    if not points:
        raise ValueError(f"{name}: none of the numbers of GPUs {list(counts)} is possible; {impossible[counts[-1]]}")
    return ScalingLine(tuple(points), impossible)


def _strong(plan: Plan, sequences: int, gpus: int) -> Plan:
    """The same sequences of a step on more GPUs."""
    each, rest = divmod(sequences, gpus)
    if rest or not each:
        raise ValueError(f"{sequences:,} sequences of a step cannot be shared by {gpus:,} GPUs")
    micro = next(m for m in range(min(plan.micro_batch, each), 0, -1) if each % m == 0)
    return replace(plan, micro_batch=micro, grad_accum=each // micro)
