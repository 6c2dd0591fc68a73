"""`Canvas`: the one live figure. It is made once; a move sends its numbers, in one message."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import drawing, figure_of, layout_of
from fsdp_sim.viz.explorer.dependencies_of import ChosenOperation, Operations
from fsdp_sim.viz.explorer.live_plot import LivePlot
from fsdp_sim.viz.explorer.scene import Scene
from fsdp_sim.viz.explorer.words import short

LINK = "#8A94A0"  # of the lines from what is waited for to what waits; shows on white and on near black


class Canvas:
    """A `LivePlot` that shows scenes.

    Attributes:
        view: the widget.
        seen: the scene it shows.
        pinned: the one above it, if any.
        window: the milliseconds in view.
    """

    def __init__(self, clicked: Callable[[int], None], seen: Scene, template: go.layout.Template = theme.LIGHT) -> None:
        self.seen = seen
        self.pinned: Scene | None = None
        self._title = ""
        self._template = template
        self._clicked = clicked
        self._choice: tuple[Operations, ChosenOperation] | None = None
        self._ends = (0.0, 0.0)
        self._fit(afresh=True)
        self.view = LivePlot()
        self.view.on_msg(self._on_message)
        self._rebuild(self._changes())

    @property
    def figure(self) -> go.Figure:
        """What is shown, as a figure that stands still."""
        return self._figure(self._changes())

    def show(self, seen: Scene, choice: tuple[Operations, ChosenOperation] | None = None) -> None:
        """Draw a scene, and of it an operation with its neighbours."""
        self.seen, self._choice = seen, choice
        self._fit()
        self._move()

    def pin(self, pinned: Scene | None, title: str = "") -> None:
        """Show a scene above the others', or no longer."""
        self.pinned, self._title = pinned, title
        self._fit(afresh=True)
        self._rebuild(self._changes())

    def dark(self, dark: bool) -> None:
        """Change the template."""
        self._template = theme.DARK if dark else theme.LIGHT
        self._rebuild(self._changes())

    def zoom(self, from_ms: float, to_ms: float) -> None:
        """Take over what the reader has zoomed to: there more can be shown."""
        self.window = (from_ms, to_ms)
        self._move()

    def _fit(self, *, afresh: bool = False) -> None:
        """Give the axes other ends where what is shown needs them; the whole step is in view again then."""
        shown = [self.seen, *([self.pinned] if self.pinned else [])]
        needed = (max(scene.span_ms for scene in shown), max(map(layout_of.needed_gib, shown)))
        before = (0.0, 0.0) if afresh else self._ends
        self._ends = (layout_of.kept(before[0], needed[0]), layout_of.kept(before[1], needed[1]))
        if self._ends[0] != before[0]:
            self.window = (0.0, self._ends[0])

    def _layout(self) -> dict[str, Any]:
        found = layout_of.layout(self._template, self.pinned is not None)
        for place, value in self._places().items():
            axis, _, name = place.partition(".")
            found[axis][name] = value
        if self.pinned is not None:
            found["yaxis3"] |= self.pinned.places.axis()
            found["annotations"] = _titles(self._title)
        return found

    def _places(self) -> dict[str, Any]:
        """Of the layout what a move may change."""
        rows = {f"yaxis.{name}": value for name, value in self.seen.places.axis().items()}
        return rows | {"xaxis.range": list(self.window), "yaxis2.range": [0.0, self._ends[1]]}

    def _figure(self, changes: list[dict[str, Any]]) -> go.Figure:
        traces = [*drawing.lane_traces(), *drawing.memory_traces(), _link_trace()]
        if self.pinned is not None:
            traces += [*drawing.lane_traces("y3"), _ghost_trace()]
        drawn = [figure_of.trace(traces[number], changes[number]) for number in self._drawn]
        return go.Figure(data=drawn, layout=self._layout())

    def _changes(self) -> list[dict[str, Any]]:
        """Of each trace: what shows the present scene and the pinned one."""
        changes = drawing.lane_changes(self.seen, self.window, self._choice[1].lit if self._choice else None)
        changes += drawing.memory_changes(self.seen, self.window)
        changes += [_links(self.seen, self._choice)]
        if self.pinned is not None:
            times, live = self.pinned.memory(*self.window)
            changes += drawing.lane_changes(self.pinned, self.window)
            total = array("f", map(sum, zip(*live.values(), strict=True)))
            changes += [{"x": times, "y": total, "visible": True}]
        return changes

    def _rebuild(self, changes: list[dict[str, Any]], drawn: Iterable[int] = ()) -> None:
        """Draw afresh: the traces that show something, and some that may again."""
        self._base = changes
        self._moving: set[tuple[int, str]] = set()
        seen = [number for number, change in enumerate(self._base) if change["visible"]]
        self._drawn = sorted({*drawn, *seen})
        self.view.draw(self._figure(changes), theme.CONFIG)

    def _move(self) -> None:
        changes = self._changes()
        if {number for number, change in enumerate(changes) if change["visible"]} <= {*self._drawn}:
            self._moving |= {
                (number, name)
                for number in self._drawn
                for name, value in changes[number].items()
                if not _same(self._base[number].get(name, ...), value)
            }
            self.view.move([self._moved(number, changes[number]) for number in self._drawn], self._places())
        else:  # another kind of operation or of memory; a trace that never shows anything would cost time all the same
            self._rebuild(changes, self._drawn)

    def _moved(self, number: int, change: dict[str, Any]) -> dict[str, Any]:
        """What has ever moved since the figure was drawn: names and rows seldom do."""
        return {name: value for name, value in change.items() if (number, name) in self._moving}

    def _on_message(self, view: Any, content: dict[str, Any], buffers: Any) -> None:
        if window := content.get("window"):
            self.zoom(float(window[0]), float(window[1]))
        elif clicked := content.get("clicked"):
            place, base = clicked
            row = drawing.bar_at(self.seen, self.window, self._drawn[place], base)
            if row is not None:
                self._clicked(row)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, array) and isinstance(other, array):
        return one.tobytes() == other.tobytes()  # a gap is not a number, and equal to another gap here
    return type(one) is type(other) and bool(one == other)


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


def _links(seen: Scene, choice: tuple[Operations, ChosenOperation] | None) -> dict[str, Any]:
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
            ys += [*(seen.places.centres[0, columns["lane"][row]] for row in (one, other)), None]
    return {"x": xs, "y": ys, "visible": True}


def _titles(title: str) -> tuple[dict[str, Any], ...]:
    common = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    lanes, memory = layout_of.parts(pinned=True)
    return (
        common | {"y": 1.0, "text": f"<b>A, pinned</b>: {theme.safe(short(title))}"},
        common | {"y": (lanes + layout_of.GAP + memory) / layout_of.PLOT, "text": "<b>now</b>"},
    )
