"""Traces of several ranks with a known truth: a simulated step, written as NCCL's kernels and the hosts' clocks do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.timeline import COLLECTIVES, Timeline
from tests.timeline.kineto.gpu_trace import kineto_trace


def as_kernels(timeline: Timeline) -> Timeline:
    """The same with collectives that begin on each rank when its own kernel does, and spin until the last has come."""
    peers = Peers(timeline)
    events = []
    for e in timeline.ops:
        if e.op in COLLECTIVES:
            ready_s = max(peers.view(e.rank).ready_s(e), e.issue_s)
            e = msgspec.structs.replace(e, start_s=min(e.start_s, ready_s))
        events.append(e)
    return Timeline(timeline.header, events)


def write_ranks(
    timeline: Timeline, folder: Path, clock_s: Callable[[int], float] = lambda rank: 0.0, **kwargs: object
) -> Path:
    """A trace per rank, each of a machine of its own whose clock shows ``clock_s`` more."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in timeline.ranks:
        trace = kineto_trace(timeline, rank=rank, **kwargs)  # type: ignore[arg-type]
        trace["baseTimeNanoseconds"] += round(clock_s(rank) * 1e9)
        trace["host_name"] = f"node{rank}"
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder
