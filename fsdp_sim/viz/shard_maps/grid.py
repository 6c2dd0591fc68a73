"""Where each cell of a shard map lies, and its colour: ranks from left to right, units from the top down.

Under each rank are up to three columns: parameters, gradients, optimizer state. A cell is one shard, so that a unit
that is whole on a rank is a full column, and a unit at rest is a diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fsdp_sim.timeline import Memory, UnitShards
from fsdp_sim.viz import theme
from fsdp_sim.viz.shard_maps.cells import CellState, cells
from fsdp_sim.viz.shard_maps.scenes import ShardFrame, Stage
from fsdp_sim.viz.theme import KINDS, MEMORY, safe
from fsdp_sim.words import human_bytes

RANK_GAP, GROUP_GAP, BAND_GAP = 0.55, 0.9, 0.6
COLUMNS = ("params", "grads", "optim")
COLUMN_NAMES = ("parameters", "gradients", "optimizer state")
NO_CELL = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class CellStyle:
    """Of one `CellState`: its legend entry, colour and pattern."""

    name: str
    color: str
    pattern: str = ""


CELL_STYLES = {
    CellState.GAP: CellStyle("", NO_CELL),
    CellState.NOTHING: CellStyle("", "rgba(110,125,140,0.13)"),
    CellState.EMPTY: CellStyle("own shard without elements", "rgba(110,125,140,0.13)", "."),
    CellState.OWN: CellStyle("own parameters", "#0072B2"),
    CellState.GATHERED: CellStyle("gathered copy", "#8FD0F5"),
    CellState.SLICE: CellStyle("slice kept after forward", "#4FA3D1", "."),
    CellState.STALE: CellStyle("copy out of date", "#A9B4BE", "x"),
    CellState.PARTIAL: CellStyle("gradient of this rank's data alone", "#F2A97F", "/"),
    CellState.SENT: CellStyle("reduced already, not yet freed", "rgba(242,169,127,0.35)"),
    CellState.GROUP: CellStyle("reduced within the group alone", "#D5803F", "\\"),
    CellState.REDUCED: CellStyle("gradient averaged over all ranks", "#B5481A"),
    CellState.OPTIMIZER: CellStyle("optimizer state", MEMORY[Memory.OPTIMIZER].color),
    CellState.ON_CPU: CellStyle("in the CPU's memory", "#55663F", "-"),
}
PATTERNED = tuple(held for held, look in CELL_STYLES.items() if look.pattern)
_MARK = {"fgcolor": "#FFFFFF", "fgopacity": 0.85, "fillmode": "overlay", "size": 6, "solidity": 0.22}


@dataclass(frozen=True)
class Line:
    """A row of cells: its band, its place in the band, its label, and where it lies."""

    band: UnitShards | None
    row: int
    label: str
    top: float


@dataclass(frozen=True)
class Grid:
    """The cells of a stage.

    Attributes:
        columns: of `COLUMNS`, which are drawn.
    """

    stage: Stage
    columns: tuple[int, ...]

    @cached_property
    def lines(self) -> list[Line]:
        found, top = [], 0.0
        for band in self.stage.bands:
            rows = self.stage.rows(band) if band else [("", 0)]
            for label, row in rows:
                found.append(Line(band, row, label, top))
                top += 1
            top += BAND_GAP
        return found

    @property
    def height(self) -> float:
        return self.lines[-1].top + 1

    @cached_property
    def lefts(self) -> list[float]:
        """The left edge of each rank."""
        found, left = [], 0.0
        before: int | None = None
        for rank in self.stage.ranks:
            if before is not None:
                apart = self.stage.cast.replicas > 1 and self.group(before) != self.group(rank)
                left += len(self.columns) + (GROUP_GAP + RANK_GAP if apart else RANK_GAP)
            found.append(left)
            before = rank
        return found

    def group(self, rank: int) -> int:
        """The replica a rank belongs to."""
        return rank // self.stage.cast.shards

    @property
    def width(self) -> float:
        return self.lefts[-1] + len(self.columns)

    @cached_property
    def spans(self) -> dict[str, tuple[float, float]]:
        """Top and bottom of each band; of those left out under the empty name."""
        found: dict[str, tuple[float, float]] = {}
        for line in self.lines:
            name = line.band.name if line.band else ""
            found[name] = found.get(name, (line.top, 0.0))[0], line.top + 1
        return found

    # The heat map: one value for each cell and each gap

    @cached_property
    def x_edges(self) -> NDArray[np.float32]:
        edges = [left + k for left in self.lefts for k in range(len(self.columns) + 1)]
        return np.array(edges, dtype=np.float32)

    @cached_property
    def y_edges(self) -> NDArray[np.float32]:
        edges = [edge for line in self.lines for edge in (line.top, line.top + 1)]
        return np.array(list(dict.fromkeys(edges)), dtype=np.float32)

    @cached_property
    def _row_of(self) -> dict[float, int]:
        return {float(edge): at for at, edge in enumerate(self.y_edges)}

    def z(self, scene: ShardFrame) -> NDArray[np.uint8]:
        """A `CellState` for each cell, gaps included."""
        found = np.zeros((len(self.y_edges) - 1, len(self.x_edges) - 1), dtype=np.uint8)
        wide = len(self.columns) + 1
        for number, rank in enumerate(self.stage.ranks):
            for band, lines in self._by_band:
                holding = scene.by_rank[rank].of(band.name)
                for line in lines:
                    held = cells(self.stage.cast, band, holding, rank, line.row)
                    at = self._row_of[float(np.float32(line.top))]
                    for place, column in enumerate(self.columns):
                        found[at, number * wide + place] = held[column]
        return found

    def names(self) -> list[list[str]]:
        """What each cell is, whatever it holds."""
        found = [[""] * (len(self.x_edges) - 1) for _ in range(len(self.y_edges) - 1)]
        wide = len(self.columns) + 1
        for band, lines in self._by_band:
            for line in lines:
                of = "" if band.segment_bytes or "more" in line.label else f" of {band.shards}"
                size = f", {human_bytes(band.part_bytes[line.row])}" if band.part_bytes else ""
                part = "part" if band.segment_bytes else "shard"
                what = f"<b>{safe(band.name)}</b>, {part} {safe(line.label)}{of}{size}"
                at = self._row_of[float(np.float32(line.top))]
                for number, rank in enumerate(self.stage.ranks):
                    for place, column in enumerate(self.columns):
                        found[at][number * wide + place] = f"{what}<br>rank {rank}: {COLUMN_NAMES[column]}"
        return found

    @cached_property
    def _by_band(self) -> list[tuple[UnitShards, list[Line]]]:
        found: dict[str, tuple[UnitShards, list[Line]]] = {}
        for line in self.lines:
            if line.band:
                found.setdefault(line.band.name, (line.band, []))[1].append(line)
        return list(found.values())

    def runs(self, z: NDArray[np.uint8], held: CellState) -> tuple[NDArray[np.float32], ...]:
        """Centre, top and height of each stretch of cells of one kind in one column."""
        xs, tops, heights = [], [], []
        for column in np.flatnonzero((z == held).any(axis=0)).tolist():
            here = np.flatnonzero(z[:, column] == held)
            for stretch in np.split(here, np.flatnonzero(np.diff(here) > 1) + 1):
                xs.append((self.x_edges[column] + self.x_edges[column + 1]) / 2)
                tops.append(self.y_edges[stretch[0]])
                heights.append(self.y_edges[stretch[-1] + 1] - self.y_edges[stretch[0]])
        return tuple(np.array(values, dtype=np.float32) for values in (xs, tops, heights))

    def own_outlines(self) -> tuple[list[float | None], list[float | None]]:
        """A path around each rank's own shards, where parameters are cut."""
        xs: list[float | None] = []
        ys: list[float | None] = []
        for left, rank in zip(self.lefts, self.stage.ranks, strict=True):
            for line in self.lines:
                if line.band and line.band.shards > 1 and line.band.owns(rank, line.row):
                    a, b, top, bottom = left, left + 1, line.top, line.top + 1
                    xs += [a, b, b, a, a, None]
                    ys += [top, top, bottom, bottom, top, None]
        return xs, ys

    def frame_of(self, scene: ShardFrame) -> tuple[list[float], list[float]]:
        """A rectangle around the band of a scene; nothing where it is everybody's."""
        name = scene.moment.band
        if not name:
            return [], []
        top, bottom = self.spans.get(name) or self.spans.get("", (0.0, 0.0))
        if bottom == 0.0:
            return [], []
        a, b, pad = -0.3, self.width + 0.3, 0.22
        return [a, b, b, a, a], [top - pad, top - pad, bottom + pad, bottom + pad, top - pad]


def moving_traces(
    grid: Grid, scene: ShardFrame, used: Sequence[CellState], x: str = "x", y: str = "y"
) -> Iterator[Any]:
    """The traces that differ between scenes: cells, patterned cells, and the frame around what is told."""
    z = grid.z(scene)
    yield go.Heatmap(z=z, xaxis=x, yaxis=y)
    for held in used:
        if held in PATTERNED:
            xs, tops, heights = grid.runs(z, held)
            yield go.Bar(x=xs, base=tops, y=heights, xaxis=x, yaxis=y)
    xs_frame, ys_frame = grid.frame_of(scene)
    op = scene.moment.op
    color = KINDS[op].color if op in KINDS else theme.COPY.color
    yield go.Scatter(x=xs_frame, y=ys_frame, line={"color": color}, xaxis=x, yaxis=y)


def style(grid: Grid, traces: Sequence[Any], used: Sequence[CellState]) -> list[Any]:
    """The same traces with what stays as it is: colours, edges, patterns."""
    kinds = list(CELL_STYLES)
    last = len(kinds) - 1
    scale = [
        [edge, CELL_STYLES[held].color]
        for k, held in enumerate(kinds)
        for edge in (k / (last + 1), (k + 1) / (last + 1))
    ]
    heat, *bars, frame = traces
    heat.update(
        x=grid.x_edges, y=grid.y_edges, zmin=-0.5, zmax=last + 0.5, colorscale=scale, showscale=False, xgap=2, ygap=2,
        hovertext=grid.names(), hoverinfo="text",
    )  # fmt: skip
    for held, bar in zip((h for h in used if h in PATTERNED), bars, strict=True):
        look = CELL_STYLES[held]
        bar.update(
            name=look.name, width=0.94, hoverinfo="skip", showlegend=False,
            marker={"color": look.color, "line": {"width": 0}, "pattern": {"shape": look.pattern, **_MARK}},
        )  # fmt: skip
    frame.update(mode="lines", line={"width": 3}, hoverinfo="skip", showlegend=False)
    return [heat, *bars, frame]


def outline(grid: Grid, x: str = "x", y: str = "y", width: float = 2) -> go.Scatter:
    """The rank's own shards, outlined in every scene."""
    xs, ys = grid.own_outlines()
    return go.Scatter(
        x=xs, y=ys, xaxis=x, yaxis=y, mode="lines", line={"color": "#8C959F", "width": width}, hoverinfo="skip",
        showlegend=False,
    )  # fmt: skip


def legend_traces(used: Sequence[CellState], x: str = "x", y: str = "y") -> Iterator[Any]:
    """A legend entry for each kind of cell that occurs; bars, so that patterns show."""
    for held in used:
        look = CELL_STYLES[held]
        if look.name:
            pattern = {"shape": look.pattern, **_MARK}
            yield go.Bar(
                x=[None], y=[None], xaxis=x, yaxis=y, name=safe(look.name), hoverinfo="skip",
                marker={"color": look.color, "line": {"width": 0}, "pattern": pattern},
            )  # fmt: skip


def used_kinds(grid: Grid, scenes: Sequence[ShardFrame]) -> list[CellState]:
    """The kinds of cell that occur in some scene, in the order of `CellState`."""
    seen: set[int] = set()
    for scene in scenes:
        seen |= set(np.unique(grid.z(scene)).tolist())
    return [held for held in CellState if held in seen and held is not CellState.GAP]
