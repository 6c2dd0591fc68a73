"""A figure as large as a slide: its title is the headline, its type can be read from the last row."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from fsdp_sim.viz.present import DENSEST, enlarged, fitting
from notebooks.masters.slides.deck import HEIGHT_PX

Json = dict[str, Any]

MIME = "application/vnd.plotly.v1+json"
WIDTH_PX = 1800
NARROWEST_PX = 848  # what figures are laid out for: see `fsdp_sim.viz.steps.layout`
SMALLEST_TYPE_PX = 20
LARGEST_SCALE = 2.1
MOST_STRETCH = 2.0
"""How much higher the plot may be drawn than its type: five bars do not become a wall."""
LEAST_HEIGHT_PX = 0.64 * HEIGHT_PX
TITLE_LINE_PX = 23.5
DENSEST_PLAYER = 1.15
"""As `DENSEST`, for a figure that moves: its sentence is large as it is."""
CROWDED = 1.7
"""Below this scale a figure of timelines goes without its strips of memory."""
_IN_PATH = re.compile(r"([ML][-\d.e+]+),([-\d.e+]+)")


def headline(content: Json) -> str:
    """The title of a figure in one line; empty if it has none."""
    title = content["layout"].get("title", {}).get("text", "")
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", title)).split())


def for_slide(content: Json, room_px: float) -> Json:
    """The figure without its title, enlarged for a slide on which it has ``room_px`` of height.

    Args:
        content: plotly's ``data``, ``layout`` and perhaps ``frames``; stays as it is.
    """
    figure = untitled({key: content[key] for key in ("data", "layout", "frames") if key in content})
    if fitting(figure["layout"], LARGEST_SCALE, room_px) < CROWDED:
        figure = without_memory(figure)
    layout = figure["layout"]
    margin = layout["margin"]["t"] + layout["margin"]["b"]
    densest = DENSEST_PLAYER if figure.get("frames") else DENSEST
    scale = fitting(layout, min(LARGEST_SCALE, WIDTH_PX / NARROWEST_PX), room_px, densest)
    stretched_px = scale * (margin + MOST_STRETCH * (layout["height"] - margin))
    height_px = round(min(room_px, max(LEAST_HEIGHT_PX, stretched_px)))
    figure = enlarged(figure, scale, height_px, smallest_px=SMALLEST_TYPE_PX)
    figure["layout"] |= {"width": WIDTH_PX, "autosize": False}
    return figure


def untitled(content: Json) -> Json:
    """The figure without its title and the room that it took."""
    layout = dict(content["layout"])
    title = layout.pop("title", {}).get("text", "")
    margin = {"t": 100, "b": 80} | layout.get("margin", {})
    cut_px = min(10 + TITLE_LINE_PX * (title.count("<br>") + 1), margin["t"] - 8) if title else 0
    was_px, is_px = layout["height"], layout["height"] - cut_px
    layout |= {"height": is_px, "margin": margin | {"t": margin["t"] - cut_px}}
    for name in [key for key in layout if key.startswith("legend")]:
        place = layout[name]
        if place.get("yref") == "container" and "y" in place:
            from_top_px = max((1 - place["y"]) * was_px - cut_px, 0)
            y = 1 - from_top_px / is_px if place["y"] > 0.5 else place["y"] * was_px / is_px
            layout[name] = place | {"y": y}
    return content | {"layout": layout}


def without_memory(content: Json) -> Json:
    """Timelines without the strips of memory below each: their rows get the room.

    A figure that has none stays as it is.
    """
    strips = {trace.get("yaxis", "y") for trace in content["data"] if trace.get("legend") == "legend2"}
    layout = content["layout"]
    rows = [axis for axis in _axes(content) if axis not in strips]
    if not strips or not rows:
        return content
    bottoms = [layout[_key(row)]["domain"][0] for row in rows]
    gone = []  # of the plot: from below each strip up to the rows above it
    for strip in strips:
        low, high = layout[_key(strip)]["domain"]
        above = min(bottom for bottom in bottoms if bottom >= high - 1e-6)
        gone.append((low, above))
    left = 1 - sum(high - low for low, high in gone)
    plot_px = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    legend_px = max(layout["margin"]["b"] - 54, 0)

    def moved(y: float) -> float:
        return (y - sum(max(min(y, high) - low, 0) for low, high in gone)) / left

    def placed(item: Json) -> Json:
        if item.get("yref") != "paper":
            return item
        places: Json = {key: moved(item[key]) for key in ("y", "y0", "y1") if key in item}
        if "path" in item:
            places["path"] = _IN_PATH.sub(lambda m: f"{m[1]},{moved(float(m[2])):.5f}", item["path"])
        return item | places

    def of_strip(item: Json) -> bool:
        headed = item.get("yref") == "paper" and any(low < item.get("y", -1) < high for low, high in gone)
        return item.get("yref") in strips or headed

    kept = {key: value for key, value in layout.items() if key not in {*map(_key, strips), "legend2"}}
    kept["margin"] = layout["margin"] | {"b": layout["margin"]["b"] - legend_px}
    kept["height"] = layout["height"] - plot_px * (1 - left) - legend_px
    for row in rows:
        low, high = layout[_key(row)]["domain"]
        kept[_key(row)] = layout[_key(row)] | {"domain": [max(moved(low), 0.0), min(moved(high), 1.0)]}
    kept["xaxis"] = layout["xaxis"] | {"anchor": min(rows, key=lambda row: layout[_key(row)]["domain"][0])}
    for name in ("shapes", "annotations"):
        kept[name] = [placed(item) for item in layout.get(name, ()) if not of_strip(item)]
    legend = kept.get("legend", {})
    if legend.get("yref") == "container":
        kept["legend"] = legend | {"y": 1 - (1 - legend["y"]) * layout["height"] / kept["height"]}
    data = [trace for trace in content["data"] if trace.get("yaxis", "y") not in strips]
    return content | {"data": data, "layout": kept}


def _axes(content: Json) -> list[str]:
    return [f"y{key[5:]}" for key in content["layout"] if key.startswith("yaxis")]


def _key(axis: str) -> str:
    return f"yaxis{axis[1:]}"
