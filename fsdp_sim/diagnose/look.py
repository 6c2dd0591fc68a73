"""`look`: the idle times of a rank in a step with their culprits, before they are put into words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_sim.diagnose.bandwidth import Speeds
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.diagnose.waits import Wait, exposed, waits
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Event, Interval, Timeline, computes, median_step, spans_of, union


class StepObservation(NamedTuple):
    """What was seen on a rank in a step, before it is put into words."""

    peers: Peers
    view: RankView
    step: int
    window: Interval
    between_steps_s: float
    events: tuple[Event, ...]
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
    spans: dict[int, Interval] = {}
    for e in timeline.ops:
        start, end = spans.get(e.step, (e.start_s, e.end_s))
        spans[e.step] = (min(start, e.start_s), max(end, e.end_s))
    if step not in spans:
        raise ValueError(f"there is no step {step} in it; there are {_listed(spans)}")
    before = [end for other, (_, end) in spans.items() if other < step]
    window = spans[step]
    peers = Peers(timeline)
    view = peers.view(rank)
    events = tuple(e for e in view.ops if e.step == step)
    speeds = Speeds((e for e in view.ops if e.step == step), bandwidth_gbps, cluster)
    idle = waits(peers, rank, step, window, speeds)
    busy = union(spans_of(e for e in events if computes(e.op, e.lane)))
    between_s = max(0.0, window[0] - max(before)) if before else 0.0
    return StepObservation(peers, view, step, window, between_s, events, idle, exposed(events, idle, busy), speeds)


def _listed(numbers: Iterable[int]) -> str:
    """Numbers in words: the first few, and how many more."""
    found = sorted(numbers)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return ", ".join(map(str, found[:8])) + more
