"""The Pareto picture of a sweep: time per token against memory, the front as a line, the rest as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")  # Okabe and Ito
TICKS = 7
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")


def check_suffix(path: str) -> None:
    """Whether a picture can be written there.

    Raises:
        ValueError: neither .html nor .png, or a package is missing that it takes.
    """
    suffix = Path(path).suffix.lower()
    needed = {".html": ("plotly",), ".png": ("plotly", "kaleido")}
    if suffix not in needed:
        raise ValueError(f"--figure {path}: a picture is .html or .png")
    from importlib.util import find_spec

    for package in needed[suffix]:
        if find_spec(package) is None:
            raise ValueError(
                f"--figure {path} needs {package}, which is not installed: pip install 'fsdp-sim[notebooks]'"
                + (" kaleido" if package == "kaleido" else "")
            )


def pareto_figure(rows: Sequence[Mapping[str, str]], front: Sequence[int], varied: Sequence[str]) -> Any:
    """A plotly figure of the rows that are possible, one colour and sign per model."""
    import plotly.graph_objects as go

    figure = go.Figure()
    models = list(dict.fromkeys(_model(row) for row in rows if row["step_time_s"]))
    for number, model in enumerate(models):
        color, symbol = COLORS[number % len(COLORS)], SYMBOLS[number % len(SYMBOLS)]
        of_model = [n for n, row in enumerate(rows) if row["step_time_s"] and _model(row) == model]
        on_front = [n for n in front if _model(rows[n]) == model]
        groups = (
            ("does not fit", [n for n in of_model if rows[n]["fits"] == "false"], "markers", 0.25, f"{symbol}-open"),
            (
                "fits",
                [n for n in of_model if rows[n]["fits"] == "true" and n not in set(on_front)],
                "markers",
                0.5,
                symbol,
            ),
            ("front", on_front, "lines+markers", 1.0, symbol),
        )
        for name, places, mode, opacity, sign in groups:
            if places:
                figure.add_trace(
                    go.Scatter(
                        x=[1e6 / float(rows[n]["tokens_per_s_per_gpu"]) for n in places],
                        y=[float(rows[n]["peak_memory_bytes"]) / GIB for n in places],
                        text=[_hover(rows[n], varied) for n in places], hoverinfo="text", mode=mode, opacity=opacity,
                        name=f"{model}: {name}" if model else name, line={"color": color, "shape": "hv"},
                        marker={"color": color, "symbol": sign, "size": 10 if name == "front" else 6},
                    )
                )  # fmt: skip
    times = [1e6 / float(row["tokens_per_s_per_gpu"]) for row in rows if row["tokens_per_s_per_gpu"]]
    limits = {float(row["memory_limit_bytes"]) / GIB for row in rows if row["memory_limit_bytes"]}
    for limit in sorted(limits):  # a trace: plotly puts the text of a line beyond a logarithmic axis
        figure.add_trace(
            go.Scatter(
                x=[min(times), max(times)], y=[limit, limit], mode="lines", line={"dash": "dot", "color": "#57606A"},
                name=f"limit {limit:.1f} GiB", hoverinfo="name",
            )
        )  # fmt: skip
    memories = [float(row["peak_memory_bytes"]) / GIB for row in rows if row["peak_memory_bytes"]]
    figure.update_layout(
        template="plotly_white", title="Time per token against memory: below and to the left is better",
        xaxis={"title": "GPU time per token (µs)", **_log_axis(times)},
        yaxis={"title": "peak memory (GiB)", **_log_axis(memories)},
    )  # fmt: skip
    return figure


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with a few numbers on it however short it is; plotly marks 1, 2, 5, 10, ... alone."""
    if not values:
        return {}
    low, high = min(values), max(values)
    ticks = [float(f"{low * (high / low) ** (n / (TICKS - 1)):.3g}") for n in range(TICKS)]
    return {"type": "log", "tickvals": sorted(set(ticks))}


def write_pareto(path: str, rows: Sequence[Mapping[str, str]], front: Sequence[int], varied: Sequence[str]) -> None:
    """Write the picture as .html (which opens without a network) or .png."""
    check_suffix(path)
    figure = pareto_figure(rows, front, varied)
    if Path(path).suffix.lower() == ".html":
        figure.write_html(path, include_plotlyjs=True)
        return
    from fsdp_sim.viz import Picture

    Path(path).write_bytes(Picture(figure, "").to_image())


def _model(row: Mapping[str, str]) -> str:
    return row.get("model") or row.get("model_file") or ""


def _hover(row: Mapping[str, str], varied: Sequence[str]) -> str:
    asked = [f"{name}={row[name]}" for name in varied]
    return "<br>".join(
        [*asked, f"{float(row['tokens_per_s_per_gpu']):,.0f} tokens/s per GPU", f"MFU {float(row['mfu']):.1%}",
         f"step {float(row['step_time_s']) * 1e3:.1f} ms", f"{float(row['peak_memory_bytes']) / GIB:.1f} GiB"]
    )  # fmt: skip
