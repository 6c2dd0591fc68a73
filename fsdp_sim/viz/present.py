"""`present`: a notebook on a projector. Type is larger and figures fill the height, until it is ended.

What a figure measures in pixels (type, margins, lines, marks) is multiplied, its plot is stretched to the height that
is left, and what is placed in parts of the whole figure stays at its distance from the nearer edge. So a figure needs
not know that it is presented, and slides are made with the same function, `enlarged`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SCALE = 1.6
HEIGHT_PX = 800
"""What a browser shows of a notebook on a screen of 1080 lines."""
DENSEST = 1.4
"""How much more type may grow than the plot around it, before names touch their neighbours."""
READABLE = 6
"""Type smaller than that is not there to be read: the labels of a slider that has none."""
DISPLAY = "fsdp-sim-presenter"

Json = dict[str, Any]

_PIXELS = {
    "arrowwidth", "borderpad", "borderwidth", "itemwidth", "minorticklen", "minsize", "standoff", "startstandoff",
    "ticklabelstandoff", "ticklen", "tracegroupgap", "xshift", "yshift",
}  # fmt: skip
_PIXELS_IN = {"margin": {"l", "r", "t", "b", "pad"}, "pad": {"l", "r", "t", "b"}, "line": {"width"}}
_SIZED = ("font", "marker", "pattern")  # what ends so has its `size` in pixels; that of a histogram's bins is data

# JupyterLab 4 and Notebook 7 take all sizes of type from these.
_STYLE = """<style>
:root { --jp-code-font-size: 21px; --jp-code-line-height: 1.4; --jp-content-font-size0: 19px;
  --jp-content-font-size1: 23px; --jp-content-font-size2: 27px; --jp-content-font-size3: 32px;
  --jp-content-font-size4: 38px; --jp-content-font-size5: 46px; --jp-cell-prompt-width: 12px; }
.jp-InputPrompt, .jp-OutputPrompt { visibility: hidden; }
.jp-RenderedHTMLCommon table, .jp-RenderedHTMLCommon .rendered_html { font-size: var(--jp-content-font-size1); }
.jp-RenderedHTMLCommon [style*="font-size"] { font-size: var(--jp-content-font-size0) !important; }
</style>"""


@dataclass
class _Presenter:
    """Whether figures are enlarged, and how much. One for a kernel: it has one notebook and one who shows it."""

    on: bool = False
    scale: float = SCALE
    height_px: int = HEIGHT_PX


_presenter = _Presenter()


def present(on: bool = True, *, scale: float = SCALE, height_px: int = HEIGHT_PX) -> None:
    """Show this notebook on a projector: from now on figures have large type and fill the height of the screen.

    Text and code of the notebook are enlarged too, by a style in the output of this cell: it ends with
    ``present(False)`` or when the output is removed, and changes no setting. Figures that are there already are as they
    were until their cells are run again.

    Args:
        on: False ends it.
        scale: how many times as large type in figures becomes; less in a figure whose rows would not hold it.
        height_px: of a figure, as the browser counts: about what it shows of the notebook.

    Raises:
        ValueError: the scale is not from 1 to 4, or no figure could be drawn so low.
    """
    if not 1 <= scale <= 4:
        raise ValueError(f"scale is {scale:g}; 1 leaves type as it is, 1.6 is for a projector, 4 is the most")
    if height_px < 300:
        raise ValueError(f"height_px is {height_px}; a figure is drawn at least 300 pixels high, 800 is usual")
    from IPython.display import display, update_display

    _presenter.on, _presenter.scale, _presenter.height_px = on, scale, height_px
    if on:
        sentence = "Presenting: cells that are run from now on have large figures."
        display({"text/html": f"{_STYLE}<p>{sentence}</p>", "text/plain": sentence}, raw=True, display_id=DISPLAY)
    else:  # wherever it stands
        update_display({"text/html": "", "text/plain": ""}, raw=True, display_id=DISPLAY)


def shown(content: Json) -> Json:
    """A figure (its ``data``, ``layout`` and ``frames``) as it is to be shown now: as it is, unless one presents."""
    if not _presenter.on or not content["layout"].get("height"):
        return content
    scale = fitting(content["layout"], _presenter.scale, _presenter.height_px)
    return enlarged(content, scale, _presenter.height_px)


def fitting(layout: Json, scale: float, height_px: float, densest: float = DENSEST) -> float:
    """The scale, or the largest below it at which the rows of a figure of this height still hold their names.

    Args:
        densest: see `DENSEST`.
    """
    margin = _margins(layout)
    return min(scale, height_px / (margin + (layout["height"] - margin) / densest))


def enlarged(content: Json, scale: float, height_px: float, *, smallest_px: float = 0) -> Json:
    """A figure with everything that is measured in pixels multiplied, and its plot stretched to a height.

    Args:
        content: ``data``, ``layout`` with a height, and perhaps ``frames``; stays as it is.
        smallest_px: type is at least so large.

    Raises:
        ValueError: margins of this scale leave nothing of the height for the plot.
    """
    natural_px = content["layout"]["height"]
    if _margins(content["layout"]) * scale >= height_px:
        raise ValueError(f"a figure {height_px:g} pixels high has no room for margins enlarged {scale:g} times")
    layout = _edged(_scaled(content["layout"], scale, smallest_px), natural_px, height_px, scale)
    larger = content | {"data": _scaled(content["data"], scale, smallest_px), "layout": layout | {"height": height_px}}
    if content.get("frames"):
        larger["frames"] = [_frame(frame, scale, height_px, smallest_px) for frame in content["frames"]]
    return larger


def _frame(frame: Json, scale: float, height_px: float, smallest_px: float) -> Json:
    made: Json = _scaled(frame, scale, smallest_px)
    if "height" in made.get("layout", ()):
        made["layout"]["height"] = height_px
    return made


def _margins(layout: Json) -> float:
    """Above and below the plot; plotly's own where a layout names none."""
    margin = layout.get("margin", {})
    return float(margin.get("t", 100) + margin.get("b", 80))


def _edged(layout: Json, natural_px: float, height_px: float, scale: float) -> Json:
    """Title and legends at their (enlarged) distance from the nearer edge of the figure."""

    def moved(place: Any) -> Any:
        if not isinstance(place, Mapping) or place.get("yref") != "container" or "y" not in place:
            return place
        y = place["y"]
        from_edge_px = scale * natural_px * min(y, 1 - y)
        return {**place, "y": from_edge_px / height_px if y < 0.5 else 1 - from_edge_px / height_px}

    return {key: moved(value) if key == "title" or key.startswith("legend") else value for key, value in layout.items()}


def _scaled(node: Any, scale: float, smallest_px: float, parent: str = "") -> Any:
    """A part of a figure with its pixels multiplied; ``parent`` is the key it stands under."""
    if isinstance(node, Mapping) and "bdata" not in node:
        return {
            key: _times(value, scale, smallest_px * parent.endswith("font"))
            if _is_pixels(key, parent)
            else _scaled(value, scale, smallest_px, key)
            for key, value in node.items()
        }
    if isinstance(node, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in node):
        return [_scaled(item, scale, smallest_px, parent) for item in node]
    return node


def _is_pixels(key: str, parent: str) -> bool:
    if key == "size":
        return parent.endswith(_SIZED)
    return key in _PIXELS or key in _PIXELS_IN.get(parent, ())


def _times(value: Any, scale: float, smallest: float) -> Any:
    """A number, or as many as a list or one of plotly's packed arrays holds, multiplied."""
    if isinstance(value, Mapping) and "bdata" in value:
        value = np.frombuffer(base64.b64decode(value["bdata"]), np.dtype(value["dtype"])).tolist()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_times(item, scale, smallest) for item in value]
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    larger = max(value * scale, smallest) if value >= READABLE else value * scale
    return round(larger) if isinstance(value, int) else larger  # some of plotly's numbers have to be whole
