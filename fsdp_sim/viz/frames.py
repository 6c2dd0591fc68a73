"""A figure that moves: plotly frames with a slider to scrub through them and buttons to play and to step.

[Note: no JavaScript of our own]  A frame also carries the targets of the buttons "back" and "next", so that they step
from wherever the figure is, in a saved page and in a notebook alike. It carries the height as well: JupyterLab's
renderer drops it from the layout after the first drawing, and a redrawn figure would collapse.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz.theme import safe

SLIDER_PX, BUTTONS_PX = 44, 44  # heights
LONGEST_PLAY_S = 240
SENTENCE_CHARS = 86  # of a line


def add_player(
    figure: go.Figure,
    frames: Sequence[Sequence[Any]],
    traces: Sequence[int],
    labels: Sequence[str],
    *,
    seconds_each: float,
) -> None:
    """Give a figure its frames, and the means to move through them below its plot.

    Args:
        frames: for each frame the traces as they are then, without what stays the same.
        traces: which traces of the figure these are.
        labels: a name for each frame.
        seconds_each: how long a frame stays when it plays.
    """
    names = [str(number) for number in range(len(frames))]
    each_ms = round(min(seconds_each, LONGEST_PLAY_S / max(len(frames), 1)) * 1e3)
    now = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    play = now | {"frame": {"duration": each_ms, "redraw": True}, "fromcurrent": True}

    def buttons(at: int) -> list[dict[str, Any]]:
        back, after = names[max(at - 1, 0)], names[min(at + 1, len(names) - 1)]
        return [
            {"label": "▶ play", "method": "animate", "args": [None, play]},
            {"label": "❚❚ pause", "method": "animate", "args": [[None], now]},
            {"label": "◀ back", "method": "animate", "args": [[back], now]},
            {"label": "next ▶", "method": "animate", "args": [[after], now]},
        ]

    def layout(at: int) -> dict[str, Any]:
        return {"updatemenus": [{"buttons": buttons(at)}], "height": figure.layout.height}

    figure.frames = [
        go.Frame(name=name, data=list(data), traces=list(traces), layout=layout(at))
        for at, (name, data) in enumerate(zip(names, frames, strict=True))
    ]
    figure.update_layout(
        sliders=[
            {
                "active": 0,
                "x": 0,
                "len": 1,
                "y": 0,
                "yanchor": "top",
                "pad": {"t": 14, "b": 0, "l": 0, "r": 0},
                "currentvalue": {"visible": False},
                "bgcolor": "rgba(110,125,140,0.25)",
                "activebgcolor": "#0072B2",
                "bordercolor": "rgba(110,125,140,0.45)",
                "tickcolor": "rgba(110,125,140,0.45)",
                "ticklen": 4,
                "minorticklen": 3,
                "font": {"size": 1, "color": "rgba(0,0,0,0)"},
                "transition": {"duration": 0},
                "steps": [
                    {"method": "animate", "label": label, "value": name, "args": [[name], now]}
                    for name, label in zip(names, labels, strict=True)
                ],
            }
        ],
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "showactive": False,
                "x": 1,
                "xanchor": "right",
                "y": 0,
                "yanchor": "top",
                "pad": {"t": SLIDER_PX + 6, "b": 0, "l": 0, "r": 0},
                "bgcolor": "rgba(110,125,140,0.12)",
                "bordercolor": "rgba(110,125,140,0.45)",
                "font": {"size": 12},
                "buttons": buttons(0),
            }
        ],
    )


def title_of(text: str, height_px: float, size: int = 18) -> dict[str, Any]:
    """A title at the left of the whole figure; the text is escaped."""
    return {
        "text": safe(text), "font": {"size": size, "weight": 600}, "x": 0, "xref": "container", "xanchor": "left",
        "yref": "container", "y": 1 - 12 / height_px, "yanchor": "top", "pad": {"l": 8},
    }  # fmt: skip


def legend_at(height_px: float, *, top_px: float | None = None) -> dict[str, Any]:
    """A legend along the bottom of the figure, or so far from its top; a click on it hides nothing."""
    place = {"y": 6 / height_px, "yanchor": "bottom"} if top_px is None else {"y": 1 - top_px / height_px}
    return {
        "orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top",
        "itemclick": False, "itemdoubleclick": False, "tracegroupgap": 0, "traceorder": "normal", **place,
    }  # fmt: skip


def sentence_of(number: int, of: int, label: str, text: str) -> str:
    """What a frame says: its number among all, its label and, on up to two lines, its text, which is escaped."""
    lines = textwrap.wrap(text, SENTENCE_CHARS, max_lines=2, placeholder=" ...")
    return "<br>".join([f"<b>{number + 1} of {of} · {label}</b>", *map(safe, lines)])


def words_of(text: str) -> go.Scatter:
    """The sentence of a frame, on axes of its own: ``x2`` and ``y2``, as `words_axes` lays them out."""
    return go.Scatter(
        x=[0], y=[1], xaxis="x2", yaxis="y2", mode="text", textposition="bottom right", hoverinfo="skip", text=[text],
        textfont={"size": 16}, showlegend=False, cliponaxis=False,
    )  # fmt: skip


def words_axes(bottom: float) -> dict[str, Any]:
    """The axes of the sentence: the top of the plot, down to ``bottom``."""
    hidden = {"range": [0, 1], "visible": False, "fixedrange": True}
    return {
        "xaxis2": hidden | {"domain": [0, 1], "anchor": "y2"},
        "yaxis2": hidden | {"domain": [bottom, 1], "anchor": "x2"},
    }
