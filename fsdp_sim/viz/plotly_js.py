"""plotly.js for a page: the part that our figures need, or all of it.

Beside this file lies plotly.js's cartesian bundle, as npm has it (plotly.js-cartesian-dist-min, MIT licence), gzipped:
a third of what the Python package plotly brings along. Figures with other traces than it knows get the whole.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable
from importlib.resources import files

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

CARTESIAN = frozenset({
    "bar", "box", "contour", "heatmap", "histogram", "histogram2d", "histogram2dcontour", "image", "pie", "quiver",
    "scatter", "scatterternary", "violin",
})  # fmt: skip


def source(figures: Iterable[go.Figure]) -> str:
    """The JavaScript that draws these figures."""
    return gzip.decompress(_zipped(figures)).decode()


def packed(figures: Iterable[go.Figure]) -> str:
    """The same gzipped and in base64: a page of 2 MB becomes one of 1."""
    return base64.b64encode(_zipped(figures)).decode()


def _zipped(figures: Iterable[go.Figure]) -> bytes:
    traces = {trace.type for figure in figures for trace in figure.data}
    if traces <= CARTESIAN:
        return files("fsdp_sim.viz").joinpath("plotly-cartesian.min.js.gz").read_bytes()
    return gzip.compress(get_plotlyjs().encode(), mtime=0)
