"""`compare`: two timelines on one time axis, where they part, and what each unit gains or loses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.timeline import Comparison, Event, Lane, OperationPair, Side, Timeline
from fsdp_sim.timeline.comparison import compare as compare_timelines
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.comparison.units import draw_strip, tables
from fsdp_sim.viz.comparison.words import finding, headline, name_of
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.theme import KINDS, LegendKind, safe, short_unit
from fsdp_sim.words import human_bytes, human_ms, signed_ms

ROW_PX, STRIP_PX, STRIP_HEADING_PX, AXIS_PX = 26, 150, 30, 50
THIN = {Lane.AG_COPY_IN: 0.5}  # height of a row in lanes
HEADING, LABEL = 1.15, 0.85  # rows above each timeline, for its name, and for the label of the place where they part
BAR = 0.9
LEFT = 112
FEW_BARS = 1_000  # in all; more are drawn without texts, which plotly measures one by one, and without outlines
# The lanes are the second subplot: plotly hides texts that do not fit in the last one drawn only.
TIME = {"xaxis": "x2", "yaxis": "y2"}
AT = {"xref": "x2", "yref": "y2"}
SEEN = 1e-6  # of the longer step: what is less is not drawn


def compare(
    a: Timeline,
    b: Timeline,
    *,
    titles: Sequence[str] | None = None,
    rank: int | tuple[int, int] | None = None,
    step: int | None = None,
    tolerance_s: float | None = None,
) -> Picture:
    """Two timelines on one time axis: a step with and without prefetch, predicted and measured, FSDP1 and FSDP2.

    Above, the lanes of one rank of each, communication that nothing hides marked on the compute lane, both ends of the
    step, and the first operation at which the issue orders differ (or, if they do not, at which the times do). Below,
    how many milliseconds each unit gains or loses, by computing and by exposed communication.

    Args:
        a, b: what is compared; differences are b less a.
        titles: two names, by default the headers' titles.
        rank: of both, or one of each; by default the first rank of each.
        step: of both; by default in each the one of median duration, the first left out.
        tolerance_s: by how much times may differ and still be the same; by default 1% of the longer step.

    Raises:
        ValueError: a timeline is empty or has not the rank or step; titles are not two different names.
    """
    found = compare_timelines(a, b, step=step, rank=rank, tolerance_s=tolerance_s)
    names = _names(found, titles)
    return Picture(_figure(found, names), finding(found, names), tables(found, names))


def _names(found: Comparison, titles: Sequence[str] | None) -> tuple[str, str]:
    if titles is not None:
        if len(titles) != 2 or titles[0] == titles[1]:
            raise ValueError(f"titles is {list(titles)}; two timelines need two different names")
        return titles[0], titles[1]
    a, b = found.a, found.b
    names = name_of(a.timeline), name_of(b.timeline)
    if names[0] != names[1]:
        return names
    if a.rank != b.rank:
        return f"{names[0]}, rank {a.rank}", f"{names[1]}, rank {b.rank}"
    return f"{names[0]} (first)", f"{names[1]} (second)"


def _figure(found: Comparison, names: tuple[str, str]) -> go.Figure:
    figure = go.Figure()
    sides = (found.a, found.b)
    parted = _parted(found)
    rows, bottom = _rows(sides, HEADING + (LABEL if parted else 0.0))
    lanes_px = bottom * ROW_PX
    least_s = SEEN * max(found.a.step_s, found.b.step_s)
    units = [u for u in found.units if abs(u.compute_s) > least_s or abs(u.exposed_s) > least_s]
    idles = abs(found.causes.idle_s) > least_s
    strip = bool(units) or idles
    plot_px = lanes_px + ((AXIS_PX + STRIP_HEADING_PX + STRIP_PX) if strip else 0)
    lanes_domain = [1 - lanes_px / plot_px, 1.0]
    later = {id(p.a): p for p in found.pairs} | {id(p.b): p for p in found.pairs}
    drawn: dict[LegendKind, list[dict[str, Any]]] = {}
    for n, side in enumerate(sides):
        for start_s, end_s in side.exposed:
            text = f"<b>exposed communication</b>, {human_ms(end_s - start_s)}<br>rank {side.rank} computes nothing"
            drawn.setdefault(theme.EXPOSED, []).append(_bar(side, start_s, end_s, rows[n, Lane.COMPUTE], 1.0, "", text))
        for e in side.ops:
            height = THIN.get(e.lane, 1.0)
            text = _hover(side, e, later.get(id(e)), names[1 - n], first=n == 0)
            drawn.setdefault(KINDS[e.op], []).append(
                _bar(side, e.start_s, e.end_s, rows[n, e.lane], height, safe(short_unit(e.unit)), text)
            )
    few = sum(len(side.ops) for side in sides) <= FEW_BARS
    for kind in [theme.EXPOSED, *dict.fromkeys(KINDS.values())]:
        if kind in drawn:
            figure.add_trace(_trace(kind, drawn[kind], few))
    _draw_axes(figure, found, names, rows, bottom, lanes_domain)
    _draw_ends(figure, found, rows, bottom)
    if parted:
        _draw_parting(figure, found, rows, *parted)
    if strip:
        draw_strip(figure, found, names, units, [0.0, STRIP_PX / plot_px], idles=idles)
    bottom_px = 40 if strip else 56
    chart.frame(figure, headline(found, names), plot_px=plot_px, left=LEFT, right=24, bottom=bottom_px, above=46)
    height = figure.layout.height
    figure.update_layout(
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "hide"},
        legend={
            "orientation": "h",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1 - (figure.layout.margin.t - 48) / height,
            "yref": "container",
            "yanchor": "top",
            "itemsizing": "constant",
        },
    )
    return figure


def _rows(sides: Sequence[Side], heading: float) -> tuple[dict[tuple[int, Lane], float], float]:
    """The middle of the row of each lane of each timeline, in rows from the top, and how many rows there are."""
    rows: dict[tuple[int, Lane], float] = {}
    at = 0.0
    for n, side in enumerate(sides):
        at += heading
        used = {e.lane for e in side.ops} | {Lane.COMPUTE}
        for lane in (lane for lane in Lane if lane in used):
            height = THIN.get(lane, 1.0)
            rows[n, lane] = at + height / 2
            at += height
    return rows, at


def _bar(side: Side, start_s: float, end_s: float, y: float, height: float, text: str, hover: str) -> dict[str, Any]:
    return {
        "base": (start_s - side.origin_s) * 1e3,
        "x": (end_s - start_s) * 1e3,
        "y": y,
        "width": height * BAR,
        "text": text,
        "hovertext": hover,
    }


def _trace(kind: LegendKind, bars: list[dict[str, Any]], few: bool) -> go.Bar:
    columns = {name: [bar[name] for bar in bars] for name in bars[0]}
    outlined = kind is theme.EXPOSED
    seams = few and kind not in (theme.COPY, theme.CAST)  # which are often thinner than an outline
    line = {"width": (0.75 if outlined else 0.5) if seams else 0, "color": kind.text_color if outlined else "#FFFFFF"}
    return go.Bar(
        **columns,
        name=kind.name,
        orientation="h",
        **TIME,
        hoverinfo="text",
        textposition="inside" if few and not outlined else "none",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": kind.text_color, "size": 11},
        marker={"color": kind.color, "pattern": theme.hatch(kind), "line": line},
        legendrank=2000 if outlined else 1000,
    )


def _hover(side: Side, e: Event, pair: OperationPair | None, other: str, *, first: bool) -> str:
    start_ms, ms = side.since_s(e) * 1e3, e.duration_s * 1e3
    lines = [
        f"<b>{theme.OP_NAMES[e.op]} {safe(e.unit)}</b>, {human_ms(e.duration_s)}",
        f"rank {e.rank}, {theme.LANE_NAMES[e.lane]} lane, from {start_ms:.2f} to {start_ms + ms:.2f} ms",
    ]
    if e.bytes:
        lines.append(human_bytes(e.bytes) + (f" among {e.group_size} ranks" if e.group_size > 1 else ""))
    if pair is None:
        lines.append(f"<b>not in {safe(other)}</b>")
    else:
        sign = -1 if first else 1
        longer_s, later_s = sign * (pair.b.duration_s - pair.a.duration_s), sign * pair.start_later_s
        lines.append(f"against {safe(other)}: starts {signed_ms(later_s)}, lasts {signed_ms(longer_s)}")
    return "<br>".join(lines)


def _draw_axes(
    figure: go.Figure,
    found: Comparison,
    names: tuple[str, str],
    rows: dict[tuple[int, Lane], float],
    bottom: float,
    domain: list[float],
) -> None:
    span_ms = max(found.a.step_s, found.b.step_s) * 1e3 or 1.0
    figure.update_layout(
        xaxis2={
            "range": [0, span_ms * 1.01],
            "minallowed": 0,
            "exponentformat": "none",
            "separatethousands": True,
            "anchor": "y2",
            "title": {"text": "milliseconds since the step began", "standoff": 4},
        },
        yaxis2={
            "domain": domain,
            "anchor": "x2",
            "range": [bottom, 0],
            "fixedrange": True,
            "showgrid": False,
            "tickvals": [y for (_, lane), y in rows.items() if lane not in THIN],
            "ticktext": [theme.LANE_NAMES[lane] for _, lane in rows if lane not in THIN],
        },
    )
    for n, side in enumerate((found.a, found.b)):
        top, end = _extent(rows, n)
        band = {"xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": top, "y1": end}
        figure.add_shape(band, type="rect", fillcolor=theme.BAND, line={"width": 0}, layer="below")
        sentence = (
            f"<b>{safe(names[n])}</b> · rank {side.rank}, {human_ms(side.step_s)}, {human_ms(side.exposed_s)} exposed"
        )
        above = ROW_PX * LABEL if _parted(found) else 0
        chart.write(figure, sentence, x=0, yref="y2", y=top, yshift=2 + above)


def _extent(rows: dict[tuple[int, Lane], float], n: int) -> tuple[float, float]:
    """Top and bottom of the rows of one timeline."""
    mine = [(y, THIN.get(lane, 1.0)) for (of, lane), y in rows.items() if of == n]
    return min(y - h / 2 for y, h in mine), max(y + h / 2 for y, h in mine)


def _draw_ends(figure: go.Figure, found: Comparison, rows: dict[tuple[int, Lane], float], bottom: float) -> None:
    """The ends of the steps, and how far they lie apart."""
    ends = (found.a.step_s * 1e3, found.b.step_s * 1e3)
    for n, end in enumerate(ends):
        top, low = _extent(rows, n)
        line = {"color": theme.SEPARATOR, "width": 2, "dash": "dot"}
        figure.add_shape(AT, type="line", x0=end, x1=end, y0=top, y1=bottom if n == 0 else low, line=line)
    if abs(ends[1] - ends[0]) < 0.02 * max(ends):
        return
    y = _extent(rows, 1)[0] - 0.4  # above the lanes, where bars would hide it
    arrow = {"x": ends[1], "y": y, "ax": ends[0], "ay": y, "axref": "x2", "ayref": "y2", "text": ""}
    figure.add_annotation(arrow | AT, showarrow=True, arrowhead=2, arrowwidth=1.5)
    place = {"x": max(ends), "y": y, "xanchor": "right", "yanchor": "bottom", "font": {"size": 12}}
    figure.add_annotation(place | AT, text=f"<b>{signed_ms(found.step_difference_s)}</b>", showarrow=False)


def _parted(found: Comparison) -> tuple[str, tuple[Event | None, Event | None]] | None:
    """Where the two first part, in order or, if not in that, in time: what it is, and the operations there."""
    if (at := found.divergence) is not None:
        return "first divergence", (at.a, at.b)
    return ("times part", (found.parted.a, found.parted.b)) if found.parted is not None else None


def _draw_parting(
    figure: go.Figure,
    found: Comparison,
    rows: dict[tuple[int, Lane], float],
    what: str,
    events: tuple[Event | None, Event | None],
) -> None:
    longest_s = max(found.a.step_s, found.b.step_s)
    color = theme.REDUCE_SCATTER.color
    for n, (side, event) in enumerate(zip((found.a, found.b), events, strict=True)):
        x_s = side.since_s(event) if event is not None else side.step_s
        top, low = _extent(rows, n)
        operation = f"{theme.OP_NAMES[event.op]} {event.unit}" if event is not None else "has ended"
        line = {"color": color, "width": 2}
        figure.add_shape(AT, type="line", x0=x_s * 1e3, x1=x_s * 1e3, y0=top - LABEL * 0.85, y1=low, line=line)
        place = {"x": x_s * 1e3, "y": top - LABEL * 0.45, "yanchor": "middle", "font": {"size": 12}}
        side_of_it = {"xanchor": "left", "xshift": 3} if x_s < 0.55 * longest_s else {"xanchor": "right", "xshift": -3}
        text = f"{what}: <b>{safe(operation.strip())}</b>"
        figure.add_annotation(AT | place | side_of_it, text=text, showarrow=False, name=f"narrow:{what}")
