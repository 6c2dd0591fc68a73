"""`interval_s`: between which two numbers a step time lies, four times in five.

What is not known of a prediction, each as the standard deviation of a logarithm: the errors on published runs that the
numbers were not fitted to (of the same software stack, of others, and on GPUs whose rates in training no run shows);
and, by distance from those runs, the parts of a step that they hardly identify: what it waits, what passes between two
steps, what kernels lose beside their work, how much slower the slowest of many nodes is. How far fits that are as good
as the best differ in these, or errors grow with them, is in ``intervals.toml``; `fsdp-sim validate --refit` writes it.
"""

from __future__ import annotations

import functools
import math
import tomllib
from importlib.resources import files
from typing import NamedTuple

from fsdp_sim.cost.calibration import Calibration
from fsdp_sim.spec import Cluster, Gpu

Z80 = 1.2816  # standard deviations on either side that hold 80% of a normal distribution


class Spread(NamedTuple):
    """What is not known of step times, as standard deviations of their logarithms.

    Attributes:
        residual: by where a run belongs (`belongs_to`).
        waiting: for the share of the step in which compute waits.
        between: for the share between two steps, on stacks that no number was fitted to.
        gaps: for the share that kernels lose beside their work, on the same.
        doubling: for each doubling of the nodes.
    """

    residual: dict[str, float]
    waiting: float
    between: float
    gaps: float
    doubling: float


class Shares(NamedTuple):
    """Parts of a step that published runs hardly identify: in which compute waits, between two steps, and what kernels
    lose beside their work.
    """

    waiting: float = 0.0
    between: float = 0.0
    gaps: float = 0.0


@functools.cache
def fitted_spread() -> Spread:
    """The numbers of ``intervals.toml``."""
    return Spread(**tomllib.loads(files("fsdp_sim.cost").joinpath("intervals.toml").read_text()))


def rates_are_known(gpu: Gpu) -> bool:
    """Whether published runs show what its kernels reach in training, or those of a GPU built alike."""
    return Calibration.knows(gpu.arch) and gpu.sustained_matmul_flops is not None


def belongs_to(stack: str, gpu: Gpu) -> str:
    """Whose errors a prediction shares: ``llm-foundry``, ``other_stacks`` or ``other_gpus``."""
    if not rates_are_known(gpu):
        return "other_gpus"
    return stack if stack in fitted_spread().residual else "other_stacks"


def deviation(spread: Spread, belongs: str, cluster: Cluster, shares: Shares) -> float:
    """The standard deviation of the logarithm of a step time; ``belongs``: see `belongs_to`."""
    parts = [spread.residual[belongs], spread.waiting * shares.waiting, spread.doubling * math.log2(cluster.nodes)]
    if belongs.startswith("other"):
        parts += [spread.between * shares.between, spread.gaps * shares.gaps]
    return math.hypot(*parts)


def interval_s(step_s: float, stack: str, cluster: Cluster, shares: Shares) -> tuple[float, float]:
    """The 80% interval of a step time."""
    belongs = belongs_to(stack, cluster.gpu)
    by = math.exp(Z80 * deviation(fitted_spread(), belongs, cluster, shares))
    return step_s / by, step_s * by
