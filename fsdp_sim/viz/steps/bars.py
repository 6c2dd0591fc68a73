"""The bars of a step as columns: one per operation, or, where there are more than a screen can show, one per few.

Plotly draws about two thousand bars quickly and a screen shows no more, so above that operations that are narrower
than a pixel or two are merged with their neighbours on the same lane; such a bar is as high as the part of its time in
which they run. The figure says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_sim.timeline import Event, Lane, Op
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.step_view import MAX_BARS, StepView
from fsdp_sim.viz.theme import KINDS, OP_DOES, OP_NAMES, Kind, safe, short_unit
from fsdp_sim.words import human_ms

BAR = 0.92  # of the height of its row
THIN = {Lane.AG_COPY_IN: 0.5, Lane.PRE_UNSHARD: 0.5}  # height of a row in lanes; 1 when not named
FINEST = 1 / 1_000  # of a step: no merged bar is made narrower than this on purpose
EDGE = "rgba(255,255,255,0.75)"  # between bars that follow each other
SMALL_OPS = {theme.COPY, theme.CAST, theme.HOST_COPY}  # drawn first: their edges would hide what they lie between
_LEGEND = {kind: 1000 + rank for rank, kind in enumerate(dict.fromkeys(KINDS.values()))}
_ORDER = {op: (kind not in SMALL_OPS, _LEGEND[kind], n) for n, (op, kind) in enumerate(KINDS.items())}


def kinds_in_order(ops: Iterable[Op]) -> list[Op]:
    """Operations in the order in which they are drawn."""
    return sorted(ops, key=_ORDER.__getitem__)


@dataclass(frozen=True)
class Bars:
    """Operations of one step, entry k of each column is of bar k; in the order in which traces draw them.

    Attributes:
        members: the operations of a bar, in order of time; one, unless bars had to be merged.
        ops: what it is drawn as: the operation, or of several the one that takes longest.
        start_ms, length_ms: in milliseconds since the step began.
        busy: the part of a bar in which its operations run; below 1 only where there are gaps between several.
        merged_ms: operations shorter than this were merged; 0 when none were.
    """

    members: list[tuple[Event, ...]]
    ops: list[Op]
    start_ms: np.ndarray
    length_ms: np.ndarray
    busy: np.ndarray
    merged_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.members)


def bars_of(view: StepView, most: int = MAX_BARS) -> Bars:
    """The bars of a view, at most about ``most``."""
    ops, width_s = view.ops, 0.0
    members: list[tuple[Event, ...]] = [(e,) for e in ops]
    while len(members) > most and width_s < view.step_s:
        width_s = max(2 * width_s, view.step_s * FINEST)
        members = _merge(ops, width_s)
    shown = [some[0].op if len(some) == 1 else _longest(some) for some in members]
    keys = [
        (_ORDER[op], len(some) > 1, some[0].rank, list(Lane).index(some[0].lane), some[0].start_s)
        for op, some in zip(shown, members, strict=True)
    ]
    order = sorted(range(len(members)), key=keys.__getitem__)
    members = [members[k] for k in order]
    starts = np.array([some[0].start_s for some in members])
    ends = np.array([max(e.end_s for e in some) for some in members])
    running = np.array([sum(e.duration_s for e in some) for some in members])
    busy = np.ones(len(members))
    np.divide(running, ends - starts, out=busy, where=ends > starts)
    return Bars(
        members,
        [shown[k] for k in order],
        (starts - view.origin_s) * 1e3,
        (ends - starts) * 1e3,
        np.minimum(busy, 1.0),
        width_s * 1e3,
    )


def _merge(ops: Sequence[Event], width_s: float) -> list[tuple[Event, ...]]:
    """Neighbours on a lane, of one phase of one micro-batch, together while they are narrower than ``width_s``."""
    lanes: dict[tuple[int, Lane], list[Event]] = defaultdict(list)
    for e in sorted(ops, key=lambda e: e.start_s):
        lanes[e.rank, e.lane].append(e)
    found: list[tuple[Event, ...]] = []
    for events in lanes.values():
        together = [events[0]]
        for e in events[1:]:
            first = together[0]
            same = (e.phase, e.micro_batch) == (first.phase, first.micro_batch)
            if same and e.end_s - first.start_s <= width_s:
                together.append(e)
            else:
                found.append(tuple(together))
                together = [e]
        found.append(tuple(together))
    return found


def _longest(some: Sequence[Event]) -> Op:
    seconds: dict[Op, float] = defaultdict(float)
    for e in some:
        seconds[e.op] += e.duration_s
    return max(seconds, key=lambda op: seconds[op])


def bar_traces(
    bars: Bars, rows: np.ndarray, heights: np.ndarray, details: Sequence[str], *, step_ms: float
) -> list[dict[str, Any]]:
    """Plotly traces of bars, one for each operation that occurs, together in the order of ``bars``.

    Args:
        rows, heights: centre and height of each bar on the vertical axis.
        details: what the hover text says after name, duration and times; escaped.
        step_ms: the length of the time axis; bars much narrower have edges in their own colour, others would hide them.
    """
    merged = [len(some) > 1 for some in bars.members]
    pieces = [k for k in range(len(bars)) if k == 0 or (bars.ops[k], merged[k]) != (bars.ops[k - 1], merged[k - 1])]
    traces = []
    for first, last in zip(pieces, [*pieces[1:], len(bars)], strict=True):
        some = slice(first, last)
        op, kind, members = bars.ops[first], KINDS[bars.ops[first]], bars.members[some]
        if merged[first]:
            head = "<b>%{customdata[0]}</b>, %{customdata[1]}"
            text = [f"×{len(m)}" for m in members]
            names = [f"{len(m)} operations" for m in members]
            details_of = [f"<br>{_contents(m)}" for m in members]
        else:
            head = f"<b>{OP_NAMES[op]} %{{customdata[0]}}</b>, %{{customdata[1]}}<br><i>{OP_DOES[op]}</i>"
            text = [safe(short_unit(m[0].unit)) for m in members]
            names = [safe(m[0].unit) for m in members]
            details_of = list(details[some])
        lengths = bars.length_ms[some]
        durations = [human_ms(ms / 1e3) for ms in lengths]
        trace = bar_trace(kind, bars.start_ms[some], lengths, rows[some], heights[some], step_ms)
        traces.append(
            trace
            | {
                "text": text,
                "textposition": "inside",
                "customdata": [list(row) for row in zip(names, durations, details_of, strict=True)],
                "hovertemplate": f"{head}<br>%{{base:,.2f}} to %{{x:,.2f}} ms%{{customdata[2]}}<extra></extra>",
                "meta": {"op": "" if merged[first] else OP_NAMES[op]},
            }
        )
    return traces


def _contents(members: Sequence[Event]) -> str:
    counted = Counter(OP_NAMES[e.op] for e in members)
    return ", ".join(f"{name} ×{n}" for name, n in counted.most_common())


def bar_trace(
    kind: Kind, base_ms: np.ndarray, length_ms: np.ndarray, rows: np.ndarray, heights: np.ndarray, step_ms: float
) -> dict[str, Any]:
    """Horizontal bars of one kind, without texts; times as 4-byte floats, which is plenty for a picture."""
    wide = bool(len(length_ms)) and float(np.median(length_ms)) > step_ms / 400
    same = len(heights) > 0 and (heights == heights[0]).all()
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind.name,
        "legendgroup": kind.name,
        "legendrank": _LEGEND.get(kind, 2000),
        "base": base_ms.astype(np.float32),
        "x": length_ms.astype(np.float32),
        "y": rows.astype(np.float32),
        "width": float(heights[0]) if same else heights.astype(np.float32),
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": kind.text_color, "size": 11},
        "cliponaxis": True,
        "marker": {
            "color": kind.color,
            "pattern": theme.hatch(kind),
            "line": {"color": EDGE if wide else kind.color, "width": 0.75},
        },
    }
