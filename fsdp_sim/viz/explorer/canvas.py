"""`Canvas`: the one live figure. It is made once; a move sends what has changed, in one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.basedatatypes import Undefined

from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import drawing, layout_of
from fsdp_sim.viz.explorer.dependencies_of import Choice, Operations
from fsdp_sim.viz.explorer.scene import KIND_ORDER, Scene

LANE_TRACES = len(drawing.lane_traces())
LINK = "#8A94A0"  # of the lines from what is waited for to what waits; shows on white and on near black


class Canvas:
    """A `FigureWidget` that shows scenes.

    Attributes:
        figure: the widget.
        seen: the scene it shows.
        pinned: the one above it, if any.
    """

    def __init__(self, clicked: Callable[[int], None], seen: Scene, template: go.layout.Template = theme.LIGHT) -> None:
        self.seen = seen
        self.pinned: Scene | None = None
        self._choice: tuple[Operations, Choice] | None = None
        self._in_batch = False
        self._ends = [layout_of.kept(0.0, needed) for needed in self._needed()]
        layout = layout_of.layout(template=template)
        for axis, end in zip(("xaxis", "yaxis2"), self._ends, strict=True):
            layout[axis] |= {"range": [0.0, end]}
        layout["yaxis"] |= layout_of.labels(seen)
        traces = [*drawing.lane_traces(), *drawing.memory_traces(), _link_trace()]
        traces += [*drawing.lane_traces("y3"), _ghost_trace()]
        self._sent = self._changes((0.0, self._ends[0]))
        drawn = [trace.update(change) for trace, change in zip(traces, self._sent, strict=True)]
        # With its data from the first: what a FigureWidget is sent before it is shown the browser sends back each time.
        self.figure = go.FigureWidget(data=drawn, layout=layout)
        self.figure._config = theme.CONFIG
        for number in range(len(KIND_ORDER)):
            self.figure.data[1 + number].on_click(self._on_click(number, clicked))
        self.figure.layout.on_change(self._on_zoom, "xaxis.range")

    def show(self, seen: Scene, choice: tuple[Operations, Choice] | None = None) -> None:
        """Draw a scene, and of it an operation with its neighbours."""
        self.seen, self._choice = seen, choice
        changed: dict[str, Any] = {}
        for number, (axis, needed) in enumerate(zip(("xaxis", "yaxis2"), self._needed(), strict=True)):
            end = layout_of.kept(self._ends[number], needed)
            if end != self._ends[number]:
                self._ends[number] = end
                changed[f"{axis}.range"] = [0.0, end]
        self._send(changed | {f"yaxis.{name}": value for name, value in layout_of.labels(seen).items()})

    def _needed(self) -> tuple[float, float]:
        """How long and how high the axes have to be."""
        shown = [self.seen, *([self.pinned] if self.pinned else [])]
        return max(scene.span_ms for scene in shown), max(map(layout_of.needed_gib, shown))

    def pin(self, pinned: Scene | None, title: str = "") -> None:
        """Show a scene above the others', or no longer."""
        self.pinned = pinned
        changed: dict[str, Any] = dict(layout_of.layout(pinned is not None, self.figure.layout.template))
        changed.pop("template")
        changed["annotations"] = _titles(title) if pinned is not None else ()
        if pinned is not None:
            changed["yaxis3"] |= layout_of.labels(pinned)
        changed["yaxis"] |= layout_of.labels(self.seen)
        self._ends = [0.0, 0.0]
        self._in_batch = True
        try:
            self.figure.update_layout(changed)
        finally:
            self._in_batch = False
        self.show(self.seen, self._choice)

    def dark(self, dark: bool) -> None:
        """Change the template."""
        self.figure.layout.template = theme.DARK if dark else theme.LIGHT

    @property
    def window(self) -> tuple[float, float]:
        """The milliseconds in view."""
        shown = self.figure.layout.xaxis.range
        return (float(shown[0]), float(shown[1])) if shown else (0.0, self._ends[0])

    def _changes(self, window: tuple[float, float]) -> list[dict[str, Any]]:
        """Of each trace what shows the present scene and the pinned one."""
        changes = drawing.lane_changes(self.seen, window, self._choice[1].lit if self._choice else None)
        changes += drawing.memory_changes(self.seen, window)
        changes += [_links(self.seen, self._choice)]
        if self.pinned is None:
            return changes + [{"visible": False} for _ in range(LANE_TRACES + 1)]
        changes += drawing.lane_changes(self.pinned, window)
        times, live = self.pinned.memory(*window)
        return [*changes, {"x": times, "y": sum(live.values(), np.zeros(len(times), "f4")), "visible": True}]

    def _send(self, layout: dict[str, Any]) -> None:
        changes = self._changes(layout.get("xaxis.range") or self.window)
        # What one trace is sent all are that have it (`batch_update` would leave out those that keep theirs): of the
        # others the browser's model loses it, and sends it back with every move.
        names = {
            name
            for change, sent in zip(changes, self._sent, strict=True)
            for name, value in change.items()
            if not _same(sent.get(name, _same), value)
        }
        touched = [number for number, change in enumerate(changes) if names & set(change)]
        style = {name: [changes[number].get(name, Undefined) for number in touched] for name in names}
        moved = {name: value for name, value in layout.items() if list(self.figure.layout[name] or ()) != value}
        self._sent = changes
        self._in_batch = True  # a change of the range is nobody's zoom
        try:
            self.figure.plotly_update(style, moved, touched)
        finally:
            self._in_batch = False

    def _on_zoom(self, layout: Any, shown: Any) -> None:
        if not self._in_batch:
            self._send({})

    def _on_click(self, number: int, clicked: Callable[[int], None]) -> Callable[..., None]:
        def on_click(trace: Any, points: Any, state: Any) -> None:
            bars = self.seen.bars.get(KIND_ORDER[number])
            if points.point_inds and bars is not None:
                clicked(int(bars.ops[np.argmin(np.abs(bars.base - trace.base[points.point_inds[0]]))]))

        return on_click


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other, equal_nan=True)
        )
    return bool(one == other)


def _link_trace() -> go.Scatter:
    return go.Scatter(
        name="dependencies", mode="lines+markers", hoverinfo="skip", showlegend=False, visible=False,
        line={"color": LINK, "width": 1.5, "simplify": False}, marker={"size": 5, "color": LINK},
    )  # fmt: skip


def _ghost_trace() -> go.Scatter:
    return go.Scatter(
        name="memory of A", mode="lines", yaxis="y2", line={"color": LINK, "width": 1.5, "shape": "hv"}, visible=False,
        hovertemplate="memory of A, %{y:.2f} GiB at %{x:.2f} ms<extra></extra>", showlegend=False,
    )  # fmt: skip


def _links(seen: Scene, choice: tuple[Operations, Choice] | None) -> dict[str, Any]:
    """Lines from the end of what is waited for to the start of what waits."""
    if choice is None:
        return {"visible": False}
    centres, _, _ = drawing.rows_of(seen.lanes)
    ends: dict[int, tuple[float, float, float]] = {}
    for bars in seen.bars.values():
        for k in choice[1].lit:
            if len(at := np.flatnonzero(bars.ops == k)):
                start = float(bars.base[at[0]])
                ends[k] = start, start + float(bars.x[at[0]]), float(centres[bars.rows[at[0]]])
    xs: list[float | None] = []
    ys: list[float | None] = []
    for one, other in choice[0].arrows(choice[1]):
        if one in ends and other in ends:
            xs += [ends[one][1], ends[other][0], None]
            ys += [ends[one][2], ends[other][2], None]
    return {"x": xs, "y": ys, "visible": True}


def _titles(title: str) -> tuple[dict[str, Any], ...]:
    common = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    plot = 2 * (layout_of.LANES + layout_of.GAP) + layout_of.MEMORY
    now = (layout_of.LANES + layout_of.GAP + layout_of.MEMORY) / plot
    return (
        common | {"y": 1.0, "text": f"<b>A, pinned</b>: {theme.safe(title)}"},
        common | {"y": now, "text": "<b>now</b>"},
    )
