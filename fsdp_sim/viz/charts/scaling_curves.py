"""`scaling`: what becomes of a GPU's throughput, and of its communication, as there are more GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

import plotly.graph_objects as go

from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.chart import series
from fsdp_sim.viz.charts.scaling_points import Case, Kind, Point, ScalingLine, What, cases_of, line_of
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes, human_ms

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOP_PX, GAP_PX, LOW_PX = 250, 42, 130
LEFT, NAME_CHARS, LABEL_PX = 84, 28, 17
ROOM = 1.14  # above the highest point


def scaling(
    model: What | Mapping[str, Case],
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    *,
    gpus: Sequence[int] = GPUS,
    kind: Kind = "weak",
) -> Picture:
    """Tokens per second and GPU, and the exposed part of the step, over the number of GPUs.

    Weak scaling keeps what each GPU does, so that the ideal is a level line. Strong scaling keeps the sequences of a
    step: with more GPUs each has fewer (at first fewer micro-batches, then smaller ones).

    Args:
        model: what is trained; or several lines at once as a dict of name to (model, cluster, plan).
        cluster: of any number of GPUs; ``gpus`` replaces it.
        plan: how it is trained; torch's defaults if not given.
        gpus: how many GPUs.
        kind: ``weak`` or ``strong``.

    Raises:
        ValueError: no cluster was given, an unknown kind, no number of GPUs, or none of them is possible (says why).
    """
    if kind not in ("weak", "strong"):
        raise ValueError(f"kind is {kind!r}; it must be weak or strong")
    counts = sorted(set(gpus))
    if not counts or counts[0] < 1:
        raise ValueError(f"gpus is {list(gpus)}; give at least one number of GPUs, each 1 or more")
    cases = cases_of(model, cluster, plan)
    lines = {name: line_of(name, case, counts, kind) for name, case in cases.items()}
    sizes = {case[1].node_size for case in cases.values()}
    return Picture(_figure(lines, counts, sizes, kind), _finding(lines, kind), (_table(lines, kind),))


def _figure(lines: Mapping[str, ScalingLine], counts: Sequence[int], node_sizes: set[int], kind: Kind) -> go.Figure:
    figure = go.Figure()
    plot_px, noun = TOP_PX + GAP_PX + LOW_PX, _noun(lines)
    top = ROOM * max(p.rate for line in lines.values() for p in line.points)
    worst = max(p.exposed for line in lines.values() for p in line.points)
    for n, (name, line) in enumerate(lines.items()):
        _curve(figure, series(n), name, line.points, [p.rate for p in line.points], "y")
        _curve(figure, series(n), name, line.points, [p.exposed for p in line.points], "y2")
    _ideal(figure, lines, counts[-1])
    _name_lines(figure, lines, top)
    for size in sorted(node_sizes):
        if counts[0] <= size < counts[-1]:
            _node(figure, size)
    figure.update_layout(
        xaxis=chart.log_axis(counts[0], counts[-1], room=0.03)
        | {
            "anchor": "y2",
            "title": {"text": f"{noun}s", "standoff": 6},
            "tickvals": counts,
            "ticktext": [f"{count:,}" for count in counts],
        },
        yaxis={"domain": [1 - TOP_PX / plot_px, 1], "range": [0, top], "fixedrange": True, "tickformat": "~s"},
        yaxis2={
            "domain": [0, LOW_PX / plot_px],
            "range": [-0.05 * max(worst, 0.04), max(worst * 1.15, 0.05)],
            "tickformat": ".0%",
            "fixedrange": True,
        },
        showlegend=False,
    )
    chart.write(figure, f"<b>tokens per second and {noun}</b>, hollow where it does not fit", x=0, y=1, yshift=4)
    heading = "<b>exposed communication</b>, part of the step"
    chart.write(figure, heading, x=0, y=LOW_PX / plot_px, yshift=4)
    longest = max(min(len(name), NAME_CHARS) for name in lines)
    right = 36 + 7 * longest if len(lines) > 1 else 64
    chart.frame(figure, _headline(lines, kind), plot_px=plot_px, left=LEFT, right=right, above=32)
    return figure


def _curve(
    figure: go.Figure, look: chart.Series, name: str, points: Sequence[Point], y: list[float], axis: str
) -> None:
    symbols = [look.symbol if p.sim.fits else f"{look.symbol}-open" for p in points]
    figure.add_trace(
        go.Scatter(
            x=[p.gpus for p in points], y=y, mode="lines+markers", name=name, yaxis=axis,
            line={"color": look.color, "width": 2.5, "dash": look.dash},
            marker={"color": look.color, "size": 9, "symbol": symbols, "line": {"width": 1.5, "color": look.color}},
            hovertext=[_hover(name, p) for p in points], hoverinfo="text",
        )
    )  # fmt: skip


def _hover(name: str, p: Point) -> str:
    return (
        f"<b>{safe(name)}</b>, on {p.gpus:,}<br>{_rate(p.rate)} tokens/s each, MFU {p.sim.mfu:.1%}"
        f"<br>step {human_ms(p.sim.step_time_s)}, of it exposed {human_ms(p.sim.exposed_comm_s)}"
        f"<br>{human_bytes(p.sim.peak_memory_bytes)}{'' if p.sim.fits else ', does not fit'}"
    )


def _ideal(figure: go.Figure, lines: Mapping[str, ScalingLine], last: int) -> None:
    """What the first point of each line would stay at."""
    for n, line in enumerate(lines.values()):
        dots = {"color": series(n).color, "width": 1, "dash": "dot"}
        level = {"x0": line.first.gpus, "x1": last, "y0": line.first.rate, "y1": line.first.rate, "name": "ideal"}
        figure.add_shape(level, type="line", xref="x", yref="y", line=dots, opacity=0.7)
    y = next(iter(lines.values())).first.rate
    chart.write(figure, "ideal", muted=True, x=0.5, xanchor="center", y=y, yref="y", yshift=1, font={"size": 11})


def _name_lines(figure: go.Figure, lines: Mapping[str, ScalingLine], top: float) -> None:
    """The name of each line at its end, from the top down and none upon another; of one alone, its value."""
    if len(lines) == 1:
        (line,) = lines.values()
        chart.write(
            figure, f"<b>{_rate(line.last.rate)}</b>", x=1, xshift=4, y=line.last.rate, yref="y", yanchor="middle"
        )
        return
    looks = {name: series(n) for n, name in enumerate(lines)}
    reached = float("inf")
    for name, line in sorted(lines.items(), key=lambda one: -one[1].last.rate):
        reached = min(line.last.rate, reached - LABEL_PX / TOP_PX * top)
        look = looks[name]
        shown = name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"
        text = f"<span style='color:{look.color}'>{chart.MARKS[look.symbol]}</span> {safe(shown)}"
        chart.write(figure, text, x=1, xshift=6, y=reached, yref="y", yanchor="middle")


def _node(figure: go.Figure, size: int) -> None:
    """Where one node is full and the network between nodes begins to count."""
    x = size * 2**0.5
    line = {"color": theme.SEPARATOR, "width": 1.5, "dash": "dash"}
    figure.add_shape(type="line", xref="x", yref="paper", x0=x, x1=x, y0=0, y1=1, line=line, name="node")
    for text, side, shift in (("one node", "right", -4), ("several", "left", 4)):
        place = {"x": log10(x), "xref": "x", "xanchor": side, "xshift": shift, "y": 1, "yanchor": "top"}
        chart.write(figure, text, muted=True, font={"size": 11}, **place)


def _noun(lines: Mapping[str, ScalingLine]) -> str:
    """What there are more and more of."""
    return "GPU" if all(line.first.sim.cluster.kind == "gpu" for line in lines.values()) else "rank"


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _headline(lines: Mapping[str, ScalingLine], kind: Kind) -> str:
    noun = _noun(lines)
    if len(lines) == 1:
        (line,) = lines.values()
        if len(line.points) == 1:
            return f"On {_of(line.first.gpus, noun)} each does {_rate(line.first.rate)} tokens/s."
        of = f"{line.kept:.0%} of what it does on {line.first.gpus:,} ({kind} scaling)"
        return f"On {_of(line.last.gpus, noun)} each does {of}."
    best, worst = max(lines, key=lambda n: lines[n].kept), min(lines, key=lambda n: lines[n].kept)
    upto = _of(max(line.last.gpus for line in lines.values()), noun)
    return f"{best} keeps {lines[best].kept:.0%} of its throughput up to {upto}, {worst} {lines[worst].kept:.0%}."


def _finding(lines: Mapping[str, ScalingLine], kind: Kind) -> str:
    sentence, noun = [], _noun(lines)
    for name, line in lines.items():
        first, last = line.first, line.last
        text = f"{name}: on {_of(first.gpus, noun)} {_rate(first.rate)} tokens/s each, "
        text += f"{first.exposed:.0%} of the step exposed communication"
        if len(line.points) > 1:
            kept = f"{_rate(last.rate)} ({line.kept:.0%} of that), {last.exposed:.0%} exposed"
            text += f"; on {_of(last.gpus, noun)} {kept}."
            loss, a, b = line.drops[0]
            text += f" The largest loss is from {a.gpus:,} to {_of(b.gpus, noun)}: {loss:.0%}." if loss > 0.02 else ""
        else:
            text += "."
        if tight := [f"{p.gpus:,}" for p in line.points if not p.sim.fits]:
            text += f" It does not fit on {', '.join(tight)} {noun}s."
        if line.impossible:
            counts = ", ".join(f"{n:,}" for n in line.impossible)
            text += f" Not possible on {counts} {noun}s: {next(iter(line.impossible.values()))}."
        sentence.append(text)
    scale = {
        "weak": f"Weak scaling: every {noun} has the same batch, however many there are.",
        "strong": f"Strong scaling: a step has the same sequences, shared by however many {noun}s there are.",
    }
    return "\n\n".join([*sentence, scale[kind]])


def _table(lines: Mapping[str, ScalingLine], kind: Kind) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, line in lines.items():
        for p in line.points:
            sim = p.sim
            speed = (human_ms(sim.step_time_s), _rate(p.rate), f"{sim.mfu:.1%}")
            exposed = (human_ms(sim.exposed_comm_s), f"{p.exposed:.1%}")
            memory = (human_bytes(sim.peak_memory_bytes), "yes" if sim.fits else "no")
            rows.append((name, f"{p.gpus:,}", *speed, *exposed, *memory))
        rows += [(name, f"{n:,}", f"impossible: {why}", *[""] * 6) for n, why in line.impossible.items()]
    head = ("line", _noun(lines) + "s", "step", "tokens/s each", "MFU", "exposed", "part of the step", "memory", "fits")
    return Table(f"{kind.capitalize()} scaling", head, tuple(rows))
