"""`StepView`: one step of one timeline as some ranks saw it, and the numbers of it that figures and words share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from fsdp_sim.diagnose import Links
from fsdp_sim.timeline import (
    MEMORY,
    Event,
    Interval,
    Lane,
    Memory,
    Op,
    Phase,
    Timeline,
    communicates,
    computes,
    median_step,
    subtract,
    total_s,
    union,
)

if TYPE_CHECKING:
    import numpy as np  # which only figures that stand still need

Timelines = Timeline | Mapping[str, Timeline] | Sequence[Timeline]
MAX_RANKS = 4  # drawn when nobody says which: two timelines of four ranks with three lanes each still read well
MAX_BARS = 2_000  # more than this few pixels cannot show, and plotly draws slowly


class PhaseSpan(NamedTuple):
    """The part of a step from the first computation of a phase to that of the next; in seconds since the step began."""

    phase: Phase
    micro_batch: int
    start_s: float
    end_s: float


class LaneGroup(NamedTuple):
    """Rows that belong together, the lanes of a rank or of what stands for several; the label is of the first row."""

    rank: int
    label: str
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class LiveMemory:
    """What is alive on a rank during a step: when the step begins, after each change, and at its end.

    Attributes:
        times_s: since the step began, of shape (n,).
        changes: in bytes, of shape (n - 2,): entry k leads to moment k + 1.
        categories: of the changes.
        before: bytes of each category when the step begins.
    """

    times_s: list[float]
    changes: list[int]
    categories: list[Memory]
    before: dict[Memory, int]

    def __bool__(self) -> bool:
        return bool(self.present)

    @cached_property
    def present(self) -> tuple[Memory, ...]:
        """The categories of which anything is alive in the step."""
        changed = {id(c) for c, n_bytes in zip(self.categories, self.changes, strict=True) if n_bytes}
        return tuple(c for c in Memory if id(c) in changed or self.before.get(c))

    @cached_property
    def total(self) -> list[int]:
        """Bytes of all categories at each moment."""
        if not self.times_s:
            return []
        total = list(accumulate(self.changes, initial=sum(self.before.values())))
        return [*total, total[-1]]

    def at(self, moments: Sequence[int]) -> dict[Memory, list[int]]:
        """Bytes of each category at some moments, given by their numbers in order."""
        codes = {id(c): code for code, c in enumerate(Memory)}  # by identity: a member of an enum hashes slowly
        alive = [self.before.get(c, 0) for c in Memory]
        rows, done = [], 0
        of = [codes[id(c)] for c in self.categories]
        for moment in moments:
            for k in range(done, min(moment, len(of))):
                alive[of[k]] += self.changes[k]
            done = moment
            rows.append(alive.copy())
        columns = dict(zip(Memory, zip(*rows, strict=True), strict=True)) if rows else {}
        return {c: list(columns.get(c, ())) for c in self.present}


@dataclass(frozen=True)
class StepView:
    """One step of one timeline, as some ranks saw it, with time counted from the start of the step."""

    name: str
    timeline: Timeline
    step: int
    ranks: tuple[int, ...]

    @cached_property
    def _rows(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Of each rank the rows of the timeline's columns that are operations of the step, and those that are changes
        of memory in any step."""
        ops: dict[int, list[int]] = defaultdict(list)
        changes: dict[int, list[int]] = defaultdict(list)
        for row, (rank, step, op) in enumerate(self.timeline.columns.rows("rank", "step", "op")):
            if op in MEMORY:
                changes[rank].append(row)
            elif step == self.step:
                ops[rank].append(row)
        return ops, changes

    def rows_of(self, rank: int) -> list[int]:
        """The rows of the timeline's columns that are a rank's operations of the step, in issue order."""
        return self._rows[0].get(rank, [])

    @cached_property
    def rows(self) -> list[int]:
        """The rows of the operations that are drawn: those of the chosen ranks."""
        return [row for rank in self.ranks for row in self.rows_of(rank)]

    def _events(self, rows: Iterable[int]) -> tuple[Event, ...]:
        return tuple(self.timeline.events[row] for row in rows)

    def groups(self) -> list[LaneGroup]:
        """The rows to draw: of each chosen rank a row per lane that occurs; compute always."""
        found = []
        for rank in self.ranks:
            lanes = self.timeline.columns["lane"]
            used = {lanes[row] for row in self.rows_of(rank)} | {Lane.COMPUTE}
            found.append(LaneGroup(rank, f"<b>rank {rank}</b> · compute", tuple(lane for lane in Lane if lane in used)))
        return found

    @cached_property
    def _communication(self) -> dict[int, tuple[Event, ...]]:
        return {rank: self._events(self._rows_that(rank, communicates)) for rank in self.timeline.ranks}

    def communication(self, rank: int) -> tuple[Event, ...]:
        """What a rank communicates in the step, in issue order."""
        return self._communication[rank]

    def _rows_that(self, rank: int, kind: Callable[[Op, Lane], bool]) -> list[int]:
        ops, lanes = self.timeline.columns["op"], self.timeline.columns["lane"]
        known: dict[tuple[int, int], bool] = {}  # by identity: a member of an enum hashes slowly
        found = []
        for row in self.rows_of(rank):
            op, lane = ops[row], lanes[row]
            of_kind = known.get((id(op), id(lane)))
            if of_kind is None:
                of_kind = known[id(op), id(lane)] = kind(op, lane)
            if of_kind:
                found.append(row)
        return found

    @cached_property
    def links(self) -> Links:
        """What waited for what in the step, on all ranks."""
        return Links(self.timeline, self.step)

    @cached_property
    def origin_s(self) -> float:
        """When the first rank starts the first operation of the step (as `step_time_s` counts it)."""
        starts = self.timeline.columns["start_s"]
        return float(min(starts[row] for rows in self._rows[0].values() for row in rows))

    @cached_property
    def step_s(self) -> float:
        ends = self.timeline.columns["end_s"]
        return float(max(ends[row] for rows in self._rows[0].values() for row in rows)) - self.origin_s

    def since_ms(self, time_s: float) -> float:
        """A moment of the timeline in milliseconds since the step began."""
        return (time_s - self.origin_s) * 1e3

    @cached_property
    def communicates(self) -> bool:
        """Whether anything is communicated in the step, on any rank."""
        return any(self._communication.values())

    def _spans(self, rank: int, kind: Callable[[Op, Lane], bool]) -> list[Interval]:
        starts, ends = self.timeline.columns["start_s"], self.timeline.columns["end_s"]
        return [(starts[row], ends[row]) for row in self._rows_that(rank, kind)]

    def busy_s(self, rank: int, kind: Callable[[Op, Lane], bool]) -> float:
        """Seconds in which at least one operation of a kind (`communicates`, `computes`) ran on a rank, as
        `fsdp_sim.timeline.busy_s` counts them."""
        unlaunched_s = self.timeline.columns["unlaunched_s"]
        pauses_s = sum([unlaunched_s[row] for row in self._rows_that(rank, kind)])
        return total_s(union(self._spans(rank, kind))) - pauses_s

    def exposed(self, rank: int) -> list[Interval]:
        """When a rank communicated and did not compute, in seconds of the timeline's own clock."""
        return subtract(self._spans(rank, communicates), self._spans(rank, computes))

    def overlap(self, rank: int) -> float:
        """Time computing while communicating over time communicating."""
        comm_s = self.busy_s(rank, communicates)
        return 1.0 - total_s(self.exposed(rank)) / comm_s if comm_s else 0.0

    @cached_property
    def mean_exposed_s(self) -> float:
        """Exposed communication of the step, the mean over all ranks (as the step time is that of all ranks)."""
        return fmean([total_s(self.exposed(rank)) for rank in self.timeline.ranks])

    @cached_property
    def mean_comm_s(self) -> float:
        """Communication of the step, hidden or not, the mean over all ranks."""
        return fmean([self.busy_s(rank, communicates) for rank in self.timeline.ranks])

    @cached_property
    def mean_overlap(self) -> float:
        return fmean([self.overlap(rank) for rank in self.timeline.ranks])

    def stretches(self, rank: int) -> list[PhaseSpan]:
        """The phases of the step on a rank, micro-batch by micro-batch, without gaps: a phase begins with its first
        computation and the first one with the step, so that what it waited for at its end still belongs to it.
        """
        ops = sorted(self._events(self.rows_of(rank)), key=lambda e: e.start_s)
        computing = [e for e in ops if computes(e.op, e.lane) and e.phase] or [e for e in ops if e.phase]
        begun: list[tuple[Phase, int, float]] = []
        for e in computing:
            micro_batch = 0 if e.phase is Phase.OPTIMIZER else e.micro_batch
            if not begun or begun[-1][:2] != (e.phase, micro_batch):
                begun.append((e.phase, micro_batch, e.start_s - self.origin_s if begun else 0.0))
        ends = [start_s for _, _, start_s in begun[1:]] + [self.step_s]
        return [PhaseSpan(*first, end_s) for first, end_s in zip(begun, ends, strict=False)]

    def live_memory(self, rank: int) -> LiveMemory:
        """Live bytes of a rank during the step: what was alive when it began, each change, and what was left.

        Changes are in the order in which the device gets to them. The CPU runs ahead of the device, so the sum may be a
        percent or two off `peak_bytes`, which is what an allocator has to provide. It is empty where the rank recorded
        no memory.
        """
        changes = self.timeline.memory_changes(rank)
        if not changes:
            return LiveMemory([], [], [], {})
        since_s = [time_s - self.origin_s for time_s, _, _ in changes]
        first, last = bisect_left(since_s, 0.0), bisect_right(since_s, self.step_s)
        before: dict[Memory, int] = defaultdict(int)
        for _, n_bytes, category in changes[:first]:
            before[category] += n_bytes
        inside = changes[first:last]
        return LiveMemory(
            [0.0, *since_s[first:last], self.step_s], [n for _, n, _ in inside], [c for _, _, c in inside], dict(before)
        )

    def live(self, rank: int) -> tuple[np.ndarray, dict[Memory, np.ndarray]]:
        """`live_memory` as arrays.

        Returns:
            seconds since the step began, of shape (n,), and for each category bytes of shape (n,); both empty
            when the rank recorded no memory.
        """
        import numpy as np

        alive = self.live_memory(rank)
        curves = alive.at(range(len(alive.times_s)))
        return np.array(alive.times_s), {category: np.array(n_bytes) for category, n_bytes in curves.items()}

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive at one moment of the step; 0 when the rank recorded no memory.

        Counted in issue order, as `Timeline.peak_bytes` and torch's caching allocator count.
        """
        rows = self._rows[1].get(rank, [])
        if not rows:
            return 0
        columns = self.timeline.columns
        ops, n_bytes, steps = columns["op"], columns["bytes"], columns["step"]
        alive = highest = 0
        for row in rows:
            if steps[row] > self.step:
                continue
            alive += n_bytes[row] if ops[row] == Op.ALLOC else -n_bytes[row]
            highest = max(highest, alive) if steps[row] == self.step else alive
        return highest


def step_views(
    timelines: Timelines,
    *,
    ranks: Iterable[int] | None = None,
    step: int | None = None,
    titles: Sequence[str] | None = None,
) -> list[StepView]:
    """Name the timelines and choose the step and the ranks of each; see `timeline_figure` for the rules.

    Raises:
        ValueError: there is no timeline, one is empty, names and timelines differ in number, or a rank or step
            is not in one of them.
    """
    chosen = None if ranks is None else tuple(dict.fromkeys(ranks))
    named = name_timelines(timelines, titles)
    views = []
    for name, timeline in named.items():
        if not timeline.ops:
            what = "only alloc and free events" if timeline.events else "no events"
            raise ValueError(f"timeline {name!r} has {what}; it needs at least one operation to be drawn")
        if chosen is not None and (not chosen or (unknown := [r for r in chosen if r not in timeline.ranks])):
            asked = f"rank {unknown[0]}" if chosen else "an empty choice of ranks"
            raise ValueError(f"{asked} is not in timeline {name!r}; it has {_listed(timeline.ranks)}")
        steps = sorted({e.step for e in timeline.ops})
        if step is not None and step not in steps:
            raise ValueError(f"step {step} is not in timeline {name!r}; it has steps {steps}")
        shown = median_step(Timeline(timeline.header, timeline.ops)) if step is None else step
        views.append(StepView(name, timeline, shown, chosen or _few_ranks(timeline, shown, len(named))))
    return views


def _few_ranks(timeline: Timeline, step: int, timelines: int) -> tuple[int, ...]:
    """The first ranks of a timeline, as many as can be drawn legibly."""
    first = timeline.ranks[:MAX_RANKS]
    bars = sum(e.step == step and e.rank == first[0] for e in timeline.ops)
    return first[: max(1, MAX_BARS // (timelines * max(bars, 1)))]


def _listed(ranks: Sequence[int]) -> str:
    """Ranks in words: all of a few, first and last of many."""
    return f"ranks {list(ranks)}" if len(ranks) <= 16 else f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"


def name_timelines(timelines: Timelines, titles: Sequence[str] | None = None) -> dict[str, Timeline]:
    """Timelines by name: the keys of a dict, titles, or what their headers say.

    Raises:
        ValueError: there is none, something else is among them, or titles and timelines differ in number.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    for timeline in timelines.values() if isinstance(timelines, Mapping) else timelines:
        if not isinstance(timeline, Timeline):
            raise ValueError(
                f"{timeline!r} is a {type(timeline).__name__}; what is drawn is a fsdp_sim.timeline.Timeline"
            )
    if isinstance(timelines, Mapping):
        named = dict(timelines)
    else:
        named = {}
        for number, timeline in enumerate(timelines, start=1):
            clock = {"simulated": "predicted"}.get(timeline.header.clock, timeline.header.clock)
            name = timeline.header.title or clock
            named[name if name not in named else f"{name} ({number})"] = timeline
    if not named:
        raise ValueError("no timeline was given; pass a Timeline, a list of them, or a dict of name to Timeline")
    if titles is None:
        return named
    if len(titles) != len(named) or len(set(titles)) != len(titles):
        raise ValueError(f"titles is {list(titles)}; {len(named)} timeline(s) need as many different titles")
    return dict(zip(titles, named.values(), strict=True))
