"""Who keeps whom waiting: each rank's arrivals at collectives, the one that comes last, why, and what that costs.

A collective is a meeting. Until the last rank has come the others wait; from then on bytes move. The two are told apart
here, so that a slow rank is not taken for a slow network. What the late rank did unlike the others since it was last
in time says why; the step is played again as if it had done as they did, which says what it costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fsdp_sim.diagnose.causes import Key
from fsdp_sim.diagnose.findings import Lateness, RankTimes, Straggler
from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.diagnose.replay import Replay
from fsdp_sim.timeline import Event, Interval, Op, busy_s, computes, subtract, total_s, uncovered, union
from fsdp_sim.words import human_ms, percent

CLEARLY = 0.02  # of a step: what a rank has to cost to be called a straggler
NAMED = 3  # operations that are named as the reason
MOST_RANKS = 128  # of a simulation that are compared: its ranks are thousands, and its plan says how they differ


class Meeting(NamedTuple):
    """A collective, with when each rank came and how long it waited and moved bytes."""

    events: Sequence[Event]
    arrivals: Sequence[float]

    @property
    def last_s(self) -> float:
        return max(self.arrivals)

    @property
    def last(self) -> Event:
        return self.events[self.arrivals.index(self.last_s)]

    def waited_s(self, place: int) -> float:
        """How long one rank waited for the last."""
        return max(0.0, min(self.last_s, self.events[place].end_s) - self.arrivals[place])

    def moved_s(self, place: int) -> float:
        """How long bytes moved, as one rank saw it."""
        return max(0.0, self.events[place].end_s - max(self.last_s, self.arrivals[place]))


def meetings_of(peers: Peers, step: int) -> list[Meeting]:
    """The collectives of a step that several of the ranks at hand shared, in order of time."""
    found = []
    for events in peers.meetings:
        if len(events) > 1 and all(e.step == step for e in events):
            found.append(Meeting(events, [peers.came_s(events, e) for e in events]))
    return sorted(found, key=lambda meeting: meeting.last_s)


def rank_times(found: StepObservation) -> list[RankTimes]:
    """What each rank did in the step; empty where there is one rank, or they share no collective."""
    many = found.view.simulated and len(found.peers.timeline.ranks) > MOST_RANKS
    met = meetings_of(found.peers, found.step) if found.peers.several and not many else []
    if not met:
        return []
    waited: Counter[int] = Counter()
    moved: Counter[int] = Counter()
    last: Counter[int] = Counter()
    made: Counter[int] = Counter()
    for meeting in met:
        if meeting.last_s - min(meeting.arrivals) > found.view.touch_s:
            last[meeting.last.rank] += 1
        for place, e in enumerate(meeting.events):
            waited[e.rank] += meeting.waited_s(place)  # type: ignore[assignment]
            moved[e.rank] += meeting.moved_s(place)  # type: ignore[assignment]
            made[meeting.last.rank] += meeting.waited_s(place)  # type: ignore[assignment]
    rows = []
    for rank in found.peers.timeline.ranks:
        mine = [e for e in found.peers.view(rank).computing if e.step == found.step]
        rows.append(RankTimes(
            rank=rank, compute_s=busy_s(mine), waited_s=float(waited[rank]), moved_s=float(moved[rank]),
            last_times=last[rank], made_wait_s=float(made[rank]),
        ))  # fmt: skip
    return rows


def straggler(found: StepObservation, rows: Sequence[RankTimes]) -> Straggler | None:
    """The rank that costs the step most by being late, if one clearly does.

    Of the ranks that others wait for most, each is played again as if it had been as fast as the others; the one whose
    step would be the shortest is it.
    """
    if len(rows) < 2:
        return None
    step_s = found.window[1] - found.window[0]
    usual = _usual(found)
    replay = Replay(found.peers, found.step)
    as_it_is_s = replay.step_s({}, {})
    best: tuple[float, int, _Excess] | None = None
    for row in sorted(rows, key=lambda row: -row.made_wait_s)[:2]:
        excess = _excess(found, row.rank, usual)
        won_s = as_it_is_s - replay.step_s(excess.shorter_s, excess.earlier_s)
        if not excess.reasons(found, row.rank):  # it was not slower than the others, only elsewhere
            continue
        if best is None or won_s > best[0]:
            best = won_s, row.rank, excess
    if best is None or best[0] < CLEARLY * step_s:
        return None
    cost_s, rank, excess = best
    reasons = excess.reasons(found, rank)
    return Straggler(rank=rank, cost_s=cost_s, reasons=reasons, sentence=_sentence(found, rank, cost_s, reasons))


What = tuple[Op, str, int, int]


def _keyed(found: StepObservation, rank: int) -> dict[What, Event]:
    """The operations of a rank by what they are and how often that had been before; in issue order."""
    seen: Counter[tuple[Op, str, int]] = Counter()
    keyed: dict[What, Event] = {}
    for e in found.peers.view(rank).ops:
        if e.step == found.step:
            what = (e.op, e.unit, e.micro_batch)
            keyed[*what, seen[what]] = e
            seen[what] += 1
    return keyed


class _Usual(NamedTuple):
    """What the ranks did: of each operation its seconds on every rank, and the CPU's pause before it.

    Where the thread that computes also issues, `_Thread` says how long it paused.
    """

    by_rank: dict[int, dict[What, Event]]
    seconds: dict[What, dict[int, float]]
    pauses: dict[What, dict[int, float]]


def _usual(found: StepObservation) -> _Usual:
    by_rank = {rank: _keyed(found, rank) for rank in found.peers.timeline.ranks}
    seconds: dict[What, dict[int, float]] = defaultdict(dict)
    pauses: dict[What, dict[int, float]] = defaultdict(dict)
    begin_s = min(e.issue_s for keyed in by_rank.values() for e in keyed.values())
    for rank, keyed in by_rank.items():
        thread = _Thread(found, rank) if found.view.on_cpu else None
        before_s = begin_s  # a rank that begins its step late has paused
        for what, e in keyed.items():
            seconds[what][rank] = e.duration_s
            until_s = max(before_s, e.issue_s)
            pauses[what][rank] = thread.paused_s(before_s, until_s) if thread else until_s - before_s
            before_s = max(before_s, e.issue_s)
    return _Usual(by_rank, seconds, pauses)


class _Thread:
    """When a thread that computes and issues stood still with nothing of its own to do.

    It did not while it computed; nor, before it issued something, while a collective was in flight that was over then.
    """

    def __init__(self, found: StepObservation, rank: int) -> None:
        view = found.peers.view(rank)
        self.busy = union((e.start_s, e.end_s) for e in view.computing)
        self.flown = sorted((e.end_s, found.peers.came_s([e], e)) for e in view.communicating)

    def paused_s(self, start_s: float, end_s: float) -> float:
        first, last = (bisect_right(self.flown, (at_s, float("inf"))) for at_s in (start_s, end_s))
        flown = [(came_s, over_s) for over_s, came_s in self.flown[first:last]]
        return total_s(subtract([(start_s, end_s)], [*flown, *self.busy]))


def _most(some: Sequence[tuple[Event, float]]) -> list[str]:
    """The operations that took most of it, by name if a few did, else by kind."""
    for name in (lambda e: e.label, lambda e: str(e.op)):
        seconds: Counter[str] = Counter()
        for e, s in some:
            seconds[name(e)] += s  # type: ignore[assignment]
        most = [label for label, s in seconds.most_common(NAMED) if s >= 0.2 * sum(seconds.values())]
        if sum(seconds[label] for label in most) >= 0.5 * sum(seconds.values()):
            return most
    return []


class _Pause(NamedTuple):
    """What passed on a CPU before it issued an operation: how much longer than usual, and in all."""

    e: Event
    more_s: float
    pause_s: float


class _Excess(NamedTuple):
    """What a rank took longer than the others (or, negative, shorter), operation by operation."""

    shorter_s: dict[Key, float]
    earlier_s: dict[Key, float]
    computed: list[tuple[Event, float]]
    paused: list[_Pause]
    kernels: dict[str, float]

    def reasons(self, found: StepObservation, rank: int) -> list[Lateness]:
        """Why it was late, what counts most first."""
        reasons = []
        for what, some in {"compute": self.computed, **self._pauses(found, rank)}.items():
            if (seconds := sum(s for _, s in some)) > 0:
                kernels_s = self._kernels(seconds) if what == "compute" else {}
                reasons.append(Lateness(what=what, seconds=seconds, operations=_most(some), kernels_s=kernels_s))
        total = sum(reason.seconds for reason in reasons)
        return sorted((r for r in reasons if r.seconds >= 0.1 * total), key=lambda r: -r.seconds)

    def _kernels(self, of_s: float) -> dict[str, float]:
        """Which kernels took longer, where the trace has kernels; what is next to nothing is left out."""
        most = sorted(self.kernels.items(), key=lambda item: -item[1])
        return {kind: seconds for kind, seconds in most if seconds >= 0.1 * of_s}

    def _pauses(self, found: StepObservation, rank: int) -> dict[str, list[tuple[Event, float]]]:
        """The pauses of the CPU by what it is known to have done in them; else it launched late."""
        works: dict[str, list[Interval]] = defaultdict(list)
        for work in found.peers.timeline.header.host_work:
            if work.rank == rank:
                works[work.what].append((work.start_s, work.end_s))
        spans = {what: union(some) for what, some in works.items()}
        by_what: dict[str, list[tuple[Event, float]]] = defaultdict(list)
        for e, more_s, pause_s in self.paused:
            left_s = more_s
            for what, some in spans.items():
                inside_s = pause_s - total_s(uncovered(e.issue_s - pause_s, e.issue_s, some))
                if (known_s := min(inside_s, left_s)) > 0:
                    by_what[what].append((e, known_s))
                    left_s -= known_s
            by_what["late launches by the CPU"].append((e, left_s))
        return by_what


def _excess(found: StepObservation, rank: int, usual: _Usual) -> _Excess:
    view = found.peers.view(rank)
    shorter, earlier = {}, {}
    computed, paused = [], []
    kernels = dict.fromkeys(("matmul", "attention", "other"), 0.0)
    busy = union((o.start_s, o.end_s) for o in view.computing)
    ahead_s = 0.0  # by how much earlier this and, unless the thread computes too, everything from here on is issued
    for what, e in usual.by_rank[rank].items():
        others = [s for other, s in usual.seconds[what].items() if other != rank]
        if others and computes(e.op, e.lane):
            more_s = e.duration_s - median(others)
            shorter[rank, e.seq] = more_s
            computed.append((e, more_s))
            others_e = [usual.by_rank[other][what] for other in usual.seconds[what] if other != rank]
            matmul_s = e.matmul_s - median(o.matmul_s for o in others_e)
            attention_s = e.attention_s - median(o.attention_s for o in others_e)
            if e.matmul_s or e.attention_s:
                kernels["matmul"] += matmul_s
                kernels["attention"] += attention_s
                kernels["other"] += more_s - matmul_s - attention_s
        pauses = [s for other, s in usual.pauses[what].items() if other != rank]
        mine_s = usual.pauses[what].get(rank, 0.0)
        if pauses and (view.on_cpu or not _held(busy, e, mine_s, view.launch_s)):
            ahead_s += mine_s - median(pauses)
            paused.append(_Pause(e, mine_s - median(pauses), mine_s))
        earlier[rank, e.seq] = ahead_s
        if view.on_cpu:  # each pause alone: what comes next is issued when this is over
            ahead_s = 0.0
    return _Excess(shorter, earlier, computed, paused, kernels)


def _held(busy: Sequence[Interval], e: Event, pause_s: float, launch_s: float) -> bool:
    """Whether the device computed in nearly all of a long pause of the CPU, which then cost nothing."""
    return pause_s > launch_s and total_s(uncovered(e.issue_s - pause_s, e.issue_s, busy)) < 0.1 * pause_s


def _sentence(found: StepObservation, rank: int, cost_s: float, reasons: Sequence[Lateness]) -> str:
    step_s = found.window[1] - found.window[0]
    why = ""
    if reasons:
        why = ": " + "; ".join(map(_reason, reasons))
    return (
        f"Rank {rank} is the straggler{why}. As fast as the others it would make the step {human_ms(cost_s)} "
        f"({percent(cost_s, step_s)}) shorter."
    )


def _reason(reason: Lateness) -> str:
    most = f", most in {', '.join(reason.operations)}" if reason.operations else ""
    kernels = ", ".join(f"{human_ms(s)} of {kind} kernels" for kind, s in reason.kernels_s.items())
    return f"{human_ms(reason.seconds)} more {reason.what} than the median of the others{most}" + (
        f" ({kernels})" if kernels else ""
    )
