"""`Canvas`: the one live figure. It is made once; a move sends its numbers, in one message."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import composed, drawing, figure_of
from fsdp_sim.viz.explorer.dependencies_of import ChosenOperation, Operations
from fsdp_sim.viz.explorer.live_plot import LivePlot
from fsdp_sim.viz.explorer.scene import Scene


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
        before = (0.0, 0.0) if afresh else self._ends
        self._ends = composed.ends(before, self.seen, self.pinned)
        if self._ends[0] != before[0]:
            self.window = (0.0, self._ends[0])

    def _places(self) -> dict[str, Any]:
        return composed.places(self.seen, self.window, self._ends[1])

    def _figure(self, changes: list[dict[str, Any]]) -> go.Figure:
        traces = composed.traces(self.pinned is not None)
        drawn = [figure_of.trace(traces[number], changes[number]) for number in self._drawn]
        layout = composed.layout(self._template, self.seen, self.window, self._ends[1], self.pinned, self._title)
        return go.Figure(data=drawn, layout=layout)

    def _changes(self) -> list[dict[str, Any]]:
        return composed.changes(self.seen, self.window, self.pinned, self._choice)

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
