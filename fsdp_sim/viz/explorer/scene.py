"""`Scene`: the step that a figure of the explorer shows, all of it or the part that a reader has zoomed to.

It is drawn from the same bars, rows and memory as a figure that stands still (`fsdp_sim.viz.steps`), of rank 0 alone.
Its times are counted from the end of the step before, so that it is as long as the simulation says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Lane, Memory
from fsdp_sim.viz.steps.bars import Bars, bars_from, bars_of, merged
from fsdp_sim.viz.steps.memory_strip import Strip, moments
from fsdp_sim.viz.steps.rows import LaneRows, rows_of
from fsdp_sim.viz.steps.step_view import MAX_BARS, LaneGroup, StepView

Floats = NDArray[np.float32]
PIXELS = 700  # across the plot
MEMORY_POINTS = 160  # of the curves of memory, which plotly.js draws once per category; zooming in shows more


@dataclass(frozen=True)
class Scene(StepView):
    """One step of rank 0; its timeline has no other rank, so that an operation's row is its ``seq``.

    Attributes:
        begin_s, end_s: of the step, on all ranks.
    """

    begin_s: float
    end_s: float

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
    def exposed_ms(self) -> NDArray[np.float64]:
        """(n, 2), when rank 0 communicates and does not compute."""
        return (np.array(self.exposed(0)).reshape(-1, 2) - self.begin_s) * 1e3

    @cached_property
    def strip(self) -> Strip:
        """Its memory."""
        return Strip(self, 0)

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
        times_s, live = self.strip.live
        if not live:
            return np.zeros(0, np.float32), {}
        times = times_s * 1e3
        first = max(int(np.searchsorted(times, from_ms, side="right")) - 1, 0)
        part = slice(first, max(int(np.searchsorted(times, to_ms, side="right")), first + 1))
        since = np.maximum(times[part], from_ms)
        total = np.sum([n_bytes[part] for n_bytes in live.values()], axis=0)
        keep = moments(since - from_ms, total, points)
        shown = np.append(keep, keep[-1])
        since = np.append(since[keep], min(max(to_ms, since[-1]), self.span_ms))
        return since.astype(np.float32), {c: (v[part][shown] / 2**30).astype(np.float32) for c, v in live.items()}


def scene(sim: Simulation) -> Scene:
    """What there is to see of the last step of a simulation, on rank 0."""
    (begin_s, end_s) = (0.0, *sim.run.step_ends_s)[-2:]
    timeline = sim.memory.timeline(sim.header, [0])
    return Scene(sim.workload.name, timeline, len(sim.run.step_ends_s) - 1, (0,), begin_s, end_s)
