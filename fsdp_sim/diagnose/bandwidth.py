"""How fast collectives were, and how fast they could be: bus bandwidth, and a line through times and sizes.

The bus bandwidth (as nccl-tests define it) is what each link carries: it does not depend on the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from fsdp_sim.cost import collective_s
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Event, Op, ring_share

FIXED_SHARE = 0.5  # of a collective's time: if fixed costs are more, the message is too small
MAX_FIXED_S = 1e-3  # what a message beyond a given bandwidth takes longer than this is no latency: the link is slower
MIN_SPREAD = 1.5  # largest over smallest message, below which a line through them says nothing


def bus_bytes(op: Op, n_bytes: int, group_size: int) -> float:
    """What each link carries for a collective.

    Example:
        >>> bus_bytes(Op.ALL_GATHER, 800, 8), bus_bytes(Op.ALL_REDUCE, 800, 8)
        (700.0, 1400.0)
    """
    return ring_share(op, group_size) * n_bytes


def gbps(op: Op, n_bytes: int, group_size: int, seconds: float) -> float:
    """Bus bandwidth in Gbit/s."""
    return bus_bytes(op, n_bytes, group_size) * 8e-9 / seconds if seconds > 0 else 0.0


class BandwidthLine(NamedTuple):
    """A collective takes ``fixed_s`` and its bus bytes over ``bytes_per_s``.

    Attributes:
        known: whether the rate was given and not found in the timeline.
    """

    fixed_s: float
    bytes_per_s: float
    known: bool = False


class Speeds:
    """What the collectives of a timeline say about the network.

    Args:
        events: operations; those that are no collectives are left out.
        bandwidth_gbps: what a link carries, if known.
        cluster: where the timeline was recorded, if known; says more than a bandwidth.
    """

    def __init__(
        self, events: Sequence[Event], bandwidth_gbps: float | None = None, cluster: Cluster | None = None
    ) -> None:
        self.bandwidth_gbps, self.cluster = bandwidth_gbps, cluster
        self._events = events

    @cached_property
    def _fastest(self) -> dict[tuple[Op, int], list[tuple[float, float]]]:
        """Of each size of message the bus bytes and the least seconds, by kind of ring and size of its group."""
        by_group: dict[tuple[Op, int], dict[float, float]] = defaultdict(dict)
        for e in self._events:
            duration_s = e.end_s - e.start_s
            if e.group_size > 1 and duration_s > 0 and (moved := bus_bytes(e.op, e.bytes, e.group_size)) > 0:
                sizes = by_group[_ring(e.op), e.group_size]
                if duration_s < sizes.get(moved, float("inf")):
                    sizes[moved] = duration_s
        return {size: sorted(sizes.items()) for size, sizes in by_group.items()}

    @property
    def given(self) -> bool:
        """Whether a rate was given."""
        return self.cluster is not None or bool(self.bandwidth_gbps)

    def line(self, group_size: int, op: Op = Op.ALL_GATHER) -> BandwidthLine | None:
        """The line of a group of that size: of the cluster, of the bandwidth, or through its smallest and largest
        message. Groups of one size may be of ranks side by side and of ranks on many nodes: which of them it is the
        operation says.

        None where the timeline cannot tell fixed costs from bandwidth.
        """
        points = self._fastest.get((_ring(op), group_size), [])
        if self.cluster is not None:
            return _line_of(self.cluster, group_size)
        if self.bandwidth_gbps:
            rate = self.bandwidth_gbps / 8e-9
            spare_s = min((seconds - moved / rate for moved, seconds in points), default=0.0)
            return BandwidthLine(min(max(0.0, spare_s), MAX_FIXED_S), rate, True)
        if len(points) < 2 or points[-1][0] < MIN_SPREAD * points[0][0]:
            return None
        (small, small_s), (large, large_s) = points[0], points[-1]
        if large_s <= small_s:
            return BandwidthLine(min(small_s, large_s), float("inf"))
        rate = (large - small) / (large_s - small_s)
        return BandwidthLine(max(0.0, small_s - small / rate), rate)

    def too_small(self, e: Event) -> bool | None:
        """Whether fixed costs are most of what a collective took; None where the timeline does not tell."""
        if e.group_size < 2:
            return None
        moved = bus_bytes(e.op, e.bytes, e.group_size)
        line = self.line(e.group_size, e.op)
        if line is None or not e.bytes:
            return None
        return line.fixed_s > FIXED_SHARE * (line.fixed_s + moved / line.bytes_per_s)

    def reached(self, e: Event, seconds: float) -> float | None:
        """Which part of the rate that was given a collective of these seconds reached; None where none was given."""
        line = self.line(e.group_size, e.op)
        if line is None or not line.known or seconds <= 0:
            return None
        return bus_bytes(e.op, e.bytes, e.group_size) / line.bytes_per_s / seconds


def _ring(op: Op) -> Op:
    """The operation that stands for all of one group: shards are gathered and scattered in one, replicas all-reduce in
    another, and tokens travel in a third.
    """
    return op if op in (Op.ALL_REDUCE, Op.ALL_TO_ALL) else Op.ALL_GATHER


def _line_of(cluster: Cluster, group_size: int) -> BandwidthLine:
    """What the cost model says of all-gathers on a cluster."""
    if group_size < 2:
        return BandwidthLine(0.0, float("inf"), True)
    n_bytes = 1 << 30
    once_s, twice_s = (collective_s("all_gather", k * n_bytes, group_size, cluster) for k in (1, 2))
    rate = bus_bytes(Op.ALL_GATHER, n_bytes, group_size) / (twice_s - once_s)
    return BandwidthLine(collective_s("all_gather", 0, group_size, cluster), rate, True)
