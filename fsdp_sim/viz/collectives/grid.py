"""Where the cells of a collective lie, and how they look: a column per rank, a row per chunk, arrows between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fsdp_sim.viz.collectives.scenes import Cell, CollectiveFrame, cell_of
from fsdp_sim.viz.collectives.steps import Chunk, CollectiveRun, Transfer
from fsdp_sim.viz.shard_maps.cells import CellState
from fsdp_sim.viz.shard_maps.grid import CELL_STYLES
from fsdp_sim.viz.theme import INK, safe

GAP = 0.55  # between two ranks, for the arrows, in cells
TWICE_UP_TO = 8  # ranks; of more, a step is one scene, and numbers on arrows are left out

COLORS = {
    Cell.GAP: ("", "rgba(0,0,0,0)", INK),
    Cell.NOTHING: ("", CELL_STYLES[CellState.NOTHING].color, INK),
    Cell.OWN: ("own chunk", CELL_STYLES[CellState.OWN].color, "#FFFFFF"),
    Cell.COPY: ("copy of another rank's chunk", CELL_STYLES[CellState.GATHERED].color, INK),
    Cell.PARTIAL: ("own numbers, or a sum over some ranks", CELL_STYLES[CellState.PARTIAL].color, INK),
    Cell.SUM: ("sum over all ranks", CELL_STYLES[CellState.REDUCED].color, "#FFFFFF"),
    Cell.SUM_COPY: ("copy of a finished sum", "#E3B596", INK),
}
ALL_TO_ALL_NAMES = {Cell.COPY: "chunk for another rank", Cell.OWN: "chunk that has arrived"}
ARROWS = {"all-gather": "#0072B2", "reduce-scatter": "#D55E00", "broadcast": "#0072B2", "all-to-all": "#0072B2"}


def numbers_of(chunk: Chunk) -> str:
    return " ".join(f"{value:g}" for value in chunk.values.tolist())


def shortened(text: str, few: bool) -> str:
    most = 12 if few else 5
    return text if len(text) <= most else f"{text[: most - 1]}…"


class RingGrid:
    """Edges of the cells, in cells; an all-to-all has what is for others above what has come."""

    def __init__(self, run: CollectiveRun) -> None:
        self.run = run
        self.rows = len(run.steps[0].held[0])
        self.gap_after = run.ranks if run.collective == "all-to-all" else self.rows  # what is sent, above what has come
        self.lefts = [rank * (1 + GAP) for rank in range(run.ranks)]
        self.width = self.lefts[-1] + 1
        self.tops = [row + (0.5 if row >= self.gap_after else 0.0) for row in range(self.rows)]
        self.height = self.tops[-1] + 1
        self.x_edges = np.array([edge for left in self.lefts for edge in (left, left + 1)], dtype=np.float32)
        self.y_edges = np.array(sorted({edge for top in self.tops for edge in (top, top + 1)}), dtype=np.float32)
        self.few = run.ranks <= TWICE_UP_TO

    def centre(self, rank: int, place: int) -> tuple[float, float]:
        return self.lefts[rank] + 0.5, self.tops[place] + 0.5

    def kinds(self, scene: CollectiveFrame) -> np.ndarray:
        found = np.zeros((len(self.y_edges) - 1, len(self.x_edges) - 1), dtype=np.uint8)
        lines = [int(np.searchsorted(self.y_edges, np.float32(top))) for top in self.tops]
        for rank, row in enumerate(scene.held):
            for place, chunk in enumerate(row):
                found[lines[place], 2 * rank] = cell_of(self.run, rank, place, chunk)
        return found

    def arrow(self, t: Transfer) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """From cell to cell; around the back in two pieces."""
        (x0, y0), (x1, y1) = self.centre(t.source, t.chunk), self.centre(t.target, t.place)
        around = t.target == 0 and t.source == self.run.ranks - 1 and t.place == t.chunk and self.run.ranks > 2
        if around:
            return [((x0 + 0.5, y0), (x0 + 0.5 + GAP * 0.85, y0)), ((x1 - 0.5 - GAP * 0.85, y1), (x1 - 0.5, y1))]
        side = 0.5 if x1 > x0 else -0.5
        return [((x0 + side, y0), (x1 - side, y1))]


def moving_traces(
    grid: RingGrid,
    scene: CollectiveFrame,
    used: Sequence[Cell],
    x: str,
    y: str,
    *,
    numbers: bool = True,
    small: bool = False,
) -> Iterator[Any]:
    """The traces that change: cells, hatching, numbers, arrows, numbers on them, outlines of what has arrived."""
    run = grid.run
    kinds = grid.kinds(scene)
    axes = {"xaxis": x, "yaxis": y}
    yield go.Heatmap(z=kinds, **axes)
    cells = [(r, p, c, cell_of(run, r, p, c)) for r, row in enumerate(scene.held) for p, c in enumerate(row) if c]
    if Cell.PARTIAL in used:
        partial = [grid.centre(r, p) for r, p, _, kind in cells if kind is Cell.PARTIAL]
        yield go.Bar(
            x=[cx for cx, _ in partial], base=[cy - 0.47 for _, cy in partial], y=[0.94] * len(partial), **axes
        )
    if numbers:
        shown = [
            (*grid.centre(r, p), _label(run, c, kind, grid.few and not small), COLORS[kind][2])
            for r, p, c, kind in cells
        ]
        columns = list(zip(*shown, strict=True)) or [(), (), (), ()]
        yield go.Scatter(
            x=columns[0], y=columns[1], text=columns[2], textfont={"color": list(columns[3])}, mode="text", **axes
        )
    pieces = [piece for t in scene.step.transfers for piece in grid.arrow(t)] if scene.moving else []
    color = ARROWS.get(scene.step.part, "#0072B2")
    yield go.Scatter(
        x=[v for (x0, _), (x1, _) in pieces for v in (x0, x1, None)],
        y=[v for (_, y0), (_, y1) in pieces for v in (y0, y1, None)],
        line={"color": color}, marker={"color": color, "size": [0, 13, 0] * len(pieces)}, **axes,
    )  # fmt: skip
    if numbers and grid.few and run.collective != "all-to-all":
        labels = [
            (grid.arrow(t)[0], shortened(numbers_of(t.payload), True)) for t in scene.step.transfers if scene.moving
        ]
        yield go.Scatter(
            x=[a[0] * 0.5 + b[0] * 0.5 for (a, b), _ in labels], y=[a[1] * 0.5 + b[1] * 0.5 for (a, b), _ in labels],
            text=[text for _, text in labels], mode="text", **axes,
        )  # fmt: skip
    xs: list[float | None] = []
    ys: list[float | None] = []
    for t in scene.step.transfers if scene.arrived else ():
        cx, cy = grid.centre(t.target, t.place)
        xs += [cx - 0.5, cx + 0.5, cx + 0.5, cx - 0.5, cx - 0.5, None]
        ys += [cy - 0.5, cy - 0.5, cy + 0.5, cy + 0.5, cy - 0.5, None]
    yield go.Scatter(x=xs, y=ys, line={"color": color}, **axes)


def _label(run: CollectiveRun, chunk: Chunk, kind: Cell, roomy: bool) -> str:
    text = safe(shortened(numbers_of(chunk), run.ranks <= TWICE_UP_TO)) or "∅"
    if roomy and kind is Cell.PARTIAL and len(chunk.of) > 1:
        return f"<b>{text}</b><br><span style='font-size:9px'>{len(chunk.of)} of {run.ranks} ranks</span>"
    return f"<b>{text}</b>"


def styled(grid: RingGrid, traces: Sequence[Any], used: Sequence[Cell], *, small: bool) -> list[Any]:
    """What stays: colours, edges, fonts."""
    count = len(Cell)
    scale = [[edge, COLORS[cell][1]] for cell in Cell for edge in (cell / count, (cell + 1) / count)]
    size = (10 if grid.few else 8) if small else (14 if grid.run.ranks <= 6 else 12 if grid.few else 10)
    for trace in traces:
        trace.update(hoverinfo="skip", showlegend=False)
        if isinstance(trace, go.Heatmap):
            trace.update(
                x=grid.x_edges, y=grid.y_edges, zmin=-0.5, zmax=count - 0.5, colorscale=scale, showscale=False, xgap=0,
                ygap=1 if small else 3, showlegend=False,
            )  # fmt: skip
        elif isinstance(trace, go.Bar):
            trace.update(width=1.0, marker=hatched(Cell.PARTIAL))
        elif trace.mode == "text":
            trace.update(textfont={"size": size})
    texts = [trace for trace in traces if isinstance(trace, go.Scatter) and trace.mode == "text"]
    if len(texts) > 1:
        texts[1].update(textposition="top center", textfont={"size": size - 1}, cliponaxis=False)
    paths = [trace for trace in traces if isinstance(trace, go.Scatter) and trace.mode != "text"]
    paths[0].update(
        mode="lines+markers", line={"width": 1.5 if small else 2.5}, cliponaxis=False,
        marker={"symbol": "arrow", "angleref": "previous", "line": {"width": 0}, "opacity": 1},
    )  # fmt: skip
    if small:
        paths[0].update(marker={"size": [v * 0.6 for v in paths[0].marker.size or ()]})
    paths[1].update(mode="lines", line={"width": 2 if small else 3})
    return list(traces)


def hatched(cell: Cell) -> dict[str, Any]:
    shape = {"shape": "/" if cell is Cell.PARTIAL else "", "fgcolor": "#FFFFFF", "fgopacity": 0.45, "size": 9,
             "solidity": 0.15, "fillmode": "overlay"}  # fmt: skip
    return {"color": COLORS[cell][1], "line": {"width": 0}, "pattern": shape}


def legend_traces(run: CollectiveRun, used: Sequence[Cell]) -> Iterator[go.Bar]:
    for cell in used:
        name = ALL_TO_ALL_NAMES.get(cell, COLORS[cell][0]) if run.collective == "all-to-all" else COLORS[cell][0]
        if name:
            yield go.Bar(x=[None], y=[None], name=name, hoverinfo="skip", marker=hatched(cell))


def used_cells(grid: RingGrid, reel: Sequence[CollectiveFrame]) -> list[Cell]:
    seen = {int(kind) for scene in reel for kind in np.unique(grid.kinds(scene))}
    return [cell for cell in Cell if cell in seen and cell is not Cell.GAP]


def row_names(run: CollectiveRun) -> list[str]:
    if run.collective == "all-to-all":
        return [f"{word} {rank}" for word in ("for rank", "from rank") for rank in range(run.ranks)]
    return [f"chunk {place}" for place in range(run.ranks)]
