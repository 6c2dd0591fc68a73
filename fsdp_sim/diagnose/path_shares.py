"""The critical path of a step across its ranks, added up by rank and kind of operation."""

from __future__ import annotations

from collections import Counter

from fsdp_sim.diagnose.findings import PathShare
from fsdp_sim.diagnose.links import Links
from fsdp_sim.diagnose.look import StepObservation

OTHER = "between operations"


def path_shares(found: StepObservation) -> list[PathShare]:
    """What the step's time went to, what costs most first; empty where only one rank is at hand, or it was simulated.

    What lies between two pieces of the path, which no operation accounts for, is the time of the rank that goes on
    after it. All shares add up to the step.
    """
    if not found.peers.several or found.view.simulated:  # of a simulation `explain` knows it exactly
        return []
    links = Links(found.peers.timeline, found.step, found.peers)
    seconds: Counter[tuple[int, str]] = Counter()
    now_s = found.window[0]
    for piece in links.critical_path():
        e = links.ops[piece.key]
        if piece.start_s > now_s:
            seconds[piece.rank, OTHER] += piece.start_s - now_s  # type: ignore[assignment]
        if (own_s := piece.end_s - max(piece.start_s, now_s)) > 0:
            seconds[piece.rank, "CPU" if piece.cpu else str(e.op)] += own_s  # type: ignore[assignment]
        now_s = max(now_s, piece.end_s)
    return [
        PathShare(rank=rank, what=what, seconds=float(some))
        for (rank, what), some in sorted(seconds.items(), key=lambda item: -item[1])
    ]
