"""The scoreboard: what was predicted and what was measured in each run of the lab, kept beside the progress."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from fsdp_sim.learn import kept
from fsdp_sim.viz import Picture, Table, chart
from labs.experiments.result import LabResult, ResultRow

SHOWN = 20
BAND = (0.8, 1.25)
"""Where a good prediction lies, over what was measured: drawn as a band."""


class Score(msgspec.Struct, frozen=True):
    """One run of the lab.

    Attributes:
        at: when, as 2026-11-28 14:05.
        what: the model, the cluster and the plan, in words.
        step_s: predicted for the cluster of the learner's choice: the middle and both ends of the interval.
        rows: predicted and measured here.
    """

    at: str
    what: str
    step_s: tuple[float, float, float]
    rows: tuple[ResultRow, ...]


class _Scores(msgspec.Struct, omit_defaults=True):
    scores: tuple[Score, ...] = ()


def path() -> Path:
    """The file: beside that of the progress."""
    return kept.path().with_name("capstone.json")


def read() -> tuple[Score, ...]:
    """All rows, the oldest first; none if there is no file or it is damaged."""
    return kept.read(path(), _Scores).scores


def keep(what: str, step_s: tuple[float, float, float], result: LabResult) -> str:
    """Add a run.

    Returns:
        where it is, or what went wrong, as a sentence.
    """
    score = Score(time.strftime("%Y-%m-%d %H:%M"), what, step_s, result.rows)
    wrong = kept.change(path(), _Scores, lambda held: _Scores((*held.scores, score)))
    return wrong or f"Kept in {path().name}, beside your progress."


def scoreboard() -> Picture:
    """Predicted over measured, of every quantity of the last runs; 1 is a perfect prediction.

    Raises:
        ValueError: no run was kept yet.
    """
    import plotly.graph_objects as go

    scores = read()[-SHOWN:]
    if not scores:
        raise ValueError("the scoreboard is empty; keep a run first")
    figure = go.Figure()
    figure.add_hrect(y0=BAND[0], y1=BAND[1], fillcolor="gray", opacity=0.15, line_width=0)
    figure.add_hline(y=1, line_dash="dot", line_color="gray")
    for number, quantity in enumerate(dict.fromkeys(row.quantity for score in scores for row in score.rows)):
        look = chart.series(number)
        points = [
            (place, 1 + row.error)
            for place, score in enumerate(scores, 1)
            for row in score.rows
            if row.quantity == quantity and row.error is not None
        ]
        figure.add_scatter(
            x=[place for place, _ in points], y=[ratio for _, ratio in points], name=quantity, mode="lines+markers",
            line={"color": look.color, "dash": look.dash}, marker={"symbol": look.symbol, "size": 10},
        )  # fmt: skip
    errors = [abs(row.error) for row in scores[-1].rows if row.error is not None]
    runs = "1 run" if len(scores) == 1 else f"{len(scores)} runs"
    sentence = f"{runs} on your scoreboard: in the last one, predictions are within {max(0.01, *errors):.0%}"
    chart.frame(figure, sentence, plot_px=300, right=40, bottom=100)
    figure.update_xaxes(title="run", dtick=1)
    figure.update_yaxes(title="predicted / measured", type="log")
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"})
    return Picture(figure, f"{sentence}.", (table(scores),))


def table(scores: tuple[Score, ...]) -> Table:
    """The same as a table, with the interval of the large cluster's step."""
    lines = []
    for score in scores:
        middle, low, high = score.step_s
        step = f"{middle:.3g} s ({low:.3g} to {high:.3g})"
        lines += [(score.at, score.what, step, *row.cells[1:]) for row in score.rows]
    columns = ("when", "what", "its step, simulated", "here", "predicted", "measured", "error")
    return Table("scoreboard", columns, tuple(lines))
