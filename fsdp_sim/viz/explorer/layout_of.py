"""Where things are in the explorer's figure: lanes over memory on one axis of time, and above them a pinned plan."""

from __future__ import annotations

from typing import Any

from fsdp_sim.viz.explorer.drawing import GIB, limit_in_view
from fsdp_sim.viz.explorer.scene import Scene

LEFT, RIGHT, TOP, BOTTOM = 116, 14, 22, 42
PLOT, GAP = 396, 30  # pixels: of the figure without its margins, pinned or not, and between its parts
ROOM = 1.12  # an axis is that much longer than what it shows, so that the next move need not change it


def parts(pinned: bool) -> tuple[float, float]:
    """How high the lanes of one plan and the memory are, in pixels; a pinned plan has its lanes once more."""
    return ((PLOT - 2 * GAP) / 3, (PLOT - 2 * GAP) / 3) if pinned else (200, PLOT - GAP - 200)


def layout(template: Any, pinned: bool = False) -> dict[str, Any]:
    """Everything of the layout that no move changes."""
    lanes_px, memory_px = parts(pinned)
    height, memory, lanes = lanes_px / PLOT, memory_px / PLOT, (memory_px + GAP) / PLOT
    hidden = {"domain": [0.999, 1.0], "visible": False}
    fast = {"ticklabeloverflow": "allow"}  # plotly.js would measure each label otherwise, with every move
    axis = {"fixedrange": True, "showgrid": False} | fast
    return {
        "template": template, "height": PLOT + TOP + BOTTOM, "barmode": "overlay", "hovermode": "closest",
        "uirevision": "keep", "dragmode": "pan", "showlegend": False, "autosize": True,
        "margin": {"l": LEFT, "r": RIGHT, "t": TOP, "b": BOTTOM, "autoexpand": False},
        "xaxis": fast | {"anchor": "y2", "minallowed": 0,
                  "title": {"text": "milliseconds since the step began", "standoff": 4}},
        "yaxis": axis | {"domain": [lanes, lanes + height]},
        "yaxis2": fast | {"domain": [0, memory], "fixedrange": True, "ticksuffix": " GiB", "nticks": 5},
        "yaxis3": axis | {"domain": [1 - height, 1], "visible": True} if pinned else hidden,
    }  # fmt: skip


def needed_gib(seen: Scene) -> float:
    """How high the axis of memory has to be; the limit is in view when the peak comes near it."""
    peak, limit = max(seen.strip.peak_bytes, 1) / GIB, seen.strip.limit_bytes / GIB
    return max(peak, limit) if limit_in_view(seen) else peak


def kept(end: float, needed: float) -> float:
    """The end of an axis after a move: the one it has, while what is shown fills at least half of it.

    An axis that stays lets the eye see what a move changes, and costs no new ticks.
    """
    return end if 0.5 * end <= needed <= end else needed * ROOM or 1.0
