"""`pareto`: the plans of a sweep by time and memory, the front that none of them beats, and its knee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, log10
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.explore import MAY_FIT, MODEL_NAMES, RUNS, Sweep, counted, played_front
from fsdp_sim.explore.sweep import RESULTS
from fsdp_sim.simulation import Fit
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.chart import series
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import byte_unit, human_bytes, human_ms, human_rate

SweepRow = Mapping[str, str]
PLOT_PX = 400
GIB = 2**30
LABEL_LINES = 5


def pareto(
    rows: Sweep | Sequence[SweepRow], *, varied: Sequence[str] | None = None, limit: str = "the device has"
) -> Picture:
    """GPU time per token against peak memory, a mark for each plan; below and to the left is better.

    The plans that run and that no other of the same model beats in both are the front, drawn as a line. Its knee is
    the plan from which more of the one costs most of the other. Plans that do not fit are hollow, those on the edge of
    memory have a dot; the limit is dashed.

    Args:
        rows: a sweep, which is run if it has not been, or its rows (texts, as `fsdp_sim.explore.read_rows` gives them).
        varied: the columns that say what differs between rows; by default those with more than one value.
        limit: what stands at the dashed line, before its bytes.

    Raises:
        ValueError: these are not the rows of a sweep.
    """
    if isinstance(rows, Sweep):
        varied = list(rows.vary) if varied is None else varied
        rows = [*rows.done, *rows.rows()]
    plans = [dict(row) for row in rows]
    if plans and (missing := [name for name in RESULTS if name not in plans[0]]):
        raise ValueError(f"these are no rows of a sweep: they have no {missing[0]}")
    if not any(row["step_time_s"] for row in plans):
        return _nothing(plans)
    if varied is None:
        varied = [n for n in plans[0] if n not in RESULTS and len({row.get(n) for row in plans}) > 1]
    varied = [name for name in varied if name not in MODEL_NAMES]  # which each front says already
    fronts = _fronts(plans)
    return Picture(
        _figure(plans, fronts, varied, limit), _finding(plans, fronts, varied), (_table(plans, fronts, varied),)
    )


def _nothing(rows: Sequence[SweepRow]) -> Picture:
    """Of a sweep that has not come to any plan that is possible."""
    sentence = (
        f"None of the {len(rows)} combinations is possible: {rows[0]['error']}." if rows else "No plan was simulated."
    )
    figure = go.Figure()
    chart.frame(figure, sentence, plot_px=PLOT_PX)
    axes = {"xaxis": {"title": {"text": "GPU time per token (µs)"}}, "yaxis": {"title": {"text": "peak memory"}}}
    return Picture(figure.update_layout(axes), sentence)


def _fronts(rows: Sequence[dict[str, str]]) -> dict[str, list[int]]:
    """The front of each model, from fast to small; models that do not fit at all have none."""
    found: dict[str, list[int]] = {_model(row): [] for row in rows if row["step_time_s"]}
    for place in played_front(rows):
        found[_model(rows[place])].append(place)
    return found


def _model(row: SweepRow) -> str:
    """What is trained, in words: its name, and the dimensions that are given."""
    return ", ".join(f"{name}={row[name]}" if name != "model" else row[name] for name in MODEL_NAMES if row.get(name))


def _us(row: SweepRow) -> float:
    return 1e6 / float(row["tokens_per_s_per_gpu"])


def _bytes(row: SweepRow) -> float:
    return float(row["peak_memory_bytes"])


def _size(row: SweepRow) -> str:
    return f"{human_bytes(_bytes(row))}{f', {Fit.EDGE}' if row['fit'] == Fit.EDGE else ''}"


def _asked(row: SweepRow, varied: Sequence[str]) -> str:
    return ", ".join(f"{name}={row[name]}" for name in varied if name in row)


def _knee(rows: Sequence[SweepRow], front: Sequence[int]) -> int | None:
    """The plan of the front that lies deepest below the line between its ends, both axes logarithmic."""
    if len(front) < 3:
        return None
    first, last = rows[front[0]], rows[front[-1]]
    width, height = log(_us(last) / _us(first)), log(_bytes(first) / _bytes(last))
    if width <= 0 or height <= 0:
        return None

    def depth(place: int) -> float:
        row = rows[place]
        return 1.0 - log(_us(row) / _us(first)) / width - log(_bytes(row) / _bytes(last)) / height

    best = max(front[1:-1], key=depth)
    return best if depth(best) > 0.05 else None


def _figure(rows: Sequence[SweepRow], fronts: Mapping[str, list[int]], varied: Sequence[str], limit: str) -> go.Figure:
    figure = go.Figure()
    known = [row for row in rows if row["step_time_s"]]
    for number, (model, front) in enumerate(fronts.items()):
        look, mine = series(number), [n for n, row in enumerate(rows) if row["step_time_s"] and _model(row) == model]
        on_front = set(front)
        fits = [n for n in mine if rows[n]["fit"] in (Fit.FITS, MAY_FIT) and n not in on_front]
        edge = [n for n in mine if rows[n]["fit"] == Fit.EDGE and n not in on_front]
        fit = " or ".join(sorted({rows[n]["fit"] for n in fits}))
        large = [n for n in mine if rows[n]["fit"] == Fit.DOES_NOT_FIT]
        groups = (
            (large, "markers", f"{look.symbol}-open", 7, 0.55, str(Fit.DOES_NOT_FIT)),
            (edge, "markers", look.symbol, 7, 0.4, "on the edge, and another plan beats it"),
            (fits, "markers", look.symbol, 7, 0.4, f"{fit}, and another plan beats it"),
            (front, "lines+markers", look.symbol, 11, 1.0, "front"),
        )
        for places, mode, symbol, size, opacity, what in groups:
            if places:
                figure.add_trace(
                    go.Scatter(
                        x=[_us(rows[n]) for n in places], y=[_bytes(rows[n]) for n in places], mode=mode,
                        name=f"{safe(model)}: {what}" if len(fronts) > 1 else what, opacity=opacity,
                        hovertext=[_hover(rows[n], varied, what) for n in places], hoverinfo="text",
                        line={"color": look.color, "shape": "hv", "width": 2.5},
                        marker={"color": look.color, "size": size,
                                "symbol": _symbols([rows[n] for n in places], symbol),
                                "line": {"width": 1.2, "color": look.color if "open" in symbol else "#FFFFFF"}},
                    )
                )  # fmt: skip
    limits = sorted({float(row["memory_limit_bytes"]) for row in known if row["memory_limit_bytes"]})
    times, sizes = [_us(row) for row in known], [_bytes(row) for row in known]
    low, high = min(sizes), max(*sizes, *(limits[-1:] if limits else sizes))
    alone = len(fronts) == 1
    spread = max(times) / min(times)
    x = chart.log_axis(min(times) / spread ** (0.3 if alone else 0.05), max(times) * spread**0.04)
    y = _memory_axis(low * (low / high) ** (0.22 if alone else 0.05), high)
    for most in limits:
        line = {"color": theme.REDUCE_SCATTER.color, "width": 2, "dash": "dash"}
        figure.add_shape(
            type="line", xref="paper", x0=0, x1=1, yref="y", y0=most, y1=most, line=line, name="limit", layer="below"
        )
        place = {
            "x": 1,
            "xref": "paper",
            "xanchor": "right",
            "y": log10(most),
            "yanchor": "bottom",
            "font": {"size": 12},
        }
        figure.add_annotation(place, text=f"{limit} {human_bytes(most)}", showarrow=False)
    if alone:
        (front,) = fronts.values()
        _label_front(figure, rows, front, varied)
    else:
        _name_models(figure, rows, fronts)
    figure.update_layout(
        xaxis=x | {"title": {"text": "GPU time per token (µs)", "standoff": 6}},
        yaxis=y | {"title": {"text": "peak memory", "standoff": 8}},
        showlegend=False,
    )
    signs = "<b>line</b>: the front · <b>small</b>: another plan beats it · <b>hollow</b>: does not fit"
    if any(row["fit"] == Fit.EDGE for row in known):
        signs += " · <b>with a dot</b>: on the edge"
    chart.write(figure, signs, x=0, y=1, yshift=4)
    chart.frame(figure, _headline(rows, fronts), plot_px=PLOT_PX, left=92, above=32)
    return figure


def _memory_axis(low: float, high: float) -> dict[str, Any]:
    size, unit = byte_unit(high)
    axis = chart.log_axis(low / size, high / size)
    return axis | {
        "range": [end + log10(size) for end in axis["range"]],
        "tickvals": [v * size for v in axis["tickvals"]],
        "ticktext": [f"{v:,.4g} {unit}" for v in axis["tickvals"]],
    }


def _label_front(figure: go.Figure, rows: Sequence[SweepRow], front: Sequence[int], varied: Sequence[str]) -> None:
    """The ends of the front and its knee, by what was asked; below and to the left, where no plan can lie."""
    if not front:
        return
    knee = _knee(rows, front)
    chosen = {front[0]: "fastest", front[-1]: "smallest"} if len(front) > 1 else {front[0]: "fastest and smallest"}
    if knee is not None:
        chosen[knee] = "knee"
    for n, what in chosen.items():
        row = rows[n]
        asked = [f"{safe(name)}={safe(row[name])}" for name in varied if name in row]
        more = ["…"] if len(asked) > LABEL_LINES else []
        text = "<br>".join([f"<b>{what}</b>", *asked[:LABEL_LINES], *more])
        place = {"x": log10(_us(row)), "y": log10(_bytes(row)), "xanchor": "right", "yanchor": "top", "align": "right"}
        figure.add_annotation(place, text=text, showarrow=False, xshift=-8, yshift=2, font={"size": 11})


def _name_models(figure: go.Figure, rows: Sequence[SweepRow], fronts: Mapping[str, list[int]]) -> None:
    """The name of each model below its smallest plan, with its mark."""
    for number, (model, front) in enumerate(fronts.items()):
        mine = front or [n for n, row in enumerate(rows) if row["step_time_s"] and _model(row) == model]
        row = rows[min(mine, key=lambda n: _bytes(rows[n]))]
        look = series(number)
        text = f"<span style='color:{look.color}'>{chart.MARKS[look.symbol]}</span> <b>{safe(model)}</b>"
        place = {"x": log10(_us(row)), "y": log10(_bytes(row)), "yanchor": "top", "yshift": -8, "font": {"size": 12}}
        figure.add_annotation(place, text=text, showarrow=False)


def _hover(row: SweepRow, varied: Sequence[str], what: str) -> str:
    asked = [f"{name}={safe(row[name])}" for name in varied if name in row]
    mfu = [f"MFU {_mfu(row)}"] if row["mfu"] else []
    return "<br>".join(
        [f"<b>{what}</b>", *asked, f"{human_rate(float(row['tokens_per_s_per_gpu']))} tokens/s per GPU",
         *mfu, f"step {human_ms(float(row['step_time_s']))}", _size(row)]
    )  # fmt: skip


def _headline(rows: Sequence[SweepRow], fronts: Mapping[str, list[int]]) -> str:
    known = sum(bool(row["step_time_s"]) for row in rows)
    if not any(row["fit"] in RUNS for row in rows):
        return f"None of the {known} plans fits." if known > 1 else "The only plan does not fit."
    count = sum(map(len, fronts.values()))
    if known == 1:
        runs = "is on the edge of memory" if any(row["fit"] == Fit.EDGE for row in rows) else "fits"
        return f"One plan, and it {runs}: {human_bytes(min(_bytes(r) for r in rows if r['step_time_s']))}."
    if count == 1:
        return f"Of {known} plans one is both the fastest and the smallest."
    return f"{count} of {known} plans are worth choosing: no other is both faster and smaller."


def _finding(rows: Sequence[SweepRow], fronts: Mapping[str, list[int]], varied: Sequence[str]) -> str:
    sentences = [f"{counted(rows)}."]
    for model, front in fronts.items():
        of = f"{model}: " if model else ""
        if not front:
            sentences.append(f"{of}no plan fits.")
            continue
        fast, small, knee = rows[front[0]], rows[front[-1]], _knee(rows, front)
        if len(front) == 1:
            sentences.append(f"{of}one plan is both the fastest and the smallest: {_described(fast, varied)}.")
            continue
        text = f"{of}the fastest plan is {_described(fast, varied)}; the smallest is {_described(small, varied)}."
        if knee is not None:
            more, less = _us(rows[knee]) / _us(fast) - 1, 1 - _bytes(rows[knee]) / _bytes(fast)
            cost = f"{more:.0%} more time than the fastest for {less:.0%} less memory"
            text += f" The knee is {_described(rows[knee], varied)}: {cost}."
        sentences.append(text)
    return " ".join(sentences)


def _described(row: SweepRow, varied: Sequence[str]) -> str:
    rate = f"{human_rate(float(row['tokens_per_s_per_gpu']))} tokens/s per GPU"
    asked, size = _asked(row, varied), _size(row)
    return f"{asked} ({rate}, {size})" if asked else f"{rate} and {size}"


def _mfu(row: SweepRow) -> str:
    """Nothing where that is not known: of CPUs nobody says what they could do at most."""
    return f"{float(row['mfu']):.1%}" if row["mfu"] else ""


def _shown_us(time_us: float) -> str:
    return f"{time_us:.3g} µs" if time_us < 999.5 else f"{time_us:,.0f} µs"


def _table(rows: Sequence[SweepRow], fronts: Mapping[str, list[int]], varied: Sequence[str]) -> Table:
    found = []
    for model, front in fronts.items():
        knee = _knee(rows, front)
        for place in front:
            row = rows[place]
            numbers = (_shown_us(_us(row)), f"{float(row['tokens_per_s_per_gpu']):,.0f}", _mfu(row))
            asked = tuple(row.get(name, "") for name in varied)
            found.append((model, *asked, *numbers, human_bytes(_bytes(row)), _remark(row, place == knee)))
    head = ("model", *varied, "GPU time per token", "tokens/s per GPU", "MFU", "peak memory", "")
    return Table("The front, the fastest first", head, tuple(found))


def _remark(row: SweepRow, knee: bool) -> str:
    return ", ".join(["knee"] * knee + [str(Fit.EDGE)] * (row["fit"] == Fit.EDGE))


def _symbols(rows: Sequence[SweepRow], symbol: str) -> str | list[str]:
    """What is on the edge has a dot."""
    edge = [row["fit"] == Fit.EDGE for row in rows]
    return [f"{symbol}-dot" if one else symbol for one in edge] if any(edge) else symbol
