"""What overlap looks like as numbers: times over the length of a gather, gathers issued ahead, FSDP beside DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fsdp_sim.timeline import Op, Timeline
from fsdp_sim.viz import Picture, Table, chart
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_ms

COMPUTES = (Op.FWD, Op.BWD, Op.RECOMPUTE)


def forward_times(
    gathers_s: Sequence[float], compute_s: float, seconds: Mapping[str, Sequence[float]], sentence: str
) -> Picture:
    """The time of a forward over the time of one all-gather, for several ways to run it.

    Args:
        gathers_s: seconds of one all-gather, ascending.
        compute_s: seconds of one unit's forward; where a gather takes as long is marked.
        seconds: by name, seconds of the forward for each of ``gathers_s``.
        sentence: the title; what is to be seen.
    """
    x = [1e3 * gather_s for gather_s in gathers_s]
    figure = lines(x, {name: [1e3 * value for value in values] for name, values in seconds.items()}, sentence)
    figure.add_shape(
        type="line", x0=1e3 * compute_s, x1=1e3 * compute_s, xref="x", y0=0, y1=1, yref="paper",
        line={"color": "#8C959F", "dash": "dash", "width": 1.5},
    )  # fmt: skip
    chart.write(
        figure, "a gather takes as long<br>as a forward", muted=True, x=1e3 * compute_s, xref="x", y=0.98,
        yanchor="top", xshift=5,
    )  # fmt: skip
    figure.update_xaxes(title="one all-gather (ms)", rangemode="tozero")
    figure.update_yaxes(title="forward (ms)", rangemode="tozero")
    ends = "; ".join(f"{name} {human_ms(v[0])} to {human_ms(v[-1])}" for name, v in seconds.items())
    gathers = f"From {human_ms(gathers_s[0])} to {human_ms(gathers_s[-1])} for a gather the forward takes: {ends}."
    rows = tuple(
        (human_ms(gather_s), *(human_ms(values[i]) for values in seconds.values()))
        for i, gather_s in enumerate(gathers_s)
    )
    return Picture(figure, f"{sentence}. {gathers}", (Table("forward", ("one all-gather", *seconds), rows),))


def issued_ahead(timelines: Mapping[str, Timeline], sentence: str, *, rank: int = 0) -> Picture:
    """Over the time of a step, how many all-gathers the CPU has issued whose units have not begun to compute.

    Args:
        timelines: of one step each, by name; units whose name begins with ``layers`` count.
        sentence: the title; what is to be seen.
    """
    curves = {name: _ahead(timeline, rank) for name, timeline in timelines.items()}
    figure = go.Figure()
    for number, (name, points) in enumerate(curves.items()):
        look = chart.series(number)
        figure.add_scatter(
            x=[1e3 * time_s for time_s, _ in points], y=[count for _, count in points], name=name, mode="lines",
            line={"color": look.color, "width": 2.5 + 1.5 * number, "shape": "hv"},
        )  # fmt: skip
    chart.frame(figure, sentence, plot_px=260, bottom=96)
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"})
    figure.update_xaxes(title="time in the step (ms)")
    figure.update_yaxes(title="gathers issued, not computed with", rangemode="tozero")
    rows = tuple((name, str(max(count for _, count in points))) for name, points in curves.items())
    text = "; ".join(f"{name} {most}" for name, most in rows)
    table = Table("All-gathers issued ahead", ("", "at most"), rows)
    return Picture(figure, f"{sentence}. At most: {text}.", (table,))


def _ahead(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    ops = [event for event in timeline.ops if event.rank == rank]
    changes: list[tuple[float, int]] = [(0.0, 0)]
    for i, gather in enumerate(ops):
        if gather.op is Op.ALL_GATHER and gather.unit.startswith("layers"):
            used_s = next(e.start_s for e in ops[i + 1 :] if e.op in COMPUTES and e.unit == gather.unit)
            changes += [(gather.issue_s, 1), (used_s, -1)]
    points, alive = [], 0
    for time_s, change in sorted(changes):
        alive += change
        points.append((time_s, alive))
    return points


def beside_ddp(tokens: Sequence[int], shares: Mapping[str, Sequence[float]], sentence: str) -> Picture:
    """FSDP's speed as a share of DDP's over the tokens that a GPU has in a step.

    Args:
        tokens: per GPU and step, ascending.
        shares: by name of the network, FSDP's tokens per second over DDP's, for each of ``tokens``.
        sentence: the title; what is to be seen.
    """
    figure = lines(list(tokens), shares, sentence)
    figure.update_xaxes(title="tokens per GPU and step", **chart.log_axis(tokens[0], tokens[-1]))
    figure.update_yaxes(title="FSDP's speed, DDP = 100%", tickformat=".0%", range=[0, 1.08])
    rows = tuple((f"{count:,}", *(f"{values[i]:.0%}" for values in shares.values())) for i, count in enumerate(tokens))
    ends = "; ".join(f"{name}: {values[0]:.0%} to {values[-1]:.0%}" for name, values in shares.items())
    text = f"From {tokens[0]:,} to {tokens[-1]:,} tokens: {ends}."
    return Picture(figure, f"{sentence}. {text}", (Table("of DDP's speed", ("tokens", *shares), rows),))


def lines(x: Sequence[float], y: Mapping[str, Sequence[float]], sentence: str) -> go.Figure:
    """Several lines, told apart by colour, mark and dash; axes are the caller's."""
    figure = go.Figure()
    for number, (name, values) in enumerate(y.items()):
        look = chart.series(number)
        figure.add_scatter(
            x=list(x), y=list(values), name=safe(name), mode="lines+markers",
            line={"color": look.color, "dash": look.dash, "width": 2.5},
            marker={"color": look.color, "symbol": look.symbol, "size": 9},
        )  # fmt: skip
    chart.frame(figure, sentence, plot_px=280, bottom=96)
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"})
    return figure
