"""`LivePlot`: a plotly figure whose numbers move, one message and one drawing for each move.

plotly's own FigureWidget compares every property in the browser after every change and sends the difference back to
the kernel, which takes as long as the drawing itself: at 30 units a move took 115 ms with it (`tests/bench/
bench_explorer.py` measures). Here the browser is told the numbers, draws, and answers only to clicks and zooms.
"""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import plotly.graph_objects as go
import traitlets

from fsdp_sim.viz import plotly_js

BROWSER_JS = Path(__file__).parents[1] / "browser.js"


@cache
def _module() -> str:
    """plotly.js, as much of it as bars and lines need, which sets ``window.Plotly``, and what draws with it."""
    return f"if (!window.Plotly) {{\n{plotly_js.source(())}\n}}\n{BROWSER_JS.read_text(encoding='utf-8')}"


class LivePlot(anywidget.AnyWidget):
    """Draws a figure, and moves it.

    It sends ``{"clicked": [trace, base]}`` when a bar is clicked, and ``{"window": [from, to]}`` when the reader has
    zoomed along the axis x.
    """

    _esm = _module()
    figure = traitlets.Dict().tag(sync=True)
    moved = traitlets.Dict().tag(sync=True)
    _serial = 0

    def draw(self, figure: go.Figure, config: dict[str, Any]) -> None:
        """Draw a figure from the beginning."""
        content = _encoded(figure.to_plotly_json())
        self._serial += 1
        self.figure = {"serial": self._serial, "data": content["data"], "layout": content["layout"], "config": config}

    def move(self, traces: list[dict[str, Any]], layout: dict[str, Any]) -> None:
        """Change properties of its traces and, where they differ from those last sent, of its layout.

        Every move says everything that a move may change, so that the browser may leave out those that it cannot keep
        up with.
        """
        self._serial += 1
        self.moved = {"serial": self._serial, "traces": _encoded(traces), "layout": layout}


def _encoded(value: Any) -> Any:
    """Arrays as their bytes and type, which travel as they are."""
    if isinstance(value, array):
        return {"dtype": "f4", "bytes": value.tobytes()}
    if isinstance(value, np.ndarray):
        dtype = {"f": "f4", "i": "i4", "u": "i4"}.get(value.dtype.kind)
        return value.tolist() if dtype is None else {"dtype": dtype, "bytes": value.astype(dtype).tobytes()}
    if isinstance(value, dict):
        return {name: _encoded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(one) for one in value]
    return value
