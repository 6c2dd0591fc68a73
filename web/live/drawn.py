"""The explorer's first figure as HTML and SVG, which a browser shows at once; plotly.js takes its place later."""

from __future__ import annotations

from html import escape
from typing import Any

from fsdp_sim.viz.explorer.layout_of import PLOT

WIDE = 900  # of the plot, in units of its own; the page stretches it


def drawn(answer: dict[str, Any]) -> str:
    """What `web.live.calls.explorer.see` found, as it looks before a script has run."""
    layout, traces = answer["layout"], answer["data"]
    end_ms, end_gib = layout["xaxis"]["range"][1], layout["yaxis2"]["range"][1]
    top, low = (PLOT * (1 - edge) for edge in reversed(layout["yaxis"]["domain"]))
    lowest, _ = layout["yaxis"]["range"]
    floor = PLOT * (1 - layout["yaxis2"]["domain"][1])

    def x(ms: float) -> float:
        return round(min(ms / end_ms, 2.0) * WIDE, 1)

    def row(y: float) -> float:
        return round(top + (low - top) * y / lowest, 1)

    def height(gib: float) -> float:
        return round(floor + (PLOT - floor) * (1 - gib / end_gib), 1)

    bars = [t for t in traces if t["type"] == "bar"]
    areas = [t for t in traces if t["type"] == "scatter" and t.get("fillcolor")]
    parts = [f'<line x1="{x(ms)}" x2="{x(ms)}" y1="0" y2="{PLOT}"/>' for ms in ticks(end_ms)]
    parts += [f'<line x1="0" x2="{WIDE}" y1="{height(gib)}" y2="{height(gib)}"/>' for gib in ticks(end_gib, 5)]
    for area in reversed(areas):  # each from the bottom, so that the next covers all but its own part
        points = zip(area["x"], area["y"], strict=True)
        steps = "".join(f"H{x(ms)}V{height(gib)}" for ms, gib in points)
        parts.append(f'<path fill="{area["fillcolor"]}" d="M0 {PLOT}{steps}V{PLOT}z"/>')
        if area.get("fillpattern"):
            parts.append(f'<path fill="url(#hatch)" d="M0 {PLOT}{steps}V{PLOT}z"/>')
    for bar in bars:
        wide = bar["width"] if isinstance(bar["width"], list) else [bar["width"]] * len(bar["x"])
        boxes = "".join(
            f"M{x(at)} {row(y - w / 2)}h{x(length) or 0.3}v{round((low - top) * w / lowest, 1)}h-{x(length) or 0.3}z"
            for at, length, y, w in zip(bar["base"], bar["x"], bar["y"], wide, strict=True)
        )
        parts.append(f'<path fill="{bar["marker"]["color"]}" d="{boxes}"/>')
    for hatching in (t for t in traces if t["name"] == "hatching"):
        d = "".join(
            "z" if ms is None else f"{'M' if n % 6 == 0 else 'L'}{x(ms)} {row(y)}"
            for n, (ms, y) in enumerate(zip(hatching["x"], hatching["y"], strict=True))
        )
        parts.append(f'<path fill="url(#hatch)" d="{d}"/>')
    for line in (t for t in traces if t["name"] == "the device's limit" and t["y"][0] <= end_gib):
        at = height(line["y"][0])
        parts.append(
            f'<line x1="0" x2="{WIDE}" y1="{at}" y2="{at}" style="stroke:{line["line"]["color"]};stroke-width:2" '
            'stroke-dasharray="7 5"/>'
        )
    rows = [
        (row(at), text) for at, text in zip(layout["yaxis"]["tickvals"], layout["yaxis"]["ticktext"], strict=True)
    ] + [(height(gib), f"{gib:g} GiB") for gib in ticks(end_gib, 5)]
    labels = [f'<span class="row" style="top:{22 + at:.0f}px">{escape(text)}</span>' for at, text in rows]
    left = "var(--left) + (100% - var(--left) - 14px)"
    labels += [
        f'<span class="tick" style="left:calc({left} * {ms / end_ms:.4f})">{ms:g}</span>' for ms in ticks(end_ms)
    ]
    hatch = (
        '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="2" height="7" fill="#fff" fill-opacity=".55"/></pattern>'
    )
    return (
        f'<div class="drawn"><svg viewBox="0 0 {WIDE} {PLOT}" preserveAspectRatio="none" aria-hidden="true">'
        f"<defs>{hatch}</defs>{''.join(parts)}</svg>{''.join(labels)}"
        f'<span class="axis">{escape(layout["xaxis"]["title"]["text"])}</span></div>'
    )


def ticks(end: float, most: int = 9) -> list[float]:
    """Round numbers from 0 on, at most so many."""
    size = 10.0**-3
    while True:
        for step in (size, 2 * size, 5 * size):
            if end / step < most:
                return [round(n * step, 9) for n in range(int(end / step) + 1)]
        size *= 10
