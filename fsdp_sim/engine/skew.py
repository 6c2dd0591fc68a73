"""Ranks are not alike: durations per rank, made of durations that are the same on all.

    seconds = jitter(costs, ranks=1024, sigma=0.05)
    seconds = straggler(seconds, ranks=1024, rank=17, factor=1.2)
    run(program, slow_node(seconds, ranks=1024, node=3, factor=2.0))

Each takes durations as `run` does, and returns a function of the instruction, so they can be put on top of each other.
Nodes are blocks of consecutive ranks, as torchrun numbers them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Literal

from fsdp_sim.engine.seconds import Given, Seconds, Times
from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import COLLECTIVES

Of = Literal["compute", "network", "all"]
"""What is skewed: ``compute`` is all that is not a collective, ``network`` the collectives."""


class PerRank:
    """Durations of shape (ranks,): a function of the instruction.

    Attributes:
        per_occurrence: whether the same operation may take another time when it is issued again.
    """

    def __init__(self, given: Given, of: Of, factor: Callable[[Instruction], Times], per_occurrence: bool) -> None:
        if of not in ("compute", "network", "all"):
            raise ValueError(f"of is {of!r}; it must be 'compute', 'network' or 'all'")
        self.given, self.of, self.factor = given, of, factor
        self.per_occurrence = per_occurrence or getattr(given, "per_occurrence", False)

    def __call__(self, i: Instruction) -> Seconds:
        given = self.given
        seconds = given(i) if callable(given) else given[i.op, i.unit]
        if self.of != "all" and (i.op in COLLECTIVES) != (self.of == "network"):
            return seconds  # type: ignore[return-value]
        return self.factor(i) * seconds  # type: ignore[operator, return-value]


def jitter(given: Given, ranks: int, *, sigma: float, seed: int = 0, of: Of = "compute") -> PerRank:
    """Every operation takes a little more or less on each rank, each time: a log-normal factor of mean 1.

    The factors follow from the seed and from what the operation is, so that two plans for one model are compared under
    the same luck.

    Args:
        sigma: standard deviation of the logarithm; 0.05 is about 5%.

    Raises:
        ValueError: ``sigma`` is negative or ``ranks`` is below 1.
    """
    _check(ranks)
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma!r}; it must be a number >= 0")

    import numpy as np

    def factor(i: Instruction) -> Times:
        name = f"{i.step}.{i.micro_batch}.{i.phase}.{i.op}.{i.unit}"
        random = np.random.Generator(np.random.SFC64((seed, zlib.crc32(name.encode()))))
        drawn = random.standard_normal(ranks)
        drawn *= sigma  # in place: for thousands of ranks memory costs as much as numbers
        drawn -= sigma * sigma / 2
        return np.exp(drawn, out=drawn)

    return PerRank(given, of, factor, per_occurrence=True)


def straggler(given: Given, ranks: int, *, rank: int, factor: float, of: Of = "compute") -> PerRank:
    """One rank takes ``factor`` times as long.

    Raises:
        ValueError: there is no such rank, or ``factor`` is not above 0.
    """
    _check(ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}; with {ranks} ranks it must be 0 to {ranks - 1}")
    return _constant(given, ranks, slice(rank, rank + 1), factor, of)


def slow_node(
    given: Given, ranks: int, *, node: int, factor: float, gpus_per_node: int = 8, of: Of = "network"
) -> PerRank:
    """The ranks of one node take ``factor`` times as long; by default its collectives, as over a bad link. A collective
    is as slow as its slowest rank, so that slows all groups with a rank on that node.

    Raises:
        ValueError: there is no such node, or ``factor`` is not above 0.
    """
    _check(ranks)
    nodes = -(-ranks // gpus_per_node)
    if not 0 <= node < nodes:
        raise ValueError(f"node is {node}; {ranks} ranks on nodes of {gpus_per_node} make nodes 0 to {nodes - 1}")
    return _constant(given, ranks, slice(node * gpus_per_node, (node + 1) * gpus_per_node), factor, of)


def _constant(given: Given, ranks: int, where: slice, factor: float, of: Of) -> PerRank:
    if not 0 < factor < math.inf:
        raise ValueError(f"factor is {factor!r}; it must be a number > 0 (1 changes nothing)")
    import numpy as np

    factors = np.ones(ranks)
    factors[where] = factor
    return PerRank(given, of, lambda i: factors, per_occurrence=False)


def _check(ranks: int) -> None:
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; it must be a whole number >= 1")
