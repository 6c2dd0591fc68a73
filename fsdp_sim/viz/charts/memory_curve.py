"""`memory_curve`: what a snapshot of CUDA's memory says over time: allocated, reserved, peak, predicted."""

from __future__ import annotations

import plotly.graph_objects as go

from fsdp_sim.diagnose import MemoryFound
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import byte_unit, human_bytes, human_ms

PLOT_PX = 260
ROOM = 1.12  # above the highest line
RESERVED, ALLOCATED, PREDICTED = theme.COPY.color, theme.ALL_GATHER.color, theme.FORWARD.color


def memory_curve(found: MemoryFound) -> Picture:
    """What tensors held and what torch had reserved of the device, from the first action of the recording on.

    The peak has a mark, a predicted peak is a dashed line, an allocation that failed a cross. A snapshot without a
    history is a moment, and so two marks.
    """
    levels = [one.reserved_bytes for one in found.curve], [one.allocated_bytes for one in found.curve]
    predicted = found.predicted.predicted_peak_bytes if found.predicted else 0
    highest = max(found.most_reserved_bytes, predicted)
    size, unit = byte_unit(highest)
    at_s, figure = [one.at_s for one in found.curve], go.Figure()
    mode = "lines" if len(at_s) > 1 else "markers"
    for name, n_bytes, color in zip(("reserved", "allocated"), levels, (RESERVED, ALLOCATED), strict=True):
        hover = [f"<b>{name}</b> {human_bytes(n)}<br>at {human_ms(t)}" for n, t in zip(n_bytes, at_s, strict=True)]
        figure.add_trace(
            go.Scatter(
                x=at_s, y=[n / size for n in n_bytes], name=name, mode=mode,
                fill="tozeroy" if name == "allocated" else None,
                line={"color": color, "width": 1.5, "shape": "hv"}, marker={"color": color, "size": 9},
                hovertext=hover, hoverinfo="text",
            )
        )  # fmt: skip
    _mark(figure, found.peak_at_s, found.peak_bytes / size, "circle", f"peak {human_bytes(found.peak_bytes)}")
    for one in found.out_of_memory:
        _mark(
            figure, one.at_s, one.reserved_bytes / size, "x", f"{human_bytes(one.asked_bytes)} refused", safe(one.where)
        )
    if predicted:
        figure.add_hline(predicted / size, line={"color": PREDICTED, "width": 2, "dash": "dash"})
        side = "top" if predicted < found.peak_bytes else "bottom"
        said = {"xanchor": "right", "yanchor": side, "font": {"size": 12}, "showarrow": False}
        figure.add_annotation(
            said, x=1, xref="paper", y=predicted / size, text=f"predicted peak {human_bytes(predicted)}",
        )  # fmt: skip
    figure.update_layout(
        xaxis={"title": {"text": "seconds since the recording began", "standoff": 6}},
        yaxis={"range": [0, ROOM * highest / size], "ticksuffix": f" {unit}"},
        showlegend=False,
    )
    key = (
        f"<b style='color:{ALLOCATED}'>━</b> allocated by tensors   <b style='color:{RESERVED}'>━</b> reserved by torch"
    )
    chart.write(figure, key, x=0, y=1, yshift=4)
    chart.frame(figure, _headline(found), plot_px=PLOT_PX, left=92, above=32)
    return Picture(figure, " ".join(found.sentences))


def _mark(figure: go.Figure, at_s: float, y: float, symbol: str, text: str, more: str = "") -> None:
    figure.add_trace(
        go.Scatter(
            x=[at_s], y=[y], mode="markers+text", text=[text], textposition="top center", cliponaxis=False,
            marker={"color": theme.LIMIT if symbol == "x" else ALLOCATED, "size": 10, "symbol": symbol},
            hovertext=[f"{text}<br>at {human_ms(at_s)}{f'<br>{more}' if more else ''}"], hoverinfo="text",
        )
    )  # fmt: skip


def _headline(found: MemoryFound) -> str:
    if found.out_of_memory:
        one = found.out_of_memory[0]
        return f"{human_bytes(one.asked_bytes)} more did not fit beside the {human_bytes(one.reserved_bytes)} reserved."
    return (
        f"Tensors held {human_bytes(found.peak_bytes)} at most, of {human_bytes(found.most_reserved_bytes)} reserved."
    )
