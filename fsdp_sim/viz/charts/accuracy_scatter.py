"""`accuracy`: what the simulator predicts for published training runs against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import plotly.graph_objects as go

from fsdp_sim.validate import HeldOut, PredictedRow, PublishedRun, Summary, compare, fitting_rows, read_csv, summary
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.chart import series
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes

Of = Literal["time", "memory"]
BAND = 0.10
OTHERS, UNLIKE = "other stacks", "not plain FSDP"
TOP_PX, GAP_PX, LOW_PX = 380, 44, 140
WORST, LEAST_RANGE = 12, 4.0


class Dot(NamedTuple):
    """One run: seconds or bytes, measured and predicted."""

    group: str
    id: str
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0


def accuracy(rows: Sequence[PublishedRun | PredictedRow | HeldOut] | None = None, *, of: Of = "time") -> Picture:
    """Predicted against measured, both logarithmic, with a band of ±10%; below, the error of each run.

    Runs that are not plain FSDP (quantised, not sharded, another framework) are hollow, and count in no average.

    Args:
        rows: measurements (`fsdp_sim.validate.read_csv`), which are predicted now, or those with their predictions:
            of `compare`, or groups that `leave_out` held out (beside which all others are of other stacks). By default
            all measurements that come with the project, which takes some ten seconds.
        of: ``time`` of a step, or peak ``memory``.

    Raises:
        ValueError: an unknown ``of``, or no row has the number that it asks for.
    """
    if of not in ("time", "memory"):
        raise ValueError(f"of is {of!r}; it must be time or memory")
    given = [compare(row) if isinstance(row, PublishedRun) else row for row in (read_csv() if rows is None else rows)]
    dots = _dots(given, of)
    if not dots:
        what = "a step time" if of == "time" else "a peak memory"
        raise ValueError(f"none of the {len(given)} rows has {what} to compare with")
    return Picture(_figure(dots, of), _finding(dots, of), _tables(dots, of))


def _dots(given: Sequence[PredictedRow | HeldOut], of: Of) -> list[Dot]:
    """The runs that can be compared, in groups: by GPU those that the simulator's numbers are fitted to, and others."""
    found = []
    compared = [one for one in given if isinstance(one, PredictedRow)]
    fitted = set(map(id, fitting_rows([c.row for c in compared]))) if len(compared) == len(given) else set()
    for c in compared:
        measured = c.row.step_time_s if of == "time" else c.row.peak_memory_bytes
        if measured:
            predicted = c.predicted_step_time_s if of == "time" else c.predicted_peak_memory_bytes
            group = c.row.cluster.gpu.name if id(c.row) in fitted or of == "memory" else OTHERS
            group = UNLIKE if c.row.remark else group
            found.append(Dot(group, c.row.id, _what(c.row), measured, predicted))
    for one in [one for one in given if isinstance(one, HeldOut)]:
        if of == "time":
            for row, predicted in zip(one.rows, one.predicted_s, strict=True):
                if row.step_time_s:
                    found.append(Dot(row.cluster.gpu.name, row.id, _what(row), row.step_time_s, predicted))
    return found


def _what(row: PublishedRun) -> str:
    words = [row.model.name, f"{row.cluster.gpus:,} x {row.cluster.gpu.name}", row.remark, row.source]
    words.insert(2, f"{row.plan.micro_batch} x {row.plan.seq_len:,} tokens")
    return ", ".join(filter(None, words))


def _groups(dots: Sequence[Dot]) -> dict[str, list[Dot]]:
    """By group, the largest first, the others last."""
    names = sorted(
        {d.group for d in dots}, key=lambda n: (n == UNLIKE, n == OTHERS, -sum(d.group == n for d in dots), n)
    )
    return {name: [d for d in dots if d.group == name] for name in names}


def _human(value: float, of: Of) -> str:
    return f"{value:.3g} s" if of == "time" else human_bytes(value)


def _figure(dots: Sequence[Dot], of: Of) -> go.Figure:
    figure = go.Figure()
    unit = 1.0 if of == "time" else 2.0**30
    values = [v / unit for d in dots for v in (d.measured, d.predicted)]
    plot_px = TOP_PX + GAP_PX + LOW_PX
    low, high = min(values), max(values)
    wider = max(1.0, LEAST_RANGE / (high / low)) ** 0.5
    axis = chart.log_axis(low / wider, high * wider)
    ends = [10 ** axis["range"][0], 10 ** axis["range"][1]]
    band = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, "line": {"width": 0}}
    figure.add_trace(go.Scatter(band, x=ends, y=[e / (1 + BAND) for e in ends]))
    figure.add_trace(
        go.Scatter(band, x=ends, y=[e * (1 + BAND) for e in ends], fill="tonexty", fillcolor=theme.SEPARATOR)
    )
    exact = {"width": 1.5, "color": theme.COPY.color}
    figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", hoverinfo="skip", showlegend=False, line=exact))
    for number, (name, mine) in enumerate(_groups(dots).items()):
        look = series(number)
        hover = [
            f"<b>{safe(d.id)}</b> {safe(d.what)}<br>measured {_human(d.measured, of)}, predicted "
            f"{_human(d.predicted, of)}: {d.error:+.1%}"
            for d in mine
        ]
        marker = {
            "color": look.color,
            "symbol": f"{look.symbol}-open" if name == UNLIKE else look.symbol,
            "size": 8,
            "opacity": 0.8,
            "line": {"width": 1.2, "color": look.color} if name == UNLIKE else {"width": 0.7, "color": "#FFFFFF"},
        }
        marks = {"mode": "markers", "hovertext": hover, "hoverinfo": "text", "marker": marker, "legendgroup": name}
        x, y = [d.measured / unit for d in mine], [d.predicted / unit for d in mine]
        figure.add_trace(go.Scatter(marks, x=x, y=y, name=f"{safe(name)} ({len(mine)})"))
        figure.add_trace(
            go.Scatter(marks, x=x, y=[d.error for d in mine], yaxis="y2", showlegend=False, name=safe(name))
        )
    errors = [d.error for d in dots]
    far = [min(-2 * BAND, min(errors) * 1.15), max(2 * BAND, max(errors) * 1.15)]
    inside = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": -BAND, "y1": BAND}
    figure.add_shape(inside, fillcolor=theme.SEPARATOR, line={"width": 0}, layer="below", name="band")
    suffix = "s" if of == "time" else "GiB"
    ticks = [f"{v:,.4g} {suffix}" for v in axis["tickvals"]]
    axis |= {"ticktext": ticks}
    figure.update_layout(
        xaxis=axis | {"anchor": "y2", "title": {"text": "measured", "standoff": 6}},
        yaxis=axis | {"domain": [1 - TOP_PX / plot_px, 1], "title": {"text": "predicted", "standoff": 6}},
        yaxis2={
            "domain": [0, LOW_PX / plot_px],
            "range": far,
            "tickformat": "+.0%",
            "nticks": 6,
            "zeroline": True,
            "zerolinecolor": theme.COPY.color,
            "zerolinewidth": 1.5,
        },
        legend={
            "x": 0.985,
            "xanchor": "right",
            "y": 1.015 - TOP_PX / plot_px,
            "yanchor": "bottom",
            "itemsizing": "constant",
        },
    )
    sentence = "<b>error</b>: predicted over measured, less 1; the band is ±10%"
    chart.write(figure, sentence, x=0, y=LOW_PX / plot_px, yshift=4)
    chart.frame(figure, _headline(dots, of), plot_px=plot_px, left=96, above=20)
    return figure


def _counted(dots: Sequence[Dot]) -> list[Dot]:
    """Those that are plain FSDP; all, where none is."""
    return [d for d in dots if d.group != UNLIKE] or list(dots)


def _within(dots: Sequence[Dot]) -> float:
    return sum(abs(d.error) <= BAND for d in dots) / len(dots)


def _errors(dots: Sequence[Dot]) -> Summary:
    return summary(d.error for d in dots)


def _headline(dots: Sequence[Dot], of: Of) -> str:
    what, counted = "step time" if of == "time" else "peak memory", _counted(dots)
    if len(counted) == 1:
        return f"Predicted {what} of one published run: {counted[0].error:+.1%}."
    off = f"{_errors(counted).mape:.1%} off on average"
    return f"Predicted {what} of {len(counted)} published runs: {off}, {_within(counted):.0%} within 10%."


def _finding(dots: Sequence[Dot], of: Of) -> str:
    what, counted = "step time" if of == "time" else "peak memory", _counted(dots)
    overall = _errors(counted)
    sentences = [
        f"The simulator's {what} of {len(counted)} published run{'s' * (len(counted) > 1)} is off by "
        f"{overall.mape:.1%} on average, {overall.median_abs_error:.1%} in the median and "
        f"{overall.p90_abs_error:.1%} at the 90th percentile; {_within(counted):.0%} are within 10%."
    ]
    if len(dots) > len(counted):
        sentences.append(f"The {len(dots) - len(counted)} that are not plain FSDP are not counted.")
    groups = _groups(dots)
    if len(groups) > 1:
        each = [f"{name} {_errors(mine).mape:.1%} ({len(mine)})" for name, mine in groups.items()]
        sentences.append(f"On average by group: {', '.join(each)}.")
    if OTHERS in groups and len(groups) > 1:
        sentences.append(
            "The simulator's numbers are fitted to the runs named by their GPU, and to none of the other stacks."
        )
    worst = max(counted, key=lambda d: abs(d.error))
    measured, predicted = _human(worst.measured, of), _human(worst.predicted, of)
    sentences.append(f"The worst is {worst.id} ({worst.what}): {measured} measured, {predicted} predicted.")
    return " ".join(sentences)


def _tables(dots: Sequence[Dot], of: Of) -> tuple[Table, ...]:
    groups = [("all plain FSDP", _counted(dots)), *_groups(dots).items()]
    rows = []
    for name, mine in groups:
        s, bias = _errors(mine), sum(d.error for d in mine) / len(mine)
        shares = (s.mape, s.median_abs_error, s.p90_abs_error, _within(mine))
        rows.append((name, str(s.n), *(f"{v:.1%}" for v in shares), f"{bias:+.1%}"))
    head = ("runs", "number", "mean", "median", "90th percentile", "within 10%", "bias")
    worst = [
        (d.id, d.what, _human(d.measured, of), _human(d.predicted, of), f"{d.error:+.1%}")
        for d in sorted(dots, key=lambda d: -abs(d.error))[:WORST]
    ]
    return (
        Table("Absolute error", head, tuple(rows)),
        Table("The worst", ("run", "what", "measured", "predicted", "error"), tuple(worst)),
    )
