"""The numbers behind a figure, and the same told in a sentence and in a table for those who cannot see it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fsdp_sim.timeline import Event, Lane, Memory, Op, Timeline
from fsdp_sim.timeline.analysis import (
    communicates,
    computes,
    exposed_intervals,
    median_step,
    overlap,
    step_time_s,
    total_s,
    union,
)
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import human_bytes, human_ms

Timelines = Timeline | Mapping[str, Timeline] | Sequence[Timeline]
MAX_RANKS = 4  # drawn when nobody says which: two timelines of four ranks with three lanes each still read well


@dataclass(frozen=True)
class StepView:
    """One step of one timeline, as some ranks saw it, with time counted from the start of the step."""

    name: str
    timeline: Timeline
    step: int
    ranks: tuple[int, ...]

    @cached_property
    def one_step(self) -> Timeline:
        return self.timeline.select(step=self.step)

    @cached_property
    def by_rank(self) -> dict[int, Timeline]:
        """The whole timeline taken apart, so that looking at each of a thousand ranks stays linear."""
        events: dict[int, list[Event]] = defaultdict(list)
        for event in self.timeline.events:
            events[event.rank].append(event)
        return {rank: Timeline(self.timeline.header, mine) for rank, mine in events.items()}

    @cached_property
    def ops(self) -> tuple[Event, ...]:
        """The operations of the step on the chosen ranks."""
        return self.one_step.select(rank=self.ranks).ops

    def ops_of(self, rank: int) -> Timeline:
        """The operations of the step on one rank."""
        return self.by_rank[rank].select(lambda e: not e.is_memory, step=self.step)

    @cached_property
    def origin_s(self) -> float:
        """When the first rank starts the first operation of the step (as `step_time_s` counts it)."""
        return min(e.start_s for e in self.one_step.ops)

    @cached_property
    def step_s(self) -> float:
        return step_time_s(self.timeline, self.step)

    def busy_s(self, rank: int, kind: Callable[[Op, Lane], bool]) -> float:
        """Seconds in which at least one operation of a kind (`communicates`, `computes`) ran on a rank."""
        return total_s(union((e.start_s, e.end_s) for e in self.ops_of(rank) if kind(e.op, e.lane)))

    def exposed(self, rank: int) -> list[tuple[float, float]]:
        """When a rank communicated and did not compute, in seconds of the timeline's own clock."""
        return exposed_intervals(self.ops_of(rank), rank)

    def overlap(self, rank: int) -> float:
        """Time computing while communicating over time communicating."""
        return overlap(self.ops_of(rank), rank)

    @property
    def mean_exposed_s(self) -> float:
        """Exposed communication of the step, the mean over all ranks (as the step time is that of all ranks)."""
        return float(np.mean([total_s(self.exposed(rank)) for rank in self.by_rank]))

    @property
    def mean_overlap(self) -> float:
        return float(np.mean([self.overlap(rank) for rank in self.by_rank]))

    def live(self, rank: int) -> tuple[np.ndarray, dict[Memory, np.ndarray]]:
        """Live bytes of a rank during the step: what was alive when it began, each change, and what was left.

        Returns:
            seconds since the step began, of shape (n,), and for each category bytes of shape (n,); both empty
            when the rank recorded no memory.
        """
        times_s, live = self.by_rank[rank].live_bytes(rank)
        if not len(times_s):
            return times_s, {}
        since_s = times_s - self.origin_s
        first = np.searchsorted(since_s, 0.0, side="left")
        last = np.searchsorted(since_s, self.step_s, side="right")
        before = {category: int(n_bytes[first - 1]) if first else 0 for category, n_bytes in live.items()}
        window = {
            category: np.concatenate([[before[category]], n_bytes[first:last], [n_bytes[last - 1] if last else 0]])
            for category, n_bytes in live.items()
        }
        times = np.concatenate([[0.0], since_s[first:last], [self.step_s]])
        return times, {category: n_bytes for category, n_bytes in window.items() if n_bytes.any()}

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive at one moment of the step; 0 when the rank recorded no memory."""
        _, live = self.live(rank)
        return int(np.max(np.sum(list(live.values()), axis=0))) if live else 0


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
    chosen = None if ranks is None else tuple(ranks)
    views = []
    for name, timeline in _named(timelines, titles).items():
        if not timeline.ops:
            what = "only alloc and free events" if timeline.events else "no events"
            raise ValueError(f"timeline {name!r} has {what}; it needs at least one operation to be drawn")
        if chosen is not None and (not chosen or (unknown := [r for r in chosen if r not in timeline.ranks])):
            asked = f"rank {unknown[0]}" if chosen else "an empty choice of ranks"
            raise ValueError(f"{asked} is not in timeline {name!r}; it has ranks {list(timeline.ranks)}")
        steps = sorted({e.step for e in timeline.ops})
        if step is not None and step not in steps:
            raise ValueError(f"step {step} is not in timeline {name!r}; it has steps {steps}")
        shown = median_step(Timeline(timeline.header, timeline.ops)) if step is None else step
        views.append(StepView(name, timeline, shown, timeline.ranks[:MAX_RANKS] if chosen is None else chosen))
    return views


def _named(timelines: Timelines, titles: Sequence[str] | None) -> dict[str, Timeline]:
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


def describe(timeline: Timeline, *, step: int | None = None) -> str:
    """One sentence: how long a step takes, how much communication nothing hides, how much memory is alive.

    Args:
        timeline: a timeline with at least one operation.
        step: the step to tell of; by default the one of median duration, the first left out.

    Raises:
        ValueError: the timeline is empty or lacks the step.
    """
    (view,) = step_views(timeline, step=step, ranks=timeline.ranks or None)
    n_ranks = len(view.ranks)
    who = "on 1 rank" if n_ranks == 1 else f"on {n_ranks} ranks"
    parts = [f"Step {view.step} {who} takes {human_ms(view.step_s)}"]
    if any(communicates(e.op, e.lane) for e in view.ops):
        share = view.mean_exposed_s / view.step_s if view.step_s else 0.0
        parts.append(
            f"{human_ms(view.mean_exposed_s)} of it ({share:.0%}) is exposed communication, during which "
            f"nothing computes; {view.mean_overlap:.0%} of the communication is hidden behind computing"
        )
    else:
        parts.append("it communicates nothing")
    peaks = {rank: view.peak_bytes(rank) for rank in view.ranks}
    if peak := max(peaks.values()):
        parts.append(f"live memory peaks at {human_bytes(peak)} on rank {max(peaks, key=lambda rank: peaks[rank])}")
    return "; ".join(parts) + "."


def summary_table(
    timelines: Timelines,
    *,
    ranks: Iterable[int] | None = None,
    step: int | None = None,
    titles: Sequence[str] | None = None,
) -> Table:
    """The numbers of `timeline_figure` with the same arguments: one row for each timeline and rank."""
    rows = []
    for view in step_views(timelines, ranks=ranks, step=step, titles=titles):
        for rank in view.ranks:
            exposed_s, peak = total_s(view.exposed(rank)), view.peak_bytes(rank)
            comm_s = view.busy_s(rank, communicates)
            rows.append(
                (
                    view.name,
                    str(rank),
                    str(view.step),
                    human_ms(view.step_s),
                    human_ms(view.busy_s(rank, computes)),
                    human_ms(comm_s),
                    human_ms(exposed_s),
                    f"{view.overlap(rank):.0%}" if comm_s else "none",
                    human_bytes(peak) if peak else "not recorded",
                )
            )
    header = (
        "timeline",
        "rank",
        "step",
        "step time",
        "computing",
        "communicating",
        "exposed communication",
        "communication hidden",
        "peak live memory",
    )
    return Table("Where the time of one training step goes", header, tuple(rows))


def summary_table_html(timelines: Timelines, **which: Any) -> str:
    """`summary_table` of the same arguments as an HTML table."""
    return summary_table(timelines, **which).to_html()
