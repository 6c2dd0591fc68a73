"""`RankView`: what one rank did, and what each operation came after, read off a timeline alone.

A simulated timeline says all of it. A measured one may not say what waited for what; then it is inferred from what FSDP
always does (compute of a unit waits for the unit's all-gather) and from times that touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf

from fsdp_sim.diagnose.causes import Cause, Why
from fsdp_sim.timeline import (
    COLLECTIVES,
    Event,
    Interval,
    Lane,
    Op,
    Timeline,
    communicates,
    computes,
    spans_of,
    subtract,
    total_s,
    union,
)

REDUCTIONS = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE})
COMPUTATIONS = frozenset({Op.FWD, Op.BWD, Op.RECOMPUTE})
_COMPUTE = Lane.COMPUTE
_FIRST = frozenset({Op.FWD, Op.BWD})  # what a micro-batch begins with
COPIES_IN = frozenset({Op.H2D, Op.AG_CAST, Op.AG_COPY_IN})  # what a unit's all-gather alone comes after
TOUCH_S = 2e-6  # of a measured timeline: two times this close are one; about what passes between two kernels
LAUNCH_S = 50e-6  # of a measured timeline: what passes at most between the end of what was waited for and the start


class RankView:
    """One rank of a timeline.

    Attributes:
        ops: its operations, in issue order.
        touch_s: two times that differ by no more count as one.
    """

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self.header, self.api, self.rank = timeline.header, timeline.api, rank
        self._timeline = timeline
        self.ops = timeline.ops_of(rank)
        self.simulated = timeline.header.clock == "simulated"
        self.touch_s = 0.0 if self.simulated else TOUCH_S
        self.launch_s = 0.0 if self.simulated else LAUNCH_S
        self._by_seq = {e.seq: e for e in self.ops}
        self._before: dict[int, list[tuple[Why, Event]]] = {}
        self._before_on_lane: dict[int, Event] = {}
        last: dict[Lane, Event] = {}
        for e in self.ops:
            if e.lane in last:
                self._before_on_lane[e.seq] = last[e.lane]
            last[e.lane] = e
        self.collectives = [e for e in self.ops if e.op in COLLECTIVES]

    @property
    def events(self) -> Sequence[Event]:
        """Its events, memory included, in issue order."""
        return self._timeline.events_of(self.rank)

    @cached_property
    def issued(self) -> tuple[Sequence[int], Sequence[Op], Sequence[float]]:
        """Numbers, operations and when they were issued of its events, as columns."""
        columns = self._timeline.columns
        some = slice(bisect_left(columns["rank"], self.rank), bisect_right(columns["rank"], self.rank))
        return columns["seq"][some], columns["op"][some], columns["issue_s"][some]

    @cached_property
    def computing(self) -> list[Event]:
        """What occupies its compute lane, in the order in which it starts."""
        return sorted([e for e in self.ops if computes(e.op, e.lane)], key=lambda e: (e.start_s, e.seq))

    @cached_property
    def communicating(self) -> list[Event]:
        """Its communication, in issue order."""
        return [e for e in self.ops if communicates(e.op, e.lane)]

    # -- what kind of run it is

    @cached_property
    def says_waits(self) -> bool:
        """Whether the timeline says what waited for what."""
        return any(e.waits_on for e in self.ops)

    @cached_property
    def says_issues(self) -> bool:
        """Whether the timeline says when the CPU issued; on a CPU computing and issuing are one."""
        return self.simulated or self.on_cpu or any(e.issue_s < e.start_s for e in self.ops)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the thread that computes also issues, as on a CPU: then nothing is ever queued behind compute."""
        if self.header.device:
            return self.header.device == "cpu"
        computing = [e for e in self.ops if computes(e.op, e.lane)]
        if not computing:
            return False
        reached, idle_s = computing[0].end_s, 0.0
        for e in computing[1:]:
            if e.issue_s < min(reached, e.start_s) - self.touch_s:
                return False  # it was queued behind compute
            place = bisect_right(self._collective_ends, (e.issue_s + self.touch_s, float("inf"))) - 1
            held_until = max(reached, self._collective_ends[place][0] if place >= 0 else 0.0)
            idle_s += max(0.0, e.issue_s - held_until)
            reached = max(reached, e.end_s)
        return idle_s <= sum(e.duration_s for e in computing)  # else a device that waits for a slow CPU

    @cached_property
    def synchronous(self) -> bool:
        """Whether the thread that computes stays in each collective until it is over, as torch's FSDP does on gloo:
        then it never computes while one is in flight. The mini-FSDP issues its collectives asynchronously."""
        if self.simulated or not self.on_cpu or self.header.producer == "mini":
            return False
        comm = union(spans_of(self.collectives))
        alone = subtract(comm, spans_of(e for e in self.ops if computes(e.op, e.lane)))
        return bool(comm) and total_s(alone) > 0.99 * total_s(comm)

    @cached_property
    def one_communicator(self) -> bool:
        """Whether all-gathers and reduce-scatters take turns: two of one communicator never run at one time."""
        gathers = sorted((e.start_s, e.end_s) for e in self.collectives if e.op is Op.ALL_GATHER)
        starts = [start for start, _ in gathers]
        for e in self.collectives:
            if e.op is Op.REDUCE_SCATTER and e.duration_s > 0:
                for start, end in gathers[max(0, bisect_left(starts, e.start_s) - 2) :]:
                    if start >= e.end_s:
                        break
                    if min(end, e.end_s) - max(start, e.start_s) > self.touch_s:
                        return False
        return True

    def collectives_in(self, span: Interval) -> list[Event]:
        """Those in flight in a span of time, the first to start first."""
        last = bisect_left(self._starts, span[1])
        first = bisect_left(self._starts, span[0] - self._longest_s)
        return [e for e in self._by_start[first:last] if e.end_s > span[0]]

    @cached_property
    def _by_start(self) -> list[Event]:
        return sorted(self.collectives, key=lambda e: (e.start_s, e.seq))

    @cached_property
    def _starts(self) -> list[float]:
        return [e.start_s for e in self._by_start]

    @cached_property
    def _longest_s(self) -> float:
        return max((e.duration_s for e in self.collectives), default=0.0)

    # -- why operations start

    def before(self, e: Event) -> list[tuple[Why, Event]]:
        """What an operation came after."""
        if e.seq not in self._before:
            self._before[e.seq] = self._came_after(e)
        return self._before[e.seq]

    def _came_after(self, e: Event) -> list[tuple[Why, Event]]:
        found: list[tuple[Why, Event]] = []
        on_lane = self._before_on_lane.get(e.seq)
        if on_lane is not None and on_lane.end_s <= e.start_s + self.touch_s:
            found.append(("lane", on_lane))
        turns: list[tuple[Why, Event]] = []
        for seq in e.waits_on:
            if (op := self._by_seq.get(seq)) is not None:
                both = e.op in COLLECTIVES and op.op in COLLECTIVES
                (turns if both else found).append(("communicator" if both else "event", op))
        if not self.simulated:
            known = {op.seq for _, op in (*found, *turns)}
            found += [("event", op) for op in self._inferred(e) if op.seq not in known]
            if e.op in COLLECTIVES and not turns:
                turns += [("communicator", op) for op in self._turn_before(e)]
        return found + turns

    def cause(self, e: Event) -> Cause:
        """Why an operation started when it did: of several that ended at one moment the first counts."""
        issue_s, start_s, touch_s = e.issue_s, e.start_s, self.touch_s
        latest_s = self.after_s(e)
        if self.says_issues and issue_s > latest_s + touch_s and start_s - issue_s <= self.launch_s:
            return Cause("CPU", None, self.rank)
        if start_s - latest_s <= self.launch_s:
            for why, op in self.before(e):
                if latest_s - touch_s <= op.end_s <= start_s + touch_s:
                    if issue_s == op.end_s and op.lane is _COMPUTE and e.op in COLLECTIVES and not self.on_cpu:
                        return Cause("CPU", None, self.rank)  # it was the CPU that waited
                    return Cause(why, (self.rank, op.seq), self.rank)
        return Cause("unknown", None, self.rank)

    def op(self, cause: Cause) -> Event | None:
        """The operation that was the cause, if one was."""
        return self._by_seq[cause.key[1]] if cause.key else None

    def ready_s(self, e: Event) -> float:
        """When this rank was ready for an operation: what it came after had ended, and the CPU had issued it."""
        return max(self.after_s(e), e.issue_s if self.says_issues else -inf)

    def after_s(self, e: Event) -> float:
        """When the last of what an operation came after had ended."""
        until_s = e.start_s + self.touch_s
        return max([op.end_s for _, op in self.before(e) if op.end_s <= until_s], default=-inf)

    def issued_late_s(self, e: Event, *, but: Lane | None = None) -> float:
        """How much earlier an operation could have started if the CPU had issued it, and its copies, earlier."""
        return max(0.0, e.start_s - self._earliest_s(e, but))

    def _earliest_s(self, e: Event, but: Lane | None) -> float:
        """When an operation could have started, had the CPU issued it and its unit's copies before it at once."""
        ends = [self.ops[0].issue_s]
        until_s = e.start_s + self.touch_s
        for _, op in self.before(e):
            if op.end_s > until_s or op.lane is but:
                continue
            own = op.op in COPIES_IN and op.lane is not _COMPUTE and op.unit == e.unit
            late = own and op.start_s - op.issue_s <= self.launch_s
            ends.append(self._earliest_s(op, but) + op.duration_s if late else op.end_s)
        return max(ends)

    def computed_before(self, e: Event) -> bool:
        """Whether something was computed in its micro-batch before an operation was issued."""
        key = (e.step, e.micro_batch)
        return self._first_computation.get(key, e.seq) < e.seq

    @cached_property
    def _first_computation(self) -> dict[tuple[int, int], int]:
        first: dict[tuple[int, int], int] = {}
        for e in self.ops:
            if e.op in _FIRST:
                first.setdefault((e.step, e.micro_batch), e.seq)
        return first

    # -- what a measured timeline does not say

    def _inferred(self, e: Event) -> Iterator[Event]:
        """What an operation must have waited for, by what FSDP always does."""
        if e.op is Op.ALL_GATHER:
            yield from self._latest(e, Op.AG_COPY_IN, e.unit)
        elif e.op is Op.REDUCE_SCATTER:
            yield from self._latest(e, Op.RS_COPY_IN, e.unit)
        elif e.op is Op.AG_COPY_OUT or e.op in COMPUTATIONS:
            yield from self._latest(e, Op.ALL_GATHER, e.unit)
        elif e.op is Op.RS_COPY_IN:
            yield from self._latest(e, Op.REDUCE_SCATTER)
        elif e.op is Op.OPTIM:
            for kind in (*REDUCTIONS, Op.D2H):
                yield from self._latest(e, kind)
        if computes(e.op, e.lane):  # it was issued, its lane was free, and it started as a collective ended
            place = bisect_right(self._collective_ends, (e.start_s + self.touch_s, float("inf"))) - 1
            if place >= 0:
                op = self._by_seq[int(self._collective_ends[place][1])]
                if e.issue_s < op.end_s - self.touch_s and e.start_s - op.end_s <= self.launch_s and op.seq < e.seq:
                    yield op

    @cached_property
    def _collective_ends(self) -> list[tuple[float, float]]:
        return sorted((e.end_s, e.seq) for e in self.collectives)

    @cached_property
    def _issued(self) -> dict[tuple[Op, str | None], list[int]]:
        """Numbers of the operations of a kind, of a unit and of any unit, in issue order."""
        found: dict[tuple[Op, str | None], list[int]] = defaultdict(list)
        for e in self.ops:
            found[e.op, e.unit].append(e.seq)
            found[e.op, None].append(e.seq)
        return found

    def _latest(self, e: Event, op: Op, unit: str | None = None) -> Iterator[Event]:
        """The last operation of a kind that was issued before this one, if it had ended."""
        seqs = self._issued.get((op, unit), [])
        place = bisect_left(seqs, e.seq) - 1
        if place >= 0:
            found = self._by_seq[seqs[place]]
            if found.end_s <= e.start_s + self.touch_s:
                yield found

    def _turn_before(self, e: Event) -> Iterator[Event]:
        """The collective whose end let this one start, if they take turns on one communicator."""
        if not self.one_communicator:
            return
        place = bisect_right(self._collective_ends, (e.start_s + self.touch_s, float("inf")))
        for _, seq in reversed(self._collective_ends[max(0, place - 3) : place]):
            op = self._by_seq[int(seq)]
            if op.seq < e.seq and op.group_size == e.group_size and e.start_s - op.end_s <= self.launch_s:
                yield op
