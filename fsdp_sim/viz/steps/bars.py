"""The bars of a step as columns: one per operation, or, where there are more than a screen can show, one per few.

Plotly draws about two thousand bars quickly and a screen shows no more, so above that operations that are narrower
than a pixel or two are merged with their neighbours on the same lane; such a bar is as high as the part of its time in
which they run. The figure says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_sim.timeline import Lane, Op
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.step_view import MAX_BARS, StepView
from fsdp_sim.viz.theme import KINDS, OP_DOES, OP_NAMES, LegendKind, safe, short_unit
from fsdp_sim.words import human_ms

if TYPE_CHECKING:
    import numpy as np  # which only figures that stand still need

    Numbers = Sequence[float] | np.ndarray

FINEST = 1 / 1_000  # of a step: no merged bar is made narrower than this on purpose
EDGE = "rgba(255,255,255,0.75)"  # between bars that follow each other
SMALL_OPS = {theme.COPY, theme.CAST, theme.HOST_COPY}  # drawn first: their edges would hide what they lie between
_LEGEND = {kind: 1000 + rank for rank, kind in enumerate(dict.fromkeys(KINDS.values()))}
_OPS = sorted(KINDS, key=lambda op: (KINDS[op] not in SMALL_OPS, _LEGEND[KINDS[op]]))
_ORDER = {op: n for n, op in enumerate(_OPS)}
_LANES = {lane: n for n, lane in enumerate(Lane)}


def kinds_in_order(ops: Iterable[Op]) -> list[Op]:
    """Operations in the order in which they are drawn."""
    return sorted(ops, key=_ORDER.__getitem__)


@dataclass(frozen=True)
class Bars:
    """Operations of one step, entry k of each column is of bar k; in the order in which they are drawn.

    Attributes:
        members: the operations of a bar as rows of the timeline, in order of time; one, unless bars had to be merged.
        ops: what it is drawn as: the operation, or of several the one that takes longest.
        places: the rank and the lane it is on.
        start_ms, length_ms: in milliseconds since the step began.
        busy: the part of a bar in which its operations run; below 1 only where there are gaps between several.
        merged_ms: operations shorter than this were merged; 0 when none were.
    """

    members: list[tuple[int, ...]]
    ops: list[Op]
    places: list[tuple[int, Lane]]
    start_ms: list[float]
    length_ms: list[float]
    busy: list[float]
    merged_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.members)


def bars_of(view: StepView, most: int = MAX_BARS) -> Bars:
    """The bars of a view, at most about ``most``."""
    if len(view.rows) <= most:
        return bars_from(view, [(row,) for row in view.rows])
    width_s = view.step_s * FINEST
    while len(members := merged(view, view.rows, width_s)) > most and width_s < view.step_s:
        width_s *= 2
    return bars_from(view, members, width_s)


def bars_from(view: StepView, members: Sequence[tuple[int, ...]], width_s: float = 0.0) -> Bars:
    """The bars that consist of these operations, in the order in which they are drawn."""
    columns = view.timeline.columns
    op_of, lanes, ranks, starts_s, ends_s = (columns[name] for name in ("op", "lane", "rank", "start_s", "end_s"))
    ops = [op_of[some[0]] if len(some) == 1 else _longest(view, some) for some in members]
    places = [(ranks[some[0]], lanes[some[0]]) for some in members]
    starts = [starts_s[some[0]] for some in members]
    if width_s:
        ends = [max([ends_s[row] for row in some]) for some in members]
        running = [sum([ends_s[row] - starts_s[row] for row in some]) for some in members]
        busy = [
            min(run / (end - start), 1.0) if end > start else 1.0
            for start, end, run in zip(starts, ends, running, strict=True)
        ]
    else:
        ends = [ends_s[some[0]] for some in members]
        busy = [1.0] * len(members)
    keys = [
        (_ORDER[op], len(some) > 1, rank, _LANES[lane], start, k)
        for k, (op, some, (rank, lane), start) in enumerate(zip(ops, members, places, starts, strict=True))
    ]
    order = [key[-1] for key in sorted(keys)]
    origin_s = view.origin_s
    return Bars(
        [members[k] for k in order],
        [ops[k] for k in order],
        [places[k] for k in order],
        [(starts[k] - origin_s) * 1e3 for k in order],
        [(ends[k] - starts[k]) * 1e3 for k in order],
        [busy[k] for k in order],
        width_s * 1e3,
    )


def merged(view: StepView, rows: Sequence[int], width_s: float) -> list[tuple[int, ...]]:
    """Neighbours on a lane, of one phase of one micro-batch, together while they are narrower than ``width_s``."""
    columns = view.timeline.columns
    ranks, lanes, phases = columns["rank"], columns["lane"], columns["phase"]
    micro_batches, starts, ends = columns["micro_batch"], columns["start_s"], columns["end_s"]
    by_lane: dict[tuple[int, Lane], list[int]] = defaultdict(list)
    for row in sorted(rows, key=starts.__getitem__):
        by_lane[ranks[row], lanes[row]].append(row)
    found: list[tuple[int, ...]] = []
    for first, *others in by_lane.values():
        together = [first]
        for row in others:
            first = together[0]
            same = (phases[row], micro_batches[row]) == (phases[first], micro_batches[first])
            if same and ends[row] - starts[first] <= width_s:
                together.append(row)
            else:
                found.append(tuple(together))
                together = [row]
        found.append(tuple(together))
    return found


def _longest(view: StepView, some: Sequence[int]) -> Op:
    columns = view.timeline.columns
    seconds: dict[Op, float] = defaultdict(float)
    for row in some:
        seconds[columns["op"][row]] += columns["end_s"][row] - columns["start_s"][row]
    return max(seconds, key=lambda op: seconds[op])


def bar_traces(
    view: StepView,
    bars: Bars,
    rows: Sequence[float],
    heights: Sequence[float],
    details: Sequence[str],
    *,
    step_ms: float,
) -> list[dict[str, Any]]:
    """Plotly traces of bars, one for each operation that occurs, together in the order of ``bars``.

    Args:
        rows, heights: centre and height of each bar on the vertical axis.
        details: what the hover text says after name, duration and times; escaped.
        step_ms: the length of the time axis; bars much narrower have edges in their own colour, others would hide them.
    """
    columns = view.timeline.columns
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
            details_of = [f"<br>{contents([columns['op'][row] for row in m])}" for m in members]
        else:
            head = f"<b>{OP_NAMES[op]} %{{customdata[0]}}</b>, %{{customdata[1]}}<br><i>{OP_DOES[op]}</i>"
            units = [columns["unit"][row] for (row,) in members]
            text = [safe(short_unit(unit)) for unit in units]
            names = [safe(unit) for unit in units]
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


def contents(ops: Iterable[Op]) -> str:
    """What operations are, counted: ``forward ×3, all-gather ×1``."""
    counted = Counter(OP_NAMES[op] for op in ops)
    return ", ".join(f"{name} ×{n}" for name, n in counted.most_common())


def bar_trace(
    kind: LegendKind, base_ms: Numbers, length_ms: Numbers, rows: Numbers, heights: Numbers, step_ms: float
) -> dict[str, Any]:
    """Horizontal bars of one kind, without texts; times as 4-byte floats, which is plenty for a picture."""
    import numpy as np

    wide = len(length_ms) > 0 and float(np.median(length_ms)) > step_ms / 400
    same = len(heights) > 0 and all(height == heights[0] for height in heights)
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind.name,
        "legendgroup": kind.name,
        "legendrank": _LEGEND.get(kind, 2000),
        "base": np.asarray(base_ms, np.float32),
        "x": np.asarray(length_ms, np.float32),
        "y": np.asarray(rows, np.float32),
        "width": float(heights[0]) if same else np.asarray(heights, np.float32),
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
