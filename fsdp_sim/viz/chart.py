"""The frame that all charts share: a sentence on top, room around, and series told apart by colour, sign and dash."""

from __future__ import annotations

import math
import textwrap
from typing import Any, NamedTuple

import plotly.graph_objects as go

from fsdp_sim.viz import theme
from fsdp_sim.viz.theme import safe

TITLE_LINE, TITLE_CHARS = 24, 80
FEWEST_TICKS, MOST_TICKS = 4, 9


class Series(NamedTuple):
    """How the marks and lines of one series look."""

    color: str
    symbol: str
    dash: str
    pattern: str


SERIES = (
    Series("#0072B2", "circle", "solid", ""),
    Series("#E69F00", "square", "dash", "/"),
    Series("#009E73", "diamond", "dot", "x"),
    Series("#D55E00", "triangle-up", "dashdot", "\\"),
    Series("#CC79A7", "cross", "longdash", "."),
    Series("#56B4E9", "x", "longdashdot", "-"),
    Series("#8C959F", "star", "solid", "|"),
)


# The same signs as text.
MARKS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "x": "✖", "star": "★"}


def series(number: int) -> Series:
    """The look of a series; the eighth looks like the first."""
    return SERIES[number % len(SERIES)]


def frame(
    figure: go.Figure,
    sentence: str,
    *,
    plot_px: float,
    left: int = 76,
    right: int = 28,
    bottom: int = 56,
    above: int = 12,
) -> None:
    """Give a figure its title, a plain sentence, and its height.

    Args:
        plot_px: height of all panels together.
        above: pixels between the title and the panels.
    """
    lines = textwrap.wrap(sentence, TITLE_CHARS)
    title_px = 20 + TITLE_LINE * len(lines)
    top = title_px + above
    figure.update_layout(
        template=theme.LIGHT,
        height=round(top + plot_px + bottom),
        margin={"l": left, "r": right, "t": top, "b": bottom, "autoexpand": False},
        hovermode="closest",
        uirevision="keep",
        title={
            "font": {"size": 17, "weight": 600},
            "pad": {"l": 2},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "yref": "container",
            "yanchor": "top",
        },
    )
    _write_title(figure, lines)


def _write_title(figure: go.Figure, lines: list[str]) -> None:
    shift = 14 + (TITLE_LINE / 2 if len(lines) > 1 else 0)  # plotly.js 4 sets several lines half a line higher
    figure.update_layout(title={"text": "<br>".join(map(safe, lines)), "y": 1 - shift / figure.layout.height})


def retitled(figure: go.Figure, sentence: str) -> go.Figure:
    """A figure with another title, and as much higher or lower as that has more or fewer lines."""
    figure, lines = go.Figure(figure), textwrap.wrap(sentence, TITLE_CHARS)
    more_px = TITLE_LINE * (len(lines) - 1 - figure.layout.title.text.count("<br>"))
    was_px, is_px = figure.layout.height, figure.layout.height + more_px
    figure.update_layout(height=is_px, margin_t=figure.layout.margin.t + more_px)
    for legend in (figure.layout[name] for name in figure.layout if name in ("legend", "legend2")):
        if legend.yref == "container":  # it lies below the title, and keeps its distance from the plot
            legend.y = 1 - ((1 - legend.y) * was_px + more_px) / is_px
    _write_title(figure, lines)
    return figure


def write(figure: go.Figure, text: str, *, muted: bool = False, **place: Any) -> None:
    """A line of text, by default at a place given as parts of the plot."""
    opacity = theme.MUTED_OPACITY if muted else 1.0
    plain = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}}
    figure.add_annotation(plain | place, text=text, showarrow=False, opacity=opacity)


def log_axis(low: float, high: float, *, room: float = 0.06) -> dict[str, Any]:
    """A logarithmic axis from ``low`` to ``high`` with a little room.

    It is marked at 1, 2, 5, 10, ..., at whole powers where it is long, and evenly where it is short.

    Example:
        >>> log_axis(8, 640)["tickvals"], log_axis(110, 190)["tickvals"]
        ([10.0, 20.0, 50.0, 100.0, 200.0, 500.0], [120.0, 140.0, 160.0, 180.0])
    """
    if high < 1.1 * low:  # as good as one value, which is then in the middle
        low, high = low / 2, high * 2
    ends = [math.log10(low), math.log10(high)]
    pad = room * (ends[1] - ends[0])
    first, last = math.floor(ends[0] - pad), math.ceil(ends[1] + pad)
    marks = [
        [s * 10.0**power for power in range(first, last + 1) for s in steps] for steps in ((1.0, 2.0, 5.0), (1.0,))
    ]
    inside = [[v for v in some if ends[0] - pad <= math.log10(v) <= ends[1] + pad] for some in marks]
    shown = inside[0] if len(inside[0]) <= MOST_TICKS else inside[1]
    if len(shown) < FEWEST_TICKS:  # about a decade: plain numbers, evenly apart
        shown = _even(10 ** (ends[0] - pad), 10 ** (ends[1] + pad))
    return {
        "type": "log",
        "range": [ends[0] - pad, ends[1] + pad],
        "tickvals": shown,
        "ticktext": [short(v) for v in shown],
    }


def _even(low: float, high: float) -> list[float]:
    """Round numbers between two, four to eight of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    return [float(f"{n * step:.10g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1) if n]


def short(value: float) -> str:
    """A number for an axis: ``1.5 k``, ``20``, ``0.5``, ``3 M``."""
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"
