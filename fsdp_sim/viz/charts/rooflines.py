"""`roofline`: how much work there is for each byte, of memory and of the network, against what the hardware can do."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Phase
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.chart import short
from fsdp_sim.viz.charts.intensity import (
    KernelPoint,
    UnitPoint,
    alike,
    compute_flops_per_s,
    kernel_points,
    network_bytes_per_s,
    peak_of,
    unit_points,
)
from fsdp_sim.viz.charts.roofline_words import finding, gpus, headline, named, tables
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.theme import safe, short_unit
from fsdp_sim.words import human_bytes, human_ms

PLOT_PX = 360
GAP = 0.10  # between the two panels, as part of their width
SYMBOLS = {"matmul": "circle", "attention": "diamond"}  # with a dot in it: backward
LEFT_OF_RIDGE = "rgba(213,94,0,0.10)"
MAX_LABELS = 4


def roofline(sim: Simulation) -> Picture:
    """Two rooflines with the same height. Left, each kernel's FLOP per byte of memory, under the GPU's roofs.

    Right, each unit's FLOP per byte that it communicates, under the roofs of the network and of the compute the step
    reaches: left of where they meet, a unit's communication takes longer than its compute and cannot hide behind it.

    Args:
        sim: a simulation.

    Example:
        >>> from fsdp_sim import Cluster, Plan, simulate
        >>> picture = roofline(simulate("gpt2-124m", Cluster("A100", gpus=8), Plan(micro_batch=8)))
        >>> picture.finding.splitlines()[0].split(":")[0]
        'To be bound by compute on A100-SXM-80GB, a kernel needs 10 FLOP per byte of memory'
    """
    kernels, units = kernel_points(sim), unit_points(sim)
    rate = network_bytes_per_s(sim)
    return Picture(_figure(sim, kernels, units, rate), finding(sim, kernels, units, rate), tables(kernels, units, rate))


def _figure(sim: Simulation, kernels: Sequence[KernelPoint], units: Sequence[UnitPoint], rate: float) -> go.Figure:
    figure = go.Figure()
    gpu, device = sim.cluster.gpu, "GPU" if sim.cluster.kind == "gpu" else "CPU"
    peak, dtype = peak_of(sim, kernels)
    working = [k for k in kernels if k.kernel.flops and k.kernel.bytes]
    talking = [u for u in units if u.bytes and u.flops]
    reached = compute_flops_per_s(units)
    heights = [k.flops_per_s for k in working] + [u.flops_per_s for u in talking] + [peak]
    floor, ceiling = min(heights) / 3, peak * 1.8
    left = _range([k.intensity for k in working] + [peak / gpu.mem_bytes_per_s])
    _roof(figure, gpu.mem_bytes_per_s, peak, left, floor, 1)
    roof = f"{short(peak)}FLOP/s, {dtype}"
    _say(figure, 1, left[1], peak, roof, xanchor="right", yanchor="bottom", yshift=2)
    _say_slope(figure, 1, gpu.mem_bytes_per_s, left, floor, f"{short(gpu.mem_bytes_per_s)}B/s of memory")
    for backward, kind in ((False, theme.FORWARD), (True, theme.BACKWARD)):
        _kernel_marks(figure, [k for k in working if k.backward is backward], kind)
    _kernel_labels(figure, working, sum(k.seconds for k in kernels))
    right = _range([u.intensity for u in talking] + ([reached / rate] if rate else []))
    if talking and rate:
        _network(figure, talking, rate, reached, right, floor)
    else:
        middle = (right[0] * right[1]) ** 0.5
        _say(figure, 2, middle, (floor * ceiling) ** 0.5, f"Nothing communicates on {gpus(sim)}.", xanchor="center")
    y = chart.log_axis(floor, ceiling, room=0) | {"fixedrange": True}
    y["ticktext"] = [f"{text}FLOP/s" for text in y["ticktext"]]
    half = (1 - GAP) / 2
    axis = {"title": {"standoff": 6}}
    figure.update_layout(
        yaxis=y,
        yaxis2=y | {"showticklabels": False, "matches": "y", "anchor": "x2"},
        xaxis=chart.log_axis(*left, room=0) | axis | {"domain": [0, half], "title_text": "FLOP per byte of memory"},
        xaxis2=chart.log_axis(*right, room=0)
        | axis
        | {"domain": [1 - half, 1], "title_text": "FLOP per byte communicated", "anchor": "y2"},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "y": 0, "yref": "container",
                "yanchor": "bottom", "itemsizing": "constant"},
    )  # fmt: skip
    ringed = "" if all(u.hidden for u in talking) else ", ringed: cannot hide"
    chart.write(figure, f"<b>each kernel against the {device}</b>, % of the time", x=0, y=1, yshift=6)
    chart.write(figure, f"<b>each unit against the network</b>{ringed}", x=1 - half, y=1, yshift=6)
    chart.frame(figure, headline(talking, rate), plot_px=PLOT_PX, left=100, above=34, bottom=84)
    return figure


def _range(values: Sequence[float]) -> tuple[float, float]:
    found = [v for v in values if 0 < v < float("inf")] or [1.0]
    return min(found) / 6, max(found) * 9


def _axes(panel: int) -> dict[str, str]:
    return {"xaxis": "x", "yaxis": "y"} if panel == 1 else {"xaxis": "x2", "yaxis": "y2"}


def _roof(figure: go.Figure, per_byte: float, flat: float, ends: tuple[float, float], floor: float, panel: int) -> None:
    """The two straight lines: what the bytes allow, and what the compute allows."""
    low = max(ends[0], floor / per_byte)
    x = [low, flat / per_byte, ends[1]]
    line = {"color": theme.COPY.color, "width": 2.5}
    figure.add_trace(
        go.Scatter(
            x=x, y=[low * per_byte, flat, flat], mode="lines", line=line, hoverinfo="skip", showlegend=False,
            name="roof", **_axes(panel),
        )
    )  # fmt: skip


def _say(figure: go.Figure, panel: int, x: float, y: float, text: str, **place: Any) -> None:
    """Words at a point of a panel with logarithmic axes, whose annotations plotly places by the power of ten."""
    axes = _axes(panel)
    plain = {"xref": axes["xaxis"], "yref": axes["yaxis"], "x": log10(x), "y": log10(y), "font": {"size": 11}}
    figure.add_annotation(plain | place, text=text, showarrow=False)


def _say_slope(
    figure: go.Figure, panel: int, per_byte: float, ends: tuple[float, float], floor: float, text: str
) -> None:
    """Words right of the foot of a slope."""
    foot = max(ends[0], floor / per_byte)
    _say(figure, panel, foot * 1.15, foot * per_byte * 1.15, text, xanchor="left", yanchor="middle", xshift=10)


def _kernel_marks(figure: go.Figure, points: Sequence[KernelPoint], kind: theme.LegendKind) -> None:
    if not points:
        return
    hover = []
    for p in points:
        shape = " × ".join(map(str, p.kernel.shape))
        hover.append(
            f"<b>{p.kernel.kind} {shape}</b>, {kind.name}<br>{p.intensity:,.0f} FLOP/byte, {short(p.flops_per_s)}FLOP/s"
            f"<br>{p.calls} a step, {human_ms(p.seconds)}<br>{named(p.units)}"
        )
    most = max(p.seconds for p in points)
    figure.add_trace(
        go.Scatter(
            x=[p.intensity for p in points], y=[p.flops_per_s for p in points], mode="markers", name=kind.name,
            hovertext=hover, hoverinfo="text", legendgroup=kind.name,
            marker={
                "color": kind.color, "opacity": 0.85, "line": {"width": 1, "color": "#FFFFFF"},
                "symbol": [SYMBOLS.get(p.kernel.kind, "square") + ("-dot" if p.backward else "") for p in points],
                "size": [7 + 13 * (p.seconds / most) ** 0.5 for p in points],
            },
        )
    )  # fmt: skip


def _kernel_labels(figure: go.Figure, working: Sequence[KernelPoint], all_s: float) -> None:
    """For each kind of kernel its part of the compute time, right of the one that takes longest."""
    for kind in dict.fromkeys(p.kernel.kind for p in working):
        mine = [p for p in working if p.kernel.kind == kind]
        share = sum(p.seconds for p in mine) / all_s
        x = max(p.intensity for p in mine)
        text = f"{kind} {share:.0%}" if share >= 0.005 else f"{kind} <1%"
        _say(figure, 1, x, mine[0].flops_per_s, safe(text), xanchor="left", yanchor="middle", xshift=14)


def _network(
    figure: go.Figure,
    talking: Sequence[UnitPoint],
    rate: float,
    reached: float,
    ends: tuple[float, float],
    floor: float,
) -> None:
    _roof(figure, rate, reached, ends, floor, 2)
    ridge = reached / rate
    shade = {"type": "rect", "xref": "x2", "yref": "paper", "x0": ends[0], "x1": ridge, "y0": 0, "y1": 1}
    figure.add_shape(shade, fillcolor=LEFT_OF_RIDGE, line={"width": 0}, layer="below", name="left of the ridge")
    corner = {"xref": "x2 domain", "x": 0.02, "xanchor": "left", "yref": "paper", "y": 0.985, "yanchor": "top"}
    label = "communication<br>takes longer<br>than compute"
    figure.add_annotation(corner, text=label, align="left", showarrow=False, font={"size": 11})
    line = {"color": theme.SEPARATOR, "width": 1.5, "dash": "dot"}
    figure.add_shape(type="line", xref="x2", yref="y2", x0=ends[0], x1=ridge, y0=reached, y1=reached, line=line)
    label = f"{short(reached)}FLOP/s reached"
    _say(figure, 2, ends[0], reached, label, xanchor="left", yanchor="bottom", yshift=2, xshift=2)
    _say_slope(figure, 2, rate, ends, floor, f"{short(rate)}B/s of network")
    labelled: list[tuple[str, float, float]] = []
    for phase, kind in ((Phase.FORWARD, theme.FORWARD), (Phase.BACKWARD, theme.BACKWARD)):
        groups = alike([u for u in talking if u.phase is phase])
        if not groups:
            continue
        points = [group[0] for group in groups]
        hover = [
            f"<b>{kind.name} of {named([u.unit for u in group])}</b><br>{group[0].intensity:,.0f} FLOP per byte, "
            f"{human_bytes(group[0].bytes)}<br>computes {human_ms(group[0].compute_s)}, communicates "
            f"{human_ms(group[0].comm_s)}"
            for group in groups
        ]
        figure.add_trace(
            go.Scatter(
                x=[p.intensity for p in points], y=[p.flops_per_s for p in points], mode="markers", name=kind.name,
                hovertext=hover, hoverinfo="text", legendgroup=kind.name, showlegend=kind.name not in _shown(figure),
                marker={
                    "color": kind.color, "size": [11 + min(len(g), 9) for g in groups], "opacity": 0.85,
                    "symbol": "circle" if phase is Phase.FORWARD else "circle-dot",
                    "line": {
                        "width": [1.0 if p.hidden else 3.0 for p in points],
                        "color": ["#FFFFFF" if p.hidden else theme.REDUCE_SCATTER.color for p in points],
                    },
                },
                **_axes(2),
            )
        )  # fmt: skip
        labelled += [(_brief(group), p.intensity, p.flops_per_s) for group, p in zip(groups, points, strict=True)]
    for text, x, y in _together(labelled)[:MAX_LABELS]:
        below = {"yanchor": "top", "yshift": -6} if y < 1.03 * reached else {"yanchor": "bottom", "yshift": 6}
        _say(figure, 2, x, y, text, xanchor="left", xshift=8, **below)


def _together(labels: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Labels whose places would overlap as one, at the rightmost of them."""
    clusters: list[list[tuple[str, float, float]]] = []
    for label in sorted(labels, key=lambda one: -one[1]):
        for cluster in clusters:
            _, x, y = cluster[0]
            if abs(log10(label[1] / x)) < 0.25 and abs(log10(label[2] / y)) < 0.06:
                cluster.append(label)
                break
        else:
            clusters.append([label])
    return [(", ".join(sorted({text for text, _, _ in c})), c[0][1], c[0][2]) for c in clusters]


def _shown(figure: go.Figure) -> set[str]:
    return {trace.name for trace in figure.data if trace.showlegend is not False}


def _brief(group: Sequence[UnitPoint]) -> str:
    if len(group) == 1:
        return safe(short_unit(group[0].unit) if not group[0].unit[-1:].isdigit() else group[0].unit)
    return f"{len(group)} blocks"
