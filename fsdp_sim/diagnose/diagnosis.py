"""`diagnose`: why a step's collectives are not overlapped, found in a timeline, whoever made it."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter

import msgspec

from fsdp_sim.diagnose.bandwidth import gbps
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.findings import CollectiveCost, Diagnosis
from fsdp_sim.diagnose.look import StepObservation, look
from fsdp_sim.diagnose.notes import notes
from fsdp_sim.diagnose.path_shares import path_shares
from fsdp_sim.diagnose.sentences import blames, collective_sentence, headline
from fsdp_sim.diagnose.stragglers import meetings_of, rank_times, straggler
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import (
    COLLECTIVES,
    Event,
    Op,
    Phase,
    Timeline,
    busy_s,
    subtract,
    total_s,
    uncovered,
    union,
)

_COMPUTATIONS = frozenset({Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM, Op.OTHER})


def diagnose(
    timeline: Timeline,
    *,
    step: int | None = None,
    rank: int | None = None,
    bandwidth_gbps: float | None = None,
    cluster: Cluster | None = None,
) -> Diagnosis:
    """Say why a step's communication is not overlapped, and what to try.

    Args:
        timeline: predicted, or measured by the mini-FSDP, or read from a trace of torch's profiler.
        step: which step; by default the one of median length, the first left out.
        rank: which rank; by default the first one there is.
        bandwidth_gbps: what a link between the ranks carries, in Gbit/s. With it messages that are too small can be
            told from a network that is too slow also where all messages have one size.
        cluster: in place of ``bandwidth_gbps``, the cluster it was recorded on.

    Raises:
        ValueError: there are no operations, or no such step or rank; a bandwidth of 0 or less.

    Example:
        >>> from fsdp_sim import Cluster, Plan, simulate
        >>> cluster = Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=25)
        >>> found = diagnose(simulate("gpt2-1.5b", cluster, Plan(param_dtype="bf16")).timeline)
        >>> print(found.culprits[0].culprit)
        queued behind a reduction
    """
    return diagnosis_of(look(timeline, step=step, rank=rank, bandwidth_gbps=bandwidth_gbps, cluster=cluster))


def diagnosis_of(found: StepObservation) -> Diagnosis:
    """What was seen, in words."""
    comm, busy = found.in_flight, found.busy
    copying = [e for e in found.computing if e.op not in _COMPUTATIONS]
    step_s = found.window[1] - found.window[0]
    exposed_s = total_s(subtract(comm, busy))
    compute_s = busy_s(found.computing)
    ranks = rank_times(found)
    totals = Diagnosis(
        step=found.step, rank=found.view.rank, ranks=list(found.peers.timeline.ranks), api=found.view.api,
        device="cpu" if found.view.on_cpu else "gpu", step_s=step_s, between_steps_s=found.between_steps_s,
        compute_s=compute_s, copies_s=busy_s(copying), comm_s=total_s(comm), exposed_s=exposed_s,
        idle_s=max(0.0, step_s - total_s(union([*comm, *busy]))) + total_s(busy) - compute_s,
        overlap=1.0 - exposed_s / total_s(comm) if comm else 0.0,
        headline="", culprits=blames(found), notes=[], collectives=_collectives(found), rank_times=ranks,
        straggler=straggler(found, ranks), critical_path=path_shares(found),
    )  # fmt: skip
    return msgspec.structs.replace(totals, headline=headline(totals), notes=notes(totals, found))


def _collectives(found: StepObservation) -> list[CollectiveCost]:
    """By phase, kind and unit, the most exposed first."""
    events: dict[tuple[Phase, Op, str], list[Event]] = defaultdict(list)
    for e in found.comm:
        events[e.phase, e.op, e.unit].append(e)
    blamed: dict[tuple[Phase, Op, str], dict[Culprit, float]] = defaultdict(lambda: defaultdict(float))
    for e, wait, seconds in found.exposed:
        blamed[e.phase, e.op, e.unit][wait.culprit if wait else Culprit.UNKNOWN] += seconds
    alone_s: dict[tuple[Phase, Op, str], float] = defaultdict(float)
    moved_s = {
        e.seq: meeting.moved_s(place)
        for meeting in (meetings_of(found.peers, found.step) if found.peers.several else ())
        for place, e in enumerate(meeting.events)
        if e.rank == found.view.rank
    }
    busy, at = found.busy, 0  # the first time that ends after a collective begins
    for e in sorted(found.comm, key=attrgetter("start_s")):
        while at < len(busy) and busy[at][1] <= e.start_s:
            at += 1
        if alone := uncovered(e.start_s, e.end_s, busy, at):
            alone_s[e.phase, e.op, e.unit] += total_s(alone)
    rows = []
    for key, some in events.items():
        why = blamed[key]
        lasts_s, exposed_s = sum([e.duration_s for e in some]), sum(why.values())
        sized = [e for e in some if e.op in COLLECTIVES and e.bytes and e.group_size > 1]
        seconds = sum([moved_s.get(e.seq, e.duration_s) for e in sized])
        culprit = max(why, key=why.__getitem__) if why else None
        rows.append(CollectiveCost(
            phase=key[0], op=key[1], unit=key[2], times=len(some), bytes=max([e.bytes for e in some]),
            group_size=max([e.group_size for e in some]), total_s=lasts_s, exposed_s=exposed_s,
            bus_gbps=sum([gbps(e.op, e.bytes, e.group_size, 1.0) for e in sized]) / seconds if seconds else 0.0,
            culprit=culprit, sentence=collective_sentence(key, lasts_s, exposed_s, culprit, alone_s[key]),
        ))  # fmt: skip
    return sorted(rows, key=lambda row: -round(row.exposed_s, 12))
