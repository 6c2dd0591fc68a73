"""Where the rows of a step lie: one for each rank and lane, counted in lanes from the top."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsdp_sim.timeline import Lane
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.bars import Bars
from fsdp_sim.viz.steps.step_view import LaneGroup

THIN = {Lane.AG_COPY_IN: 0.5, Lane.PRE_UNSHARD: 0.5}  # height of a row in lanes; 1 when not named
BAR = 0.92  # of the height of its row
LOWEST = 0.15  # of the height of a bar, so that it can be seen and pointed at
RANK_GAP = 0.45


@dataclass(frozen=True)
class LaneRows:
    """The rows of one timeline.

    Attributes:
        centres: of each rank and lane.
        labels: where each is and its text, of rows high enough for one.
        bands: top and bottom of each rank.
        height: of all of them.
    """

    centres: dict[tuple[int, Lane], float]
    labels: list[tuple[float, str]]
    bands: list[tuple[float, float]]
    height: float

    def of(self, bars: Bars) -> tuple[list[float], list[float]]:
        """The centre and the height of each bar: it is as high as the part of its time in which something runs."""
        heights = {place: THIN.get(place[1], 1.0) * BAR for place in self.centres}
        return (
            [self.centres[place] for place in bars.places],
            [heights[place] * max(busy, LOWEST) for place, busy in zip(bars.places, bars.busy, strict=True)],
        )

    def axis(self) -> dict[str, Any]:
        """What a plotly axis has of them."""
        return {
            "range": [self.height, 0],
            "tickvals": [at for at, _ in self.labels],
            "ticktext": [label for _, label in self.labels],
        }


def rows_of(groups: Iterable[LaneGroup]) -> LaneRows:
    """The rows of some groups, with a gap between two of them."""
    centres: dict[tuple[int, Lane], float] = {}
    labels: list[tuple[float, str]] = []
    bands: list[tuple[float, float]] = []
    end = 0.0
    for group in groups:
        top = end = end + (RANK_GAP if centres else 0.0)
        for lane in group.lanes:
            height = THIN.get(lane, 1.0)
            centres[group.rank, lane] = end + height / 2
            end += height
            if lane not in THIN:
                label = group.label if lane is group.lanes[0] else theme.LANE_NAMES[lane]
                labels.append((centres[group.rank, lane], label))
        bands.append((top, end))
    return LaneRows(centres, labels, bands, end)
