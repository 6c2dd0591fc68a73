"""`look`: the idle times of a rank in a step with their culprits, before they are put into words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fsdp_sim.diagnose.bandwidth import Speeds
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.diagnose.waits import Wait, exposed, waits
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Event, Interval, Timeline, median_step, spans_of, spans_of_steps, union


class StepObservation(NamedTuple):
    """What was seen on a rank in a step, before it is put into words.

    Attributes:
        events: its operations in issue order; ``comm``: those that communicate; ``in_flight``: when one does.
        computing: those that occupy the compute lane, in the order in which they start; ``busy``: when one does.
    """

    peers: Peers
    view: RankView
    step: int
    window: Interval
    between_steps_s: float
    events: Sequence[Event]
    comm: Sequence[Event]
    in_flight: Sequence[Interval]
    computing: Sequence[Event]
    busy: Sequence[Interval]
    idle: list[Wait]
    exposed: list[tuple[Event, Wait | None, float]]
    speeds: Speeds


def look(
    timeline: Timeline,
    *,
    step: int | None = None,
    rank: int | None = None,
    bandwidth_gbps: float | None = None,
    cluster: Cluster | None = None,
) -> StepObservation:
    """The idle times of a rank in a step with their culprits; arguments and errors are those of `diagnose`."""
    if not timeline.ops:
        raise ValueError(f"{timeline!r} has no operations; record a training step")
    if bandwidth_gbps is not None and bandwidth_gbps <= 0:
        raise ValueError(f"bandwidth_gbps is {bandwidth_gbps}; give what a link carries, in Gbit/s, such as 400")
    step = median_step(timeline) if step is None else step
    rank = timeline.ranks[0] if rank is None else rank
    if rank not in timeline.ranks:
        raise ValueError(f"there is no rank {rank} in it; there are {_listed(timeline.ranks)}")
    spans = spans_of_steps(timeline)
    if step not in spans:
        raise ValueError(f"there is no step {step} in it; there are {_listed(spans)}")
    before = [end for other, (_, end) in spans.items() if other < step]
    window = spans[step]
    peers = Peers(timeline)
    view = peers.view(rank)
    events, comm, computing = (
        [e for e in some if e.step == step] for some in (view.ops, view.communicating, view.computing)
    )
    speeds = Speeds(comm, bandwidth_gbps, cluster)
    idle = waits(peers, rank, step, window, speeds)
    busy = union(spans_of(computing))
    between_s = max(0.0, window[0] - max(before)) if before else 0.0
    return StepObservation(
        peers,
        view,
        step,
        window,
        between_s,
        events,
        comm,
        union(spans_of(comm)),
        computing,
        busy,
        idle,
        exposed(comm, idle, busy),
        speeds,
    )


def _listed(numbers: Iterable[int]) -> str:
    """Numbers in words: the first few, and how many more."""
    found = sorted(numbers)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return ", ".join(map(str, found[:8])) + more
