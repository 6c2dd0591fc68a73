"""The figure as a whole: a scene, above it a pinned one, and an operation with what it depends on. Without numpy."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import drawing, layout_of
from fsdp_sim.viz.explorer.dependencies_of import ChosenOperation, Operations
from fsdp_sim.viz.explorer.scene import Scene
from fsdp_sim.viz.explorer.words import short

LINK = "#8A94A0"  # of the lines from what is waited for to what waits; shows on white and on near black
Choice: TypeAlias = tuple[Operations, ChosenOperation]


def traces(pinned: bool) -> list[drawing.Trace]:
    """Empty traces, in the order of `changes`."""
    found = [*drawing.lane_traces(), *drawing.memory_traces(), _link_trace()]
    return [*found, *drawing.lane_traces("y3"), _ghost_trace()] if pinned else found


def changes(
    seen: Scene, window: tuple[float, float], pinned: Scene | None = None, choice: Choice | None = None
) -> list[drawing.Change]:
    """Of each trace: what shows the present scene and the pinned one."""
    found = drawing.lane_changes(seen, window, choice[1].lit if choice else None)
    found += drawing.memory_changes(seen, window)
    found += [_links(seen, choice)]
    if pinned is not None:
        times, live = pinned.memory(*window)
        found += drawing.lane_changes(pinned, window)
        total = array("f", map(sum, zip(*live.values(), strict=True)))
        found += [{"x": times, "y": total, "visible": True}]
    return found


def ends(before: tuple[float, float], seen: Scene, pinned: Scene | None = None) -> tuple[float, float]:
    """Where the axes of time (milliseconds) and memory (GiB) end, after they ended elsewhere."""
    shown = [seen, *([pinned] if pinned else [])]
    needed = (max(scene.span_ms for scene in shown), max(map(layout_of.needed_gib, shown)))
    return layout_of.kept(before[0], needed[0]), layout_of.kept(before[1], needed[1])


def places(seen: Scene, window: tuple[float, float], top_gib: float) -> dict[str, Any]:
    """Of the layout what a move may change."""
    rows = {f"yaxis.{name}": value for name, value in seen.places.axis().items()}
    return rows | {"xaxis.range": list(window), "yaxis2.range": [0.0, top_gib]}


def layout(
    template: Any,
    seen: Scene,
    window: tuple[float, float],
    top_gib: float,
    pinned: Scene | None = None,
    title: str = "",
) -> dict[str, Any]:
    """All of the layout; the title is the pinned plan's."""
    found = layout_of.layout(template, pinned is not None)
    for place, value in places(seen, window, top_gib).items():
        axis, _, name = place.partition(".")
        found[axis][name] = value
    if pinned is not None:
        found["yaxis3"] |= pinned.places.axis()
        found["annotations"] = _titles(title)
    return found


def _link_trace() -> drawing.Trace:
    return {
        "type": "scatter", "name": "dependencies", "mode": "lines+markers", "hoverinfo": "skip", "showlegend": False,
        "visible": False, "line": {"color": LINK, "width": 1.5, "simplify": False},
        "marker": {"size": 5, "color": LINK},
    }  # fmt: skip


def _ghost_trace() -> drawing.Trace:
    return {
        "type": "scatter", "name": "memory of A", "mode": "lines", "yaxis": "y2", "visible": False,
        "line": {"color": LINK, "width": 1.5, "shape": "hv"}, "showlegend": False,
        "hovertemplate": "memory of A, %{y:.2f} GiB at %{x:.2f} ms<extra></extra>",
    }  # fmt: skip


def _links(seen: Scene, choice: Choice | None) -> drawing.Change:
    """Lines from the end of what is waited for to the start of what waits."""
    if choice is None:
        return {"visible": False}
    columns = seen.timeline.columns
    shown = set(seen.rows)  # the others are of the step before
    xs: list[float | None] = []
    ys: list[float | None] = []
    for one, other in choice[0].arrows(choice[1]):
        if one in shown and other in shown:
            xs += [seen.since_ms(columns["end_s"][one]), seen.since_ms(columns["start_s"][other]), None]
            ys += [*(seen.places.centres[seen.rank, columns["lane"][row]] for row in (one, other)), None]
    return {"x": xs, "y": ys, "visible": True}


def _titles(title: str) -> tuple[dict[str, Any], ...]:
    common = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    lanes, memory = layout_of.parts(pinned=True)
    return (
        common | {"y": 1.0, "text": f"<b>A, pinned</b>: {theme.safe(short(title))}"},
        common | {"y": (lanes + layout_of.GAP + memory) / layout_of.PLOT, "text": "<b>now</b>"},
    )
