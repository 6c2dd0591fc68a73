"""`memory_waterfall`: what the memory of a rank is made of at its peak, step by step up to the device's limit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.requests import Change
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.charts.alive import AliveBars, AlivePart, alive_at
from fsdp_sim.viz.charts.waterfall_words import finding, groups, headline, headline_of_several, remedies
from fsdp_sim.viz.comparison.words import name_of
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import MEMORY, LegendKind, safe
from fsdp_sim.words import byte_unit, human_bytes

What = Simulation | Timeline
ROW_PX, STACK_PX = 34, 58
AXIS_PX, CHAR_PX = 690, 7  # of the axis in a figure 900 pixels wide, and of a letter of a label
OVER = "rgba(213,94,0,0.10)"  # what the device does not have
LEAST = 0.004  # of the axis: parts smaller than that are drawn as one
FAR = 2.5  # a limit this many times what is alive is told in words alone


def memory_waterfall(
    what: What | Mapping[str, What] | Sequence[What],
    *,
    moment: str | float = "peak",
    rank: int | None = None,
) -> Picture:
    """What is alive on a rank at one moment, by category and unit, against what the device has.

    One simulation or timeline is drawn as a waterfall: each category begins where the one above it ends. Several, such
    as the same model under different plans, are drawn as stacked bars beside each other.

    Args:
        what: a `Simulation` or a `Timeline` with memory, several, or a dict of name to them.
        moment: ``peak``; ``forward``, ``backward`` or ``optimizer`` for the peak of that phase; or seconds since the
            first operation started.
        rank: whose memory; by default the first rank's.

    Raises:
        ValueError: nothing was given, a timeline recorded no memory, or it has not the rank or the phase.
    """
    named = _named(what)
    alive = {name: alive_at(one, name, moment, rank) for name, one in named.items()}
    fixes = {name: remedies(one) for name, one in named.items() if isinstance(one, Simulation)}
    if len(alive) > 1:
        figure = _stacks(alive)
    else:
        (name,) = alive
        figure = _waterfall(alive[name], fixes.get(name))
    return Picture(figure, finding(alive, fixes), _tables(alive))


def _named(what: What | Mapping[str, What] | Sequence[What]) -> dict[str, What]:
    if isinstance(what, (Simulation, Timeline)):
        what = [what]
    if not isinstance(what, Mapping):
        named: dict[str, What] = {}
        for number, one in enumerate(what, start=1):
            name = _name_of(one)
            named[name if name not in named else f"{name} ({number})"] = one
        what = named
    if not what:
        raise ValueError("nothing was given; pass a Simulation, a Timeline with memory, or a dict of name to them")
    for name, one in what.items():
        if not isinstance(one, (Simulation, Timeline)):
            raise ValueError(f"{name!r} is of type {type(one).__name__}; memory is drawn of a Simulation or a Timeline")
    return dict(what)


def _name_of(one: What) -> str:
    if isinstance(one, Simulation):
        return f"{one.workload.name}, {one.plan.api}"
    return name_of(one) if isinstance(one, Timeline) else "what was given"


def _segments(parts: Sequence[AlivePart], least_bytes: float) -> list[tuple[str, int]]:
    """The parts of one category as (what it is, bytes), those too small to see as one."""
    shown = [(safe(p.unit or "no unit"), p.bytes) for p in parts if p.bytes >= least_bytes]
    rest = [p for p in parts if p.bytes < least_bytes]
    if rest:
        total = sum(p.bytes for p in rest)
        shown.append((f"{len(rest)} smaller part{'s' * (len(rest) > 1)}", total))
    return shown


def _bar(kind: LegendKind, size: float, rows: Sequence[tuple[float, float, float, str, str]], **more: Any) -> go.Bar:
    """Horizontal bars of one category from (y, start, bytes, text, hover)."""
    return go.Bar(
        orientation="h",
        name=kind.name,
        y=[y for y, *_ in rows],
        base=[start / size for _, start, *_ in rows],
        x=[n_bytes / size for _, _, n_bytes, _, _ in rows],
        text=[text for *_, text, _ in rows],
        hovertext=[hover for *_, hover in rows],
        hoverinfo="text",
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 11, "color": kind.text_color},
        marker={"color": kind.color, "pattern": theme.hatch(kind), "line": {"width": 0.6, "color": "#FFFFFF"}},
        width=0.72,
        **more,
    )


def _waterfall(alive: AliveBars, fixes: list[Change] | None = None) -> go.Figure:
    figure = go.Figure()
    limit = _drawn_limit(alive.limit_bytes, alive.total_bytes)
    end = max(alive.total_bytes * (1.0 if limit else 1.25), limit) * 1.02 or 1
    size, unit = byte_unit(end)
    names: list[str] = []
    start = 0.0
    for y, (category, parts) in enumerate(alive.by_category.items()):
        kind, total = MEMORY[category], sum(p.bytes for p in parts)
        rows, at = [], start
        for label, n_bytes in _segments(parts, LEAST * end):
            hover = f"<b>{kind.name}</b> of {label}<br>{human_bytes(n_bytes)}, {n_bytes / alive.total_bytes:.1%} of all"
            rows.append((y, at, n_bytes, "", hover))
            at += n_bytes
        figure.add_trace(_bar(kind, size, rows))
        names.append(kind.name)
        label = f"<b>{human_bytes(total)}</b> {_what(parts)}"
        _label(figure, y, (start / size, at / size), end / size, kind, label)
        if y:
            joint = {"x0": start / size, "x1": start / size, "y0": y - 0.64, "y1": y + 0.36}
            figure.add_shape(joint, type="line", line={"color": theme.SEPARATOR, "width": 1})
        start = at
    last = len(names)
    names.append(f"<b>{safe(alive.what)}</b>")
    everything = LegendKind(
        alive.what, theme.FORWARD.color if alive.fit is not Fit.DOES_NOT_FIT else theme.REDUCE_SCATTER.color, "#FFFFFF"
    )
    size_of_all = f"<b>{human_bytes(alive.total_bytes)}</b>"
    hover = f"{safe(alive.what)}: {size_of_all}"
    figure.add_trace(_bar(everything, size, [(last, 0.0, alive.total_bytes, size_of_all, hover)]))
    figure.update_traces(showlegend=False)
    _limit(figure, limit, size, -0.6, last + 0.5, left=limit > 0.3 * end)
    if alive.too_much_bytes:
        beyond = {"x0": alive.limit_bytes / size, "x1": end / size, "y0": -0.6, "y1": last + 0.5}
        figure.add_shape(beyond, type="rect", fillcolor=OVER, line={"width": 0}, layer="below")
    figure.update_layout(
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis={"range": [0, end / size], "title": {"text": f"{unit} on rank {alive.rank}", "standoff": 6}},
        yaxis={
            "range": [last + 0.5, -0.6],
            "tickvals": list(range(last + 1)),
            "ticktext": names,
            "showgrid": False,
            "fixedrange": True,
        },
    )
    if fixes:
        label = f"<b>What would make it fit:</b> {safe(fixes[0].what)}, {human_bytes(fixes[0].peak_memory_bytes)}"
        chart.write(figure, label, x=0, xshift=-150, y=0, yanchor="top", yshift=-46)
    chart.frame(figure, headline(alive), plot_px=ROW_PX * (last + 1.1), left=158, above=34, bottom=80 if fixes else 56)
    return figure


def _what(parts: Sequence[AlivePart]) -> str:
    """How a category divides: ``32 × 1.2 GiB``, or its one unit."""
    (bytes_each, units), *others = groups(parts)
    if len(units) == 1 and not others:
        return safe(units[0])
    label = f"{len(units)} × {human_bytes(bytes_each)}" if len(units) > 1 else _one(units[0], bytes_each)
    rest = sum(n_bytes * len(of) for n_bytes, of in others)
    if rest < 0.02 * sum(p.bytes for p in parts):
        return label
    count = sum(len(of) for _, of in others)
    return (
        f"{label}, {_one(others[0][1][0], rest)}" if count == 1 else f"{label}, {human_bytes(rest)} in {count} others"
    )


def _one(unit: str, n_bytes: int) -> str:
    return f"{safe(unit)} {human_bytes(n_bytes)}".strip()


def _label(figure: go.Figure, y: int, ends: tuple[float, float], axis_end: float, kind: LegendKind, text: str) -> None:
    """Beside a bar, to its right or to its left; where neither has room, upon it."""
    start, stop = ends
    left_px, right_px = start / axis_end * AXIS_PX, (1 - stop / axis_end) * AXIS_PX
    wanted_px = CHAR_PX * len(text.replace("<b>", "").replace("</b>", "")) + 12
    if right_px >= wanted_px:
        place = {"x": stop, "xanchor": "left", "xshift": 5}
    elif left_px >= wanted_px:
        place = {"x": start, "xanchor": "right", "xshift": -5}
    else:  # the bar has its own colour, whatever the page
        place = {"x": (start + stop) / 2, "xanchor": "center", "bgcolor": kind.color, "font_color": kind.text_color}
    figure.add_annotation(place, y=y, text=text, showarrow=False, yanchor="middle", font_size=12)


def _drawn_limit(limit: int, most: int) -> int:
    """The limit, or 0 where it is so far away that a line there would crush the bars; the words still say it."""
    return limit if limit <= FAR * most else 0


def _limit(
    figure: go.Figure, limit: int, size: float, top: float, bottom: float, *, text: bool = True, left: bool = True
) -> None:
    """A line at what the device has, its words to the left or to the right of it."""
    if not limit:
        return
    color = theme.REDUCE_SCATTER.color
    line = {"color": color, "width": 2, "dash": "dash"}
    figure.add_shape(type="line", x0=limit / size, x1=limit / size, y0=top, y1=bottom, line=line, name="limit")
    if text:
        place = {"x": limit / size, "xanchor": "right" if left else "left", "y": top, "yanchor": "bottom"}
        figure.add_annotation(place, text=f"the device has {human_bytes(limit)}", showarrow=False, font={"size": 12})


def _stacks(alive: dict[str, AliveBars]) -> go.Figure:
    figure = go.Figure()
    most = max(a.total_bytes for a in alive.values())
    limits = {name: _drawn_limit(a.limit_bytes, most) for name, a in alive.items()}
    end = max(most, *limits.values()) * 1.02 or 1
    room = 1.16  # for the totals, right of the bars
    size, unit = byte_unit(end)
    categories = list(dict.fromkeys(c for c in MEMORY for a in alive.values() if c in a.by_category))
    starts = dict.fromkeys(alive, 0.0)
    for category in categories:
        kind, rows = MEMORY[category], []
        for y, (name, a) in enumerate(alive.items()):
            if category not in a.by_category:
                continue
            parts = a.by_category[category]
            total = sum(p.bytes for p in parts)
            label = f"<b>{kind.name}</b> in {safe(name)}<br>{human_bytes(total)}, {total / a.total_bytes:.1%} of all"
            text = f"{kind.name}<br>{human_bytes(total)}" if total > 0.16 * end else human_bytes(total)
            rows.append((y, starts[name], total, text, f"{label}<br>{_what(parts)}"))
            starts[name] += total
        figure.add_trace(_bar(kind, size, rows))
    for y, (name, a) in enumerate(alive.items()):
        worded = y == 0 or len(set(limits.values())) > 1
        _limit(figure, limits[name], size, y - 0.5, y + 0.5, text=worded, left=limits[name] > 0.3 * end)
        over = f"<br>{a.verdict}" if a.verdict else ""
        x = max(a.total_bytes, 0) / size
        beside = limits[name] > a.total_bytes and limits[name] - a.total_bytes < 0.14 * end
        figure.add_annotation(
            x=limits[name] / size if beside else x, y=y, text=f"<b>{human_bytes(a.total_bytes)}</b>{over}",
            showarrow=False, xanchor="left", xshift=6, align="left", font={"size": 12},
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis={"range": [0, end * room / size], "title": {"text": f"{unit} on one rank", "standoff": 6}},
        yaxis={
            "range": [len(alive) - 0.45, -0.62],
            "tickvals": list(range(len(alive))),
            "ticktext": ["<br>".join(_wrapped(name)) for name in alive],
            "showgrid": False,
            "fixedrange": True,
        },
    )
    longest = max(len(line) for name in alive for line in _wrapped(name))
    plot_px = STACK_PX * (len(alive) + 0.1)
    chart.frame(figure, headline_of_several(alive), plot_px=plot_px, left=min(60 + 7 * longest, 230), above=72)
    corner = {"x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top"}
    place = {"y": 1 - (figure.layout.margin.t - 76) / figure.layout.height, "orientation": "h", "traceorder": "normal"}
    figure.update_layout(legend=corner | place)
    return figure


def _wrapped(name: str) -> list[str]:
    return [safe(line) for line in textwrap.wrap(name, 24)[:3]] or [""]


def _tables(alive: dict[str, AliveBars]) -> tuple[Table, ...]:
    categories = list(dict.fromkeys(c for c in MEMORY for a in alive.values() if c in a.by_category))
    rows = [
        (
            MEMORY[c].name,
            *(
                human_bytes(sum(p.bytes for p in a.by_category[c])) if c in a.by_category else "0"
                for a in alive.values()
            ),
        )
        for c in categories
    ]
    rows.append(("all", *(human_bytes(a.total_bytes) for a in alive.values())))
    rows.append(
        ("the device has", *(human_bytes(a.limit_bytes) if a.limit_bytes else "unknown" for a in alive.values()))
    )
    largest = [
        (name, MEMORY[p.category].name, p.unit or "none", human_bytes(p.bytes), f"{p.bytes / a.total_bytes:.1%}")
        for name, a in alive.items()
        for p in sorted(a.parts, key=lambda p: -p.bytes)[:10]
    ]
    return (
        Table("What is alive, by category", ("category", *alive), tuple(rows)),
        Table("The largest parts", ("of", "category", "unit", "size", "share"), tuple(largest)),
    )
