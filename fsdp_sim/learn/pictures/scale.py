"""How good steps and months are: utilisation of published runs, goodput over the interval of checkpoints, idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fsdp_sim.learn.pictures.overlap import lines as lines_of
from fsdp_sim.viz import Picture, Table, chart, theme
from fsdp_sim.viz.theme import safe

ROW_PX, SPREAD = 84, 0.16  # of a row; a mark's place above or below the middle of its part of the row
LEGEND = {"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"}
HOUR_S = 3600


def utilisations(
    runs: Mapping[str, Mapping[str, Sequence[float]]], sentence: str, limits: Mapping[str, float] = {}
) -> Picture:
    """Runs as dots over the part of the peak that they reach: a row for each kind of GPU, a mark for each way to run.

    Args:
        runs: by row, and by way in it, the utilisation of each run, 0 to 1.
        sentence: the title; what is to be seen.
        limits: lines that cannot be passed, by name.
    """
    figure, ways = go.Figure(), list(dict.fromkeys(way for of in runs.values() for way in of))
    for number, way in enumerate(ways):
        look = chart.series(number)
        middle = 0.4 * (number - (len(ways) - 1) / 2)
        dots = [(x, row + middle + lift) for row, of in enumerate(runs.values()) for x, lift in _apart(of.get(way, ()))]
        figure.add_scatter(
            x=[x for x, _ in dots], y=[y for _, y in dots], mode="markers", name=safe(way), hovertemplate="%{x:.1%}",
            marker={"color": look.color, "symbol": look.symbol, "size": 8, "opacity": 0.7},
        )  # fmt: skip
    for name, limit in limits.items():
        figure.add_vline(limit, line={"color": theme.LIMIT, "width": 2, "dash": "dash"})
        chart.write(figure, safe(name), x=limit, xref="x", y=1, yshift=2, xanchor="right", font={"size": 12})
    chart.frame(
        figure, sentence, plot_px=ROW_PX * len(runs), left=24 + 8 * max(map(len, runs)), bottom=96, above=34
    )  # fmt: skip
    figure.update_layout(legend=LEGEND)
    figure.update_xaxes(title="MFU, of the dense bf16 peak", range=[0, 1.02], tickformat=".0%")
    ticks = {"tickvals": list(range(len(runs))), "ticktext": [safe(name) for name in runs]}
    figure.update_yaxes(range=[len(runs) - 0.5, -0.5], showgrid=False, **ticks)
    rows = tuple(
        (row, way, f"{len(of)}", f"{min(of):.0%}", f"{np.median(of):.0%}", f"{max(of):.0%}")
        for row, ways_of in runs.items()
        for way, of in ways_of.items()
        if of
    )
    text = "; ".join(f"{row}, {way}: {low} to {high}" for row, way, _, low, _, high in rows)
    table = Table("of the peak", ("", "", "runs", "least", "median", "most"), rows)
    return Picture(figure, f"{sentence}. {text}.", (table,))


def _apart(values: Sequence[float]) -> list[tuple[float, float]]:
    """Each value with a place above or below, so that equal ones do not hide each other."""
    return [(value, SPREAD * ((7 * n % 11) / 5 - 1)) for n, value in enumerate(sorted(values))]


def goodputs(
    lines: Mapping[str, Mapping[float, float]],
    played: Mapping[str, Mapping[float, float]],
    chosen: Mapping[str, float],
    sentence: str,
) -> Picture:
    """Goodput over the time between two checkpoints: curves, marks of what was played, and a ring at what was chosen.

    Args:
        lines, played: by name, goodput (0 to 1) by the seconds between two checkpoints; the same names.
        chosen: by name, the seconds that were chosen, each of them on the curve.
        sentence: the title; what is to be seen.
    """
    figure, rows = go.Figure(), []
    for number, (name, line) in enumerate(lines.items()):
        look, every_s = chart.series(number), chosen[name]
        figure.add_scatter(
            x=list(line), y=list(line.values()), mode="lines", name=safe(name),
            line={"color": look.color, "dash": look.dash, "width": 2.5}, hovertemplate="%{y:.1%}",
        )  # fmt: skip
        figure.add_scatter(
            x=list(played[name]), y=list(played[name].values()), mode="markers", showlegend=False,
            marker={"color": look.color, "symbol": look.symbol, "size": 8}, hovertemplate="played: %{y:.1%}",
        )  # fmt: skip
        ring = {"color": "rgba(0,0,0,0)", "size": 20, "line": {"color": "#8C959F", "width": 2}}
        figure.add_scatter(x=[every_s], y=[line[every_s]], mode="markers", showlegend=False, marker=ring)
        side = {"yanchor": "top", "yshift": -12} if number else {"yanchor": "bottom", "yshift": 12}
        label: dict[str, Any] = side | {"x": np.log10(every_s), "xref": "x", "y": line[every_s], "yref": "y"}
        chart.write(figure, f"{_in_words(every_s)}: {line[every_s]:.1%}", **label, xanchor="center")
        rows.append((name, _in_words(every_s), f"{line[every_s]:.1%}"))
    chart.frame(figure, sentence, plot_px=320, bottom=96)
    figure.update_layout(legend=LEGEND)
    times = [60, 600, HOUR_S, 6 * HOUR_S, 24 * HOUR_S, 168 * HOUR_S]
    ends = [min(min(line) for line in lines.values()), max(max(line) for line in lines.values())]
    ticks = {"tickvals": times, "ticktext": [_in_words(s) for s in times]}
    figure.update_xaxes(chart.log_axis(*ends) | ticks, title="training between two checkpoints")
    figure.update_yaxes(title="goodput", tickformat=".0%", range=[0, 1.12])
    text = "; ".join(f"{name}: {share} with a checkpoint every {every}" for name, every, share in rows)
    return Picture(figure, f"{sentence}. {text}.", (Table("goodput", ("", "every", "goodput"), tuple(rows)),))


def idle(lines: Mapping[str, Mapping[int, float]], sentence: str) -> Picture:
    """The part of a step in which a GPU waits, over the sequences that it gets.

    Args:
        lines: by name, the part (0 to 1) by the number of sequences, which are the same in all.
        sentence: the title; what is to be seen.
    """
    counts = list(next(iter(lines.values())))
    figure = lines_of(counts, {name: list(line.values()) for name, line in lines.items()}, sentence)
    ticks = {"tickvals": counts, "ticktext": [str(count) for count in counts]}
    figure.update_xaxes(chart.log_axis(counts[0], counts[-1]) | ticks, title="sequences per GPU and step")
    figure.update_yaxes(title="bubble or exposed", tickformat=".0%", rangemode="tozero")
    rows = tuple((str(n), *(f"{line[n]:.1%}" for line in lines.values())) for n in counts)
    text = "; ".join(f"{name}: {line[counts[0]]:.0%} to {line[counts[-1]]:.1%}" for name, line in lines.items())
    return Picture(figure, f"{sentence}. {text}.", (Table("of the step", ("sequences", *lines), rows),))


def _in_words(seconds: float) -> str:
    """``19 min``, ``1.3 h``, ``7 days``."""
    for size, name in ((24 * HOUR_S, "days"), (HOUR_S, "h"), (60, "min")):
        if seconds >= 2 * size or (name == "h" and seconds >= size):
            return f"{seconds / size:.2g} {name}"
    return f"{seconds / 60:.2g} min"
