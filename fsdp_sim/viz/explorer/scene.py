"""`Scene`: the step that a figure of the explorer shows, all of it or the part that a reader has zoomed to.

It is drawn from the same bars, rows and memory as a figure that stands still (`fsdp_sim.viz.steps`), of one rank alone.
Its times are counted from the end of the step before, so that it is as long as the simulation says.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Interval, Lane, Memory, Timeline
from fsdp_sim.viz.steps.bars import Bars, bars_from, bars_of, merged
from fsdp_sim.viz.steps.memory_strip import Strip, moments
from fsdp_sim.viz.steps.rows import LaneRows, rows_of
from fsdp_sim.viz.steps.step_view import MAX_BARS, LaneGroup, StepView

Floats: TypeAlias = "array[float]"  # of 4 bytes, which is plenty for a picture
PIXELS = 700  # across the plot
MEMORY_POINTS = 160  # of the curves of memory, which plotly.js draws once per category; zooming in shows more


@dataclass(frozen=True)
class Scene(StepView):
    """One step of one rank. That of a simulation is rank 0's, and its timeline has no other rank.

    Attributes:
        begin_s, end_s: of the step, on all ranks.
    """

    begin_s: float
    end_s: float

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def origin_s(self) -> float:
        return self.begin_s

    @property
    def step_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def span_ms(self) -> float:
        return self.step_s * 1e3

    def groups(self) -> list[LaneGroup]:
        (one,) = super().groups()
        return [one._replace(label="compute")]

    @cached_property
    def places(self) -> LaneRows:
        """Where its lanes lie."""
        return rows_of(self.groups())

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Those that are used, from the top down."""
        return tuple(lane for _, lane in self.places.centres)

    @cached_property
    def bars(self) -> Bars:
        """Those of the whole step, merged where there are too many."""
        return bars_of(self)

    @cached_property
    def exposed_ms(self) -> list[Interval]:
        """When the rank communicates and does not compute."""
        exposed = self.exposed(self.rank)
        return [((start_s - self.begin_s) * 1e3, (end_s - self.begin_s) * 1e3) for start_s, end_s in exposed]

    @cached_property
    def strip(self) -> Strip:
        """Its memory."""
        return Strip(self, self.rank)

    def bars_between(self, from_ms: float, to_ms: float) -> Bars:
        """The bars of a part of the step: one for each operation, or, of very many, for all narrower than a pixel."""
        if len(self.rows) <= MAX_BARS:
            return self.bars
        starts, ends = self.timeline.columns["start_s"], self.timeline.columns["end_s"]
        from_s, to_s = self.begin_s + from_ms / 1e3, self.begin_s + to_ms / 1e3
        width_s = (to_s - from_s) / (2 * PIXELS)
        seen = [row for row in self.rows if starts[row] <= to_s and ends[row] >= from_s]
        return bars_from(self, merged(self, seen, width_s), width_s)

    def memory(self, from_ms: float, to_ms: float, points: int = MEMORY_POINTS) -> tuple[Floats, dict[Memory, Floats]]:
        """The memory of a part of the step in a few points.

        Returns:
            milliseconds, and for each category GiB.
        """
        alive = self.strip.alive
        if not alive:
            return array("f"), {}
        times = [time_s * 1e3 for time_s in alive.times_s]
        first = max(bisect_right(times, from_ms) - 1, 0)
        last = max(bisect_right(times, to_ms), first + 1)
        since = [max(time_ms, from_ms) for time_ms in times[first:last]]
        keep = moments([time_ms - from_ms for time_ms in since], alive.total[first:last], points)
        shown = [first + k for k in (*keep, keep[-1])]
        end_ms = min(max(to_ms, since[keep[-1]]), self.span_ms)
        curves = {c: array("f", [n_bytes / 2**30 for n_bytes in values]) for c, values in alive.at(shown).items()}
        return array("f", [*(since[k] for k in keep), end_ms]), curves


def scene(sim: Simulation) -> Scene:
    """What there is to see of the last step of a simulation, on rank 0."""
    (begin_s, end_s) = (0.0, *sim.run.step_ends_s)[-2:]
    timeline = sim.memory.timeline(sim.header, [0])
    return Scene(sim.workload.name, timeline, len(sim.run.step_ends_s) - 1, (0,), begin_s, end_s)


def scene_of(timeline: Timeline, step: int, rank: int) -> Scene:
    """What there is to see of a step of a record, on one rank."""
    view = StepView("", timeline, step, (rank,))
    return Scene("", timeline, step, (rank,), view.origin_s, view.origin_s + view.step_s)
