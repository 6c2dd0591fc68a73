"""What a timeline does not say, and how to find out; and what else it says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.findings import Diagnosis
from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.timeline import COLLECTIVES, Event, Op
from fsdp_sim.words import human_latency, human_ms, percent

SHOWN = 8  # of ranks that are not at hand


def notes(d: Diagnosis, found: StepObservation) -> list[str]:
    """What the timeline does not say, and how to find out; and what else it says."""
    view, lines = found.view, []
    groups = max([e.group_size for e in found.comm], default=1)
    measured = not view.simulated
    if measured and groups > 1 and not found.peers.several:
        spread = _uneven(found.events)
        hint = f" {spread} lasts unevenly at one size, which a slower rank would explain." if spread else ""
        lines.append(
            f"Only rank {d.rank}'s timeline is at hand, so time spent waiting for a slower rank counts as the "
            f"network's.{hint} Give the traces of the other ranks too."
        )
    if clocks := found.peers.timeline.header.clocks:
        most = max(clocks, key=lambda clock: abs(clock.added_s))
        lines.append(
            f"Clocks of ranks were set by {sum(clock.collectives for clock in clocks):,} ends of collectives that they "
            f"share: by {human_ms(abs(most.added_s))} at most (rank {most.rank}), and half of them agree to "
            f"{human_latency(max(clock.within_s for clock in clocks))}."
        )
    if measured and (missing := _missing(found)):
        lines.append(missing)
    if others := found.peers.timeline.header.left_out:
        lines.append(
            f"One process drives several devices here. Those with the numbers {', '.join(map(str, others[:8]))} are "
            f"left out; all that is said is of one."
        )
    if odd := found.peers.timeline.header.untimed:
        lines.append(
            f"{odd:,} event{'s have' if odd > 1 else ' has'} a time or a duration that is no number, or a negative "
            f"one: left out, or taken to last no time. What is said may be wrong by that: record again."
        )
    if kernels := found.peers.timeline.header.of_graphs:
        lines.append(
            f"{kernels:,} kernels were launched by CUDA graphs, many with one call, so the trace says neither which "
            f"belong to forward or backward, nor when the CPU would have issued each: causes are read off times and "
            f"streams alone, and a step is what profiler.step() marks, or else all of the trace. To know more, record "
            f"a step without graphs."
        )
    if measured and not view.says_issues:
        lines.append("The timeline does not say when the CPU issued, so lateness of the CPU cannot be seen.")
    if measured and not view.says_waits:
        lines.append(
            "The timeline does not say what waited for what; it is inferred from units and from times that touch."
        )
    gathers = [e for e in found.comm if e.op is Op.ALL_GATHER and e.group_size > 1]
    if any(w.culprit is Culprit.NETWORK for w in found.idle) and gathers:
        if found.speeds.line(gathers[0].group_size) is None:
            lines.append(
                "All messages have about one size, so latency cannot be told from bandwidth; say what a link carries "
                "(bandwidth_gbps) to know whether units are too small."
            )
        reached = [found.speeds.reached(e, e.duration_s) for e in gathers if found.speeds.given]
        known = sorted(r for r in reached if r is not None)
        if known and known[len(known) // 2] < 0.5:
            lines.append(
                f"All-gathers reach {known[len(known) // 2]:.0%} of the bandwidth that was given (median): look for a "
                f"slower link, a wrong network interface, or slower ranks."
            )
    if d.copies_s > 0.05 * d.step_s:
        lines.append(
            f"Copies and casts keep the compute lane busy for {human_ms(d.copies_s)} "
            f"({percent(d.copies_s, d.step_s)}): they count as compute here; larger "
            f"micro-batches make them matter less."
        )
    if d.between_steps_s > 0.02 * d.step_s:
        lines.append(
            f"Between the step before and this one {human_ms(d.between_steps_s)} pass in which no rank runs anything: "
            f"data, logging, checkpoints."
        )
    if not any(e.op in (Op.BWD, Op.RECOMPUTE) for e in found.events) and any(e.op is Op.FWD for e in found.events):
        lines.append("The step has no backward; it is diagnosed as far as it goes.")
    return lines


def _missing(found: StepObservation) -> str:
    """Which ranks are not at hand, where some are."""
    ranks, world = found.peers.timeline.ranks, found.peers.timeline.header.world_size
    if not found.peers.several or len(ranks) >= world:
        return ""
    missing = list(islice((rank for rank in range(world) if rank not in ranks), SHOWN))  # a file may say any number
    more = f" and {world - len(ranks) - SHOWN:,} more" if world - len(ranks) > SHOWN else ""
    return (
        f"Of {world:,} ranks {len(ranks)} are at hand; not: {', '.join(map(str, missing))}{more}. A rank that is not "
        f"at hand may be the one that all others wait for."
    )


def _uneven(events: Sequence[Event]) -> str:
    """A collective whose slowest of equal size takes over three times as long as its fastest."""
    by_size: dict[tuple[Op, int, int], list[Event]] = {}
    for e in events:
        if e.op in COLLECTIVES and e.bytes and e.duration_s > 0:
            by_size.setdefault((e.op, e.bytes, e.group_size), []).append(e)
    for (op, *_), some in by_size.items():
        times = sorted(e.duration_s for e in some)
        if len(times) >= 3 and times[-1] > 3 * times[0]:
            return f"{op} ({human_ms(times[0])} to {human_ms(times[-1])})"
    return ""
