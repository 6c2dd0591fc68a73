"""A model cut into units: which module belongs to which, how large each is, and what different cuts cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from torch import nn

from fsdp_sim.viz import Picture, Table, chart
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes, human_ms

ROOT = "root"
ROW_PX = 34
ROOT_LOOK = 6  # grey: of no block


def owners(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """For each parameter, the unit that has it: the innermost of ``names`` around it, or the root.

    Example:
        >>> owners(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), ["1"])
        {'0.weight': 'root', '1.weight': '1'}
    """
    found = {}
    for param, _ in model.named_parameters():
        around = [name for name in names if param.startswith(f"{name}.")]
        found[param] = max(around, key=len, default=ROOT)
    return found


def cuts(model: nn.Module, ways: Mapping[str, Sequence[str]], sentence: str) -> Picture:
    """Several ways to cut a model into units, each a row: a piece is a unit, as wide as its parameters are many.

    Args:
        model: may be on the meta device.
        ways: by name, the full names of the modules that are units, the root left out.
        sentence: the title; what is to be seen.
    """
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    figure, rows, said = go.Figure(), [], []
    for way, names in ways.items():
        of = owners(model, names)
        units = {unit: sum(sizes[p] for p, owner in of.items() if owner == unit) for unit in dict.fromkeys(of.values())}
        ordered = sorted(units, key=lambda unit: unit == ROOT)  # the root last
        for number, unit in enumerate(ordered):
            look = chart.series(ROOT_LOOK if unit == ROOT else number % 2)
            pattern = {"shape": "x" if unit == ROOT else look.pattern, "fillmode": "overlay", "fgcolor": "white"}
            label = ROOT if unit == ROOT else unit.rsplit(".", 1)[-1]
            figure.add_bar(
                x=[units[unit] / 1e6], y=[safe(way)], orientation="h", showlegend=False,
                marker={"color": look.color, "pattern": pattern | {"size": 7, "fgopacity": 0.35},
                        "line": {"color": "white", "width": 1.5}},
                text=label if units[unit] > 0.04 * sum(sizes.values()) else None, textposition="inside",
                insidetextanchor="middle", hovertext=f"{safe(unit)}: {units[unit]:,}", hoverinfo="text",
            )  # fmt: skip
        largest = max(units, key=lambda unit: units[unit])
        counted = f"{len(units)} unit{'s' * (len(units) != 1)}"
        said.append(f"{way}: {counted}, the largest {units[largest]:,} ({largest})")
        rows.append((way, f"{len(units)}", f"{units[largest]:,} ({largest})", f"{units.get(ROOT, 0):,}"))
        figure.add_annotation(
            x=sum(units.values()) / 1e6, y=safe(way), text=f"<b>{counted}</b>", showarrow=False,
            xanchor="left", xshift=6,
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    chart.frame(figure, sentence, plot_px=ROW_PX * len(ways) + 30, left=24 + 8 * max(map(len, ways)))
    figure.update_xaxes(title="parameters (millions); grey is the root")
    figure.update_yaxes(autorange="reversed", type="category")
    table = Table("units", ("cut", "units", "the largest", "in the root"), tuple(rows))
    return Picture(figure, f"{sentence}. {'; '.join(said)}.", (table,))


def whole_at_once(peaks_bytes: Mapping[str, int], floor_bytes: int, floor: str, sentence: str) -> Picture:
    """Peaks of memory beside each other, and a line below which none can be.

    Args:
        peaks_bytes: by name.
        floor_bytes, floor: the line, and what it is.
        sentence: the title; what is to be seen.
    """
    figure = go.Figure()
    for number, (name, n_bytes) in enumerate(peaks_bytes.items()):
        look = chart.series(number)
        figure.add_bar(
            x=[n_bytes / 2**20], y=[safe(name)], orientation="h", showlegend=False,
            marker={"color": look.color, "pattern": {"shape": look.pattern, "fillmode": "overlay", "fgcolor": "white"}},
            text=human_bytes(n_bytes), textposition="outside", cliponaxis=False,
        )  # fmt: skip
    x = floor_bytes / 2**20
    line = {"color": "#8C959F", "dash": "dash", "width": 1.5}
    figure.add_shape(type="line", x0=x, x1=x, xref="x", y0=0, y1=1, yref="paper", line=line)
    chart.write(figure, floor, muted=True, x=x, xref="x", y=1, yshift=2, xanchor="center")
    chart.frame(
        figure, sentence, plot_px=44 * len(peaks_bytes) + 20, left=24 + 8 * max(map(len, peaks_bytes)), right=90,
        above=30,
    )  # fmt: skip
    figure.update_xaxes(title="most bytes held at once (MiB)", range=[0, 1.05 * max(peaks_bytes.values()) / 2**20])
    figure.update_yaxes(autorange="reversed", type="category")
    rows = tuple((name, human_bytes(n_bytes)) for name, n_bytes in peaks_bytes.items())
    text = "; ".join(f"{name} {size}" for name, size in rows)
    return Picture(figure, f"{sentence}. {text}.", (Table("peak", ("", "at most"), rows),))


def over_units(units: Sequence[int], times_s: Sequence[float], peaks_bytes: Sequence[int], sentence: str) -> Picture:
    """A step's time, and below it what is whole at most, over the number of units.

    Args:
        units: ascending.
        sentence: the title; what is to be seen.
    """
    figure = go.Figure()
    values = {"y": [1e3 * time_s for time_s in times_s], "y2": [n_bytes / 2**20 for n_bytes in peaks_bytes]}
    for number, (axis, numbers) in enumerate(values.items()):
        look = chart.series(number)
        figure.add_scatter(
            x=list(units), y=numbers, yaxis=axis, mode="lines+markers", showlegend=False,
            line={"color": look.color, "dash": look.dash, "width": 2.5},
            marker={"color": look.color, "symbol": look.symbol, "size": 9},
        )  # fmt: skip
    best = min(range(len(units)), key=lambda i: times_s[i])
    figure.add_annotation(x=math.log10(units[best]), y=values["y"][best], text="fastest", showarrow=False, yshift=-16)
    figure.update_layout(
        xaxis=chart.log_axis(units[0], units[-1])
        | {"anchor": "y2", "title": "equal units", "tickvals": list(units), "ticktext": [f"{n}" for n in units]},
        yaxis={"domain": [0.55, 1], "title": "step (ms)", "rangemode": "tozero"},
        yaxis2={"domain": [0, 0.4], "title": "whole at once (MiB)", "rangemode": "tozero"},
    )
    chart.frame(figure, sentence, plot_px=360)
    rows = tuple(
        (str(n), human_ms(time_s), human_bytes(n_bytes))
        for n, time_s, n_bytes in zip(units, times_s, peaks_bytes, strict=True)
    )
    text = f"With {rows[0][0]} unit {rows[0][1]} and {rows[0][2]}, with {rows[-1][0]} {rows[-1][1]} and {rows[-1][2]}"
    fastest = f"fastest with {rows[best][0]}: {rows[best][1]} and {rows[best][2]}"
    table = Table("cuts", ("units", "step", "whole at once"), rows)
    return Picture(figure, f"{sentence}. {text}; {fastest}.", (table,))
