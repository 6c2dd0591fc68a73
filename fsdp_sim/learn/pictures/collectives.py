"""Pictures of the chapter on collectives: what is sent, and what a message costs by alpha and beta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fsdp_sim.measure.on_rank import CollectiveTime
from fsdp_sim.viz import Picture, Table, chart, theme
from fsdp_sim.viz.theme import LegendKind
from fsdp_sim.words import human_bytes, human_ms

BAR_PX, ROOM = 46, 1.12
LEGEND = {"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom", "traceorder": "normal"}


def sent_bars(rows: Mapping[str, Sequence[tuple[LegendKind, float]]], unit: str, sentence: str) -> Picture:
    """What one rank sends, one bar for each row, its parts end to end.

    Args:
        rows: by name the parts: of which collective, and how much.
        unit: of the numbers.
        sentence: the title; what is to be seen.
    """
    figure = go.Figure()
    names, shown = list(rows), set()
    for row, parts in rows.items():
        for kind, value in parts:
            figure.add_bar(
                x=[value], y=[row], orientation="h", name=kind.name, legendgroup=kind.name,
                showlegend=kind.name not in shown, text=[f"{value:,.3g}" if len(parts) > 1 else ""],
                textposition="inside", insidetextanchor="middle",
                marker={"color": kind.color, "pattern": theme.hatch(kind), "line": {"color": "white", "width": 2}},
                textfont={"color": kind.text_color, "size": 13}, textangle=0,
                hovertext=f"{row}: {kind.name}, {value:,.4g} {unit}", hoverinfo="text",
            )  # fmt: skip
            shown.add(kind.name)
    totals = {row: sum(value for _, value in parts) for row, parts in rows.items()}
    for row, total in totals.items():
        place: dict[str, Any] = {"x": total, "xref": "x", "y": row, "yref": "y", "xshift": 6, "yanchor": "middle"}
        chart.write(figure, f"<b>{total:,.3g}</b>", **place)
    left = 24 + 7 * max(map(len, names))
    chart.frame(figure, sentence, plot_px=BAR_PX * len(names) + 30, left=left, right=40, bottom=84)
    figure.update_layout(barmode="stack", bargap=0.35, legend=LEGEND)
    figure.update_xaxes(title=unit, range=[0, ROOM * max(totals.values())])
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    sentences = [f"{row}: {' and '.join(f'{v:,.3g} by {k.name}' for k, v in parts)}" for row, parts in rows.items()]
    cells = tuple((row, kind.name, f"{value:,.4g}") for row, parts in rows.items() for kind, value in parts)
    return Picture(figure, f"{sentence}. {'; '.join(sentences)} ({unit}).", (Table(sentence, ("", "by", unit), cells),))


def alpha_beta(
    times: Sequence[CollectiveTime], latency_s: float, bytes_per_s: float, sent_bytes: Sequence[float]
) -> Picture:
    """Measured times of collectives over the bytes that a rank sends, and the curve latency + bytes / bandwidth.

    Args:
        sent_bytes: of each time, what a rank sends.
    """
    figure = go.Figure()
    most = max(sent_bytes)
    x = np.geomspace(min(sent_bytes), most, 60)
    line: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
    curves = (
        (latency_s + x / bytes_per_s, "#57606A", "solid", 2.5),
        (np.full_like(x, latency_s), "#8C959F", "dot", 1.5),
        (x / bytes_per_s, "#8C959F", "dash", 1.5),
    )
    for y, color, dash, width in curves:
        figure.add_scatter(x=x, y=1e3 * y, line={"color": color, "dash": dash, "width": width}, **line)
    ops = list(dict.fromkeys(time.op for time in times))
    for number, op in enumerate(ops):
        look, name = chart.series(number), op.replace("_", "-")
        points = [(n, time) for n, time in zip(sent_bytes, times, strict=True) if time.op == op]
        figure.add_scatter(
            x=[n for n, _ in points], y=[1e3 * time.seconds for _, time in points], mode="markers", name=name,
            marker={"color": look.color, "symbol": look.symbol, "size": 10, "line": {"color": "white", "width": 1}},
            hovertext=[f"{name}: {human_bytes(n)}, {human_ms(t.seconds)}" for n, t in points],
            hoverinfo="text",
        )  # fmt: skip
    half_bytes = latency_s * bytes_per_s
    sentence = f"Below {human_bytes(half_bytes)} a message is latency, above it bandwidth"
    lowest = min(latency_s, min(time.seconds for time in times))
    chart.frame(figure, sentence, plot_px=300, left=80, bottom=96)
    if min(sent_bytes) < half_bytes < most:
        dots = {"color": theme.LIMIT, "width": 1.5, "dash": "dash"}
        figure.add_shape(type="line", xref="x", yref="paper", x0=half_bytes, x1=half_bytes, y0=0, y1=1, line=dots)
        place = {"x": np.log10(half_bytes), "xref": "x", "y": 1, "yref": "paper", "yanchor": "top", "xshift": 4}
        chart.write(figure, "latency x bandwidth", font={"size": 11}, **place)
    seconds = [time.seconds for time in times]
    figure.update_layout(
        xaxis=chart.log_axis(min(sent_bytes), most) | {"title": "bytes a rank sends"},
        yaxis=chart.log_axis(1e3 * lowest, 1e3 * max(seconds)) | {"title": "milliseconds"},
        legend=LEGEND,
    )
    finding = (
        f"{sentence}. Measured times over the bytes that a rank sends, both on logarithmic axes; the solid curve is "
        f"latency + bytes / bandwidth with {human_ms(latency_s)} and {bytes_per_s / 1e9:.2f} GB/s, the dotted "
        "line the latency alone, the dashed one the bytes alone."
    )
    cells = tuple(
        (t.op.replace("_", "-"), human_bytes(n), human_ms(t.seconds),
         human_ms(latency_s + n / bytes_per_s))
        for n, t in zip(sent_bytes, times, strict=True)
    )  # fmt: skip
    return Picture(figure, finding, (Table("Measured and fitted", ("collective", "sent", "took", "curve"), cells),))
