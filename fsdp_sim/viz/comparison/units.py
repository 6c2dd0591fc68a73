"""What each unit gains or loses from one timeline to another: the strip below the lanes, and the tables."""

from __future__ import annotations

import plotly.graph_objects as go

from fsdp_sim.timeline import Comparison, UnitDifference
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import LegendKind, safe, short_unit
from fsdp_sim.words import human_ms, signed_ms

MAX_UNIT_LABELS = 28
FEW_UNITS = 8  # bars of fewer are drawn as wide as if there were as many


def draw_strip(
    figure: go.Figure,
    found: Comparison,
    names: tuple[str, str],
    units: list[UnitDifference],
    domain: list[float],
    *,
    idles: bool,
) -> None:
    """How much longer each unit computes and is exposed in b, and the rest, idle time, where ``idles`` says so."""
    rest = [found.causes.idle_s * 1e3] if idles else []
    labels = [*(u.unit or "step" for u in units), *("idle" for _ in rest)]
    places = list(range(len(labels)))
    compute = [u.compute_s * 1e3 for u in units] + [0.0 for _ in rest]
    exposed = [u.exposed_s * 1e3 for u in units] + [0.0 for _ in rest]
    idle = [0.0] * len(units) + rest
    parts = (
        (LegendKind("computing", theme.FORWARD.color), compute),
        (theme.EXPOSED, exposed),
        (LegendKind("neither computing nor communicating", theme.COPY.color), idle),
    )
    for kind, values in parts:
        outline = {"color": kind.text_color, "width": 0.75} if kind is theme.EXPOSED else {"width": 0}
        figure.add_trace(
            go.Bar(
                x=places, y=values, base=_bases(values, compute) if kind is theme.EXPOSED else None,
                name=kind.name, showlegend=False, hoverinfo="text", width=0.8 * min(1.0, len(labels) / FEW_UNITS),
                hovertext=[f"<b>{safe(u)}</b><br>{kind.name} {v:+.3g} ms" for u, v in zip(labels, values, strict=True)],
                marker={"color": kind.color, "pattern": theme.hatch(kind), "line": outline},
            )
        )  # fmt: skip
    every = -(-len(labels) // MAX_UNIT_LABELS)
    ticks = [n for n in places if n % every == 0 or n == places[-1]]
    if len(ticks) > 1 and ticks[-1] - ticks[-2] < every:
        ticks.pop(-2)
    sums = [c + e + i for c, e, i in zip(compute, exposed, idle, strict=True)]
    extreme = max(map(abs, [*sums, *compute, *exposed]), default=0.0)
    figure.update_layout(
        xaxis={
            "anchor": "y",
            "fixedrange": True,
            "showgrid": False,
            "range": [-0.6, len(labels) - 0.4],
            "tickvals": ticks,
            "ticktext": [safe(short_unit(labels[n])) for n in ticks],
            "tickangle": 0 if all(len(short_unit(labels[n])) <= 5 for n in ticks) else -40,
        },
        yaxis={
            "domain": domain,
            "anchor": "x",
            "fixedrange": True,
            "nticks": 5,
            "zeroline": True,
            "zerolinecolor": theme.SEPARATOR,
            "zerolinewidth": 1.5,
            "ticksuffix": " ms",
            "range": None if extreme else [-1, 1],
        },
    )
    heading = f"<b>what each unit gains (below 0) or loses in {safe(names[1])}</b>, with blocks by number"
    chart.write(figure, heading, x=0, y=domain[1], yshift=4)


def _bases(values: list[float], on: list[float]) -> list[float]:
    """Where the second part of a bar begins: on the first, if both point the same way."""
    return [first if value * first > 0 else 0.0 for value, first in zip(values, on, strict=True)]


def tables(found: Comparison, names: tuple[str, str]) -> tuple[Table, ...]:
    a, b, causes = found.a, found.b, found.causes
    rows = [
        ("step time", a.step_s, b.step_s, found.step_difference_s),
        ("computing", a.compute_s, b.compute_s, causes.compute_s),
        ("communicating", a.comm_s, b.comm_s, causes.comm_s),
        ("of that hidden", a.comm_s - a.exposed_s, b.comm_s - b.exposed_s, causes.hidden_s),
        ("of that exposed", a.exposed_s, b.exposed_s, causes.exposed_s),
        ("neither computing nor communicating", a.idle_s, b.idle_s, causes.idle_s),
    ]
    sentences = tuple((what, human_ms(x), human_ms(y), signed_ms(d)) for what, x, y, d in rows)
    unit_rows = []
    for u in found.units:
        cells = [
            "none" if side is None else human_ms(getattr(side, name))
            for name in ("start_s", "compute_s", "comm_s", "exposed_s")
            for side in (u.a, u.b)
        ]
        unit_rows.append((u.unit or "step", *cells, signed_ms(u.lost_s)))
    columns = [f"{what}, {name}" for what in ("starts", "computes", "communicates", "exposed") for name in names]
    return (
        Table("Where the difference of the two steps went", ("", *names, "difference"), sentences),
        Table("By unit", ("unit", *columns, "gained or lost"), tuple(unit_rows)),
    )
