"""What `drawing` says as plotly's own objects, for places that take these: a figure, with arrays of numpy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fsdp_sim.viz.explorer.drawing import Change, Trace

OF_TYPE = {"bar": go.Bar, "scatter": go.Scatter}


def arrays(change: Change) -> Change:
    """A change with numpy's arrays in place of Python's."""
    return {name: np.asarray(value) if isinstance(value, array) else value for name, value in change.items()}


def trace(of: Trace, change: Change) -> Any:
    """A trace that shows what a change says."""
    return OF_TYPE[of["type"]](of).update(arrays(change))


def figure(traces: Iterable[Trace], changes: Iterable[Change], layout: dict[str, Any]) -> go.Figure:
    """The figure of traces with their changes; those that show nothing are left out."""
    return go.Figure([trace(t, c) for t, c in zip(traces, changes, strict=True) if c["visible"]], layout)
