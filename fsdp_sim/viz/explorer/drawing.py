"""The explorer's figure: a fixed set of traces, made once; a move changes nothing but their numbers.

What plotly.js spends on a move grows with the bars: hatching them one by one costs as much again, a legend a fifth. So
one path over all that are communication carries the hatching, copies that are shorter than a pixel are left out until
one zooms in, and the legend is not plotly's (`legend_html`).

Neither numpy nor plotly is needed for it: a page draws the same (`web/live`). Numbers are arrays of 4 bytes each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Set
from html import escape
from math import nan
from operator import add
from typing import Any

from fsdp_sim.timeline import Lane, Memory
from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer.scene import PIXELS, Floats, Scene
from fsdp_sim.viz.steps.bars import Bars, contents
from fsdp_sim.viz.steps.rows import BAR
from fsdp_sim.viz.theme import KINDS, MEMORY, OP_NAMES, LegendKind, safe
from fsdp_sim.words import human_bytes

Trace = dict[str, Any]
Change = dict[str, Any]  # properties of one trace
KIND_ORDER = tuple(dict.fromkeys(KINDS.values()))
_NUMBER = {id(op): KIND_ORDER.index(kind) for op, kind in KINDS.items()}  # a member of an enum hashes slowly
CATEGORIES = [category for category in MEMORY if category is not Memory.NONE]
SHORT = {theme.COPY, theme.CAST}  # kinds most of whose bars are too short to be seen
_SHORT = {KIND_ORDER.index(kind) for kind in SHORT}
NEIGHBOURS = {theme.FORWARD, theme.BACKWARD, theme.RECOMPUTE}  # kinds whose bars follow each other without a gap
NEAR = 0.35  # of the limit: a peak above that is drawn with the limit in view
SEAM = "rgba(255,255,255,0.75)"
GIB = 2**30
# Where a bar has a base, plotly's x is its end; its length is brought along.
_WHEN = "%{customdata:.3f} ms<br>%{base:,.3f} to %{x:,.3f} ms"


def lane_traces(axis: str = "y") -> list[Trace]:
    """Empty traces for the lanes of a rank, in the order of `lane_changes`."""
    exposed = _bar(theme.EXPOSED, axis)
    exposed["marker"]["line"] = {"width": 1, "color": theme.EXPOSED.text_color}
    exposed["hovertemplate"] = f"<b>exposed communication</b>, {_WHEN}<extra></extra>"
    hatch = theme.hatch(theme.ALL_GATHER) | {"fillmode": "replace", "bgcolor": "rgba(0,0,0,0)"}
    quiet = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, "yaxis": axis, "visible": False}
    hatching = {
        "type": "scatter", "name": "hatching", "fill": "toself", "line": {"width": 0, "simplify": False},
        "fillpattern": hatch, **quiet,
    }  # fmt: skip
    return [exposed, *(_bar(kind, axis) for kind in KIND_ORDER), hatching]


def memory_traces() -> list[Trace]:
    """Empty traces for the live memory, in the order of `memory_changes`."""
    limit = {
        "type": "scatter", "name": "the device's limit", "mode": "lines", "yaxis": "y2", "legend": "legend2",
        "line": {"color": theme.LIMIT, "width": 2, "dash": "dash"}, "visible": False,
        "hovertemplate": "the device's limit: %{y:.1f} GiB<extra></extra>",
    }  # fmt: skip
    return [*(_area(category) for category in CATEGORIES), limit]


def _bar(kind: LegendKind, axis: str) -> Trace:
    return {
        "type": "bar", "name": kind.name, "orientation": "h", "textposition": "none", "cliponaxis": True,
        "yaxis": axis, "visible": False,
        "marker": {"color": kind.color, "line": {"width": 0.7 if kind in NEIGHBOURS else 0, "color": SEAM}},
        "unselected": {"marker": {"opacity": 0.22}},
        "hovertemplate": f"<b>%{{hovertext}}</b>, {_WHEN}<br>%{{text:.4~g}} MiB<extra></extra>",
    }  # fmt: skip


def _area(category: Memory) -> Trace:
    kind = MEMORY[category]
    area: Trace = {
        "type": "scatter", "name": kind.name, "mode": "lines", "line": {"shape": "hv", "width": 0}, "visible": False,
        "fillcolor": kind.color, "fill": "tozeroy" if category is CATEGORIES[0] else "tonexty", "yaxis": "y2",
        "legend": "legend2",
        "hovertemplate": f"<b>{kind.name}</b>, %{{customdata:.2f}} GiB at %{{x:.2f}} ms<extra></extra>",
    }  # fmt: skip
    if kind.hatched:
        area["fillpattern"] = theme.hatch(kind) | {"bgcolor": kind.color}
    return area


def lane_changes(seen: Scene, window: tuple[float, float], lit: Set[int] | None = None) -> list[Change]:
    """For each of `lane_traces` the properties that show a scene.

    Args:
        window: the milliseconds in view.
        lit: the operations that stay bright while all others fade, by their rows; None for all.
    """
    spans = seen.exposed_ms
    lengths = _f(end - begin for begin, end in spans)
    centre = seen.places.centres[seen.rank, Lane.COMPUTE]
    found: list[Change] = [
        {
            "base": _f(begin for begin, _ in spans), "x": lengths, "customdata": lengths,
            "y": _f([centre] * len(spans)), "width": BAR, "visible": len(spans) > 0,
            "selectedpoints": None if lit is None else [],
        }
    ]  # fmt: skip
    bars = seen.bars_between(*window)
    n_bytes = seen.timeline.columns["bytes"]
    base, length = _f(bars.start_ms), _f(bars.length_ms)
    y, width = map(_f, seen.places.of(bars))
    mib = _f([sum([n_bytes[row] for row in some]) / 2**20 for some in bars.members])
    names = _names(seen, bars)
    bright = [lit is not None and not lit.isdisjoint(some) for some in bars.members]
    shortest = 0.6 * (window[1] - window[0]) / PIXELS
    of_kind: list[list[int]] = [[] for _ in KIND_ORDER]
    for k, op in enumerate(bars.ops):
        number = _NUMBER[id(op)]
        if number not in _SHORT or length[k] > shortest or bright[k]:
            of_kind[number].append(k)
    xs, ys = array("f"), array("f")  # of the bars that are hatched, as one path with a gap after each
    for kind, shown in zip(KIND_ORDER, of_kind, strict=True):
        if not shown:  # an empty trace that calls itself visible is corrected by the browser, with every move
            found.append({"visible": False})
            continue
        lengths = _f([length[k] for k in shown])
        high = {width[k] for k in shown}
        found.append(
            {"base": _f([base[k] for k in shown]), "x": lengths, "y": _f([y[k] for k in shown]),
             "width": high.pop() if len(high) == 1 else _f([width[k] for k in shown]),
             "customdata": lengths, "hovertext": [names[k] for k in shown], "text": _f([mib[k] for k in shown]),
             "selectedpoints": None if lit is None else [n for n, k in enumerate(shown) if bright[k]], "visible": True}
        )  # fmt: skip
        if kind.hatched:
            for k in shown:
                left, right, top, bottom = base[k], base[k] + length[k], y[k] - width[k] / 2, y[k] + width[k] / 2
                xs.extend((left, right, right, left, left, nan))
                ys.extend((top, top, bottom, bottom, top, nan))
    return [*found, {"x": xs, "y": ys, "visible": len(xs) > 0}]


def _names(seen: Scene, bars: Bars) -> list[str]:
    """What bars are called."""
    ops, units = seen.timeline.columns["op"], seen.timeline.columns["unit"]
    escaped = {unit: safe(unit) for unit in set(units)}
    return [
        f"{OP_NAMES[op]} {escaped[units[some[0]]]}".rstrip()
        if len(some) == 1
        else f"{len(some)} operations ({contents(ops[row] for row in some)}; zoom in)"
        for op, some in zip(bars.ops, bars.members, strict=True)
    ]


def bar_at(seen: Scene, window: tuple[float, float], number: int, base_ms: float) -> int | None:
    """The row of the (first) operation of the bar of trace ``number`` that begins nearest to a moment."""
    bars = seen.bars_between(*window)
    near = [(abs(bars.start_ms[k] - base_ms), k) for k, op in enumerate(bars.ops) if _NUMBER[id(op)] == number - 1]
    return bars.members[min(near)[1]][0] if near else None


def memory_changes(seen: Scene, window: tuple[float, float]) -> list[Change]:
    """For each of `memory_traces` the properties that show a scene."""
    times, live = seen.memory(*window)
    total = array("f", [0.0]) * len(times)
    found: list[Change] = []
    for category in CATEGORIES:
        if category in live:
            total = _f(map(add, total, live[category]))
            found.append({"x": times, "y": total, "customdata": live[category], "visible": True})
        else:
            found.append({"visible": False})
    limit = seen.strip.limit_bytes / GIB
    found.append({"x": _f([0, 1e9]), "y": _f([limit, limit]), "visible": True})
    return found


def _f(values: Iterable[float]) -> Floats:
    return array("f", values)


def limit_in_view(seen: Scene) -> bool:
    """Whether the peak comes near enough to the device's limit for an axis to show both."""
    return seen.strip.peak_bytes > NEAR * seen.strip.limit_bytes


def legend_html(seen: Scene, memory: bool = True) -> str:
    """What the colours of a scene mean, as HTML that takes its own colours from the page.

    Args:
        memory: those of memory too.
    """
    used = {KINDS[op] for op in seen.bars.ops}
    kinds = [kind for kind in KIND_ORDER if kind in used]
    if len(seen.exposed_ms):
        kinds.append(theme.EXPOSED)
    lanes = [_swatch(kind) for kind in kinds]
    kept = [_swatch(MEMORY[category]) for category in CATEGORIES if category in seen.strip.alive.present]
    if not seen.strip.limit_bytes:
        pass  # which nobody has recorded
    elif not limit_in_view(seen):
        kept.append(
            f"<span style='opacity:.7'>the device's limit, {human_bytes(seen.strip.limit_bytes)}, is far above</span>"
        )
    else:
        kept.append(
            f"<span style='white-space:nowrap'><span style='color:{theme.LIMIT}'>╌╌</span> the device's limit</span>"
        )
    line = "display:flex;flex-wrap:wrap;gap:0 14px;font-size:12px;line-height:19px;padding-left:116px"
    return "".join(
        f"<div style='{line}'><span style='opacity:.7;width:56px;margin-left:-70px'>{name}</span>{''.join(parts)}</div>"
        for name, parts in (("lanes", lanes), *([("memory", kept)] if memory else []))
    )


def _swatch(kind: LegendKind) -> str:
    hatch = (
        f"repeating-linear-gradient(135deg,rgba(255,255,255,.55) 0 1.5px,{kind.color} 1.5px 5px)"
        if kind.hatched
        else kind.color
    )
    edge = f"outline:1px solid {theme.EXPOSED.text_color};" if kind is theme.EXPOSED else ""
    return (
        f"<span style='white-space:nowrap'><span style='display:inline-block;width:12px;height:12px;{edge}"
        f"vertical-align:-2px;background:{hatch}'></span> {escape(kind.name)}</span>"
    )
