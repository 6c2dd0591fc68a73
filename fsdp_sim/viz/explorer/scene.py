"""`Scene`: what a figure of the explorer shows, as arrays taken straight from a run; no event is ever made.

A timeline's events cost more than the simulation itself. The figure needs rank 0 alone, so its numbers come from the
columns of the run, in one pass over the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_sim.engine import shown_lane
from fsdp_sim.schedule import Instruction
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Interval, Lane, Memory, communicates, computes, subtract, union
from fsdp_sim.viz import theme
from fsdp_sim.viz.theme import KINDS, Kind

Floats = NDArray[np.float32]
KIND_ORDER = tuple(dict.fromkeys(KINDS.values()))
_KIND_OF = {op: KIND_ORDER.index(kind) for op, kind in KINDS.items()}
LANE_ORDER = tuple(Lane)
PIXELS = 700  # across the plot
MEMORY_POINTS = 160  # of the curves of memory, which plotly.js draws once per category; zooming in shows more
MOST_BARS = 2000  # drawn one by one; of more, those that fall on the same pixel are drawn as one


class Bars(NamedTuple):
    """Bars of one kind; milliseconds since the step began.

    Attributes:
        ops: the number of the operation that each bar is; empty where bars are no operations.
        rows: the row of each.
        names: the unit of each.
        mib: what it carries.
    """

    base: Floats
    x: Floats
    rows: NDArray[np.int8]
    ops: NDArray[np.int32]
    names: list[str]
    mib: Floats


@dataclass(frozen=True, eq=False)
class Scene:
    """One step of rank 0.

    Attributes:
        span_ms: how long the step is.
        lanes: those that are used, from the top down.
        bars: of each kind that occurs.
        exposed: (n, 2), milliseconds, when rank 0 communicates and does not compute.
        times_ms, live: when memory changes, and the bytes of each category from then on, in order of time.
        limit_bytes, peak_bytes: of the device, and the most that is alive (in issue order, as torch counts).
    """

    span_ms: float
    lanes: tuple[Lane, ...]
    bars: dict[Kind, Bars]
    exposed: NDArray[np.float64]
    times_ms: NDArray[np.float64]
    live: dict[Memory, NDArray[np.int64]]
    limit_bytes: float
    peak_bytes: int

    def bars_between(self, from_ms: float, to_ms: float, points: int = 2 * PIXELS) -> dict[Kind, Bars]:
        """The bars of a part of the step: all of them, or, of very many, one for all that share a row and a pixel."""
        if sum(len(bars.ops) for bars in self.bars.values()) <= MOST_BARS:
            return self.bars
        width = max(to_ms - from_ms, 1e-9) / points
        return {kind: _merged(bars, from_ms, to_ms, width) for kind, bars in self.bars.items()}

    def memory(self, from_ms: float, to_ms: float, points: int = MEMORY_POINTS) -> tuple[Floats, dict[Memory, Floats]]:
        """The memory of a part of the step in a few points.

        Of all changes that fall on one point the one after which most is alive is kept, so that no peak is lost.

        Returns:
            milliseconds, and for each category GiB.
        """
        times = self.times_ms
        if not len(times):
            return np.zeros(0, np.float32), {}
        first = max(int(np.searchsorted(times, from_ms, side="right")) - 1, 0)
        last = int(np.searchsorted(times, to_ms, side="right"))
        at = np.arange(first, max(last, first + 1))
        if len(at) > points:
            total = sum(self.live.values())
            assert isinstance(total, np.ndarray)
            width = max(to_ms - from_ms, 1e-9) / points
            pixel = ((times[at] - from_ms) // width).astype(np.int64)
            order = np.lexsort((total[at], pixel))  # of each pixel the largest comes last
            at = np.sort(at[order[np.flatnonzero(np.diff(pixel[order], append=pixel.max() + 1))]])
        shown = np.append(at, at[-1])
        moments = np.append(np.maximum(times[at], from_ms), min(max(to_ms, times[at[-1]]), self.span_ms))
        return moments.astype(np.float32), {c: (v[shown] / 2**30).astype(np.float32) for c, v in self.live.items()}


def scene(sim: Simulation) -> Scene:
    """What there is to see of the last step of a simulation, on rank 0."""
    run = sim.run
    ends = run.step_ends_s
    begin_s, end_s = ends[-2] if len(ends) > 1 else 0.0, ends[-1]
    step = len(ends) - 1
    starts = (np.array(run.of_rank(run.columns.start_s, 0)) - begin_s) * 1e3
    stops = (np.array(run.of_rank(run.columns.end_s, 0)) - begin_s) * 1e3
    mine = [k for k, i in enumerate(run.ops) if i.step == step]
    lane_of = {k: shown_lane(run.ops[k]) for k in mine}
    used = set(lane_of.values()) | {Lane.COMPUTE}
    lanes = tuple(lane for lane in LANE_ORDER if lane in used)
    row_of = {lane: row for row, lane in enumerate(lanes)}
    of_kind: dict[int, list[int]] = {}
    for k in mine:
        of_kind.setdefault(_KIND_OF[run.ops[k].op], []).append(k)
    bars = {}
    for code in sorted(of_kind):
        ks, kind = of_kind[code], KIND_ORDER[code]
        rows = np.array([row_of[lane_of[k]] for k in ks], dtype=np.int8)
        names = [theme.safe(run.ops[k].unit) for k in ks]
        mib = np.array([run.ops[k].bytes / 2**20 for k in ks], dtype=np.float32)
        some = np.array(ks, dtype=np.int32)
        bars[kind] = Bars(
            starts[some].astype(np.float32), (stops - starts)[some].astype(np.float32), rows, some, names, mib
        )
    times, live = _live(sim, begin_s, end_s)
    spans = [(float(starts[k]), float(stops[k])) for k in mine]
    return Scene(
        (end_s - begin_s) * 1e3, lanes, bars, _exposed(run.ops, mine, spans, lane_of), times, live,
        sim.memory_limit_bytes, sim.peak_memory_bytes,
    )  # fmt: skip


def _merged(bars: Bars, from_ms: float, to_ms: float, width: float) -> Bars:
    seen = np.flatnonzero((bars.base <= to_ms) & (bars.base + bars.x >= from_ms))
    if not len(seen):
        return Bars(bars.base[:0], bars.x[:0], bars.rows[:0], bars.ops[:0], [], bars.mib[:0])
    pixel = ((bars.base[seen] - from_ms) // width).astype(np.int64) * 32 + bars.rows[seen]
    order = np.argsort(pixel, kind="stable")
    first = np.flatnonzero(np.diff(pixel[order], prepend=pixel.min() - 1))
    seen, counts = seen[order], np.diff(np.append(first, len(order)))
    base = np.minimum.reduceat(bars.base[seen], first)
    end = np.maximum.reduceat((bars.base + bars.x)[seen], first)
    names = [
        bars.names[at] if count == 1 else f"{bars.names[at]} and {count - 1} more (zoom in)"
        for at, count in zip(seen[first].tolist(), counts.tolist(), strict=True)
    ]
    mib = np.add.reduceat(bars.mib[seen], first)
    return Bars(base, end - base, bars.rows[seen[first]], bars.ops[seen[first]], names, mib)


def _exposed(
    ops: Sequence[Instruction], mine: list[int], spans: list[Interval], lane_of: dict[int, Lane]
) -> NDArray[np.float64]:
    comm: list[Interval] = []
    busy: list[Interval] = []
    for k, span in zip(mine, spans, strict=True):
        if computes(ops[k].op, lane_of[k]):
            busy.append(span)
        elif communicates(ops[k].op, lane_of[k]):
            comm.append(span)
    return np.array(subtract(union(comm), busy)).reshape(-1, 2)


def _live(sim: Simulation, begin_s: float, end_s: float) -> tuple[NDArray[np.float64], dict[Memory, NDArray[np.int64]]]:
    """Live bytes in the order in which the device gets to each change; from the beginning of the step to its end."""
    profile = sim.memory
    states: dict[Memory, int] = {}
    for (category, _), n_bytes in profile.states.items():
        states[category] = states.get(category, 0) + n_bytes
    order = np.argsort(profile.times_s, kind="stable")
    times, codes, changes = profile.times_s[order], profile.codes[order], profile.changes[order]
    first = int(np.searchsorted(times, begin_s, side="left"))
    last = int(np.searchsorted(times, end_s, side="right"))
    live = {}
    for code, category in enumerate(Memory):
        after = np.concatenate([[0], np.cumsum(np.where(codes == code, changes, 0))]) + states.get(category, 0)
        part = after[first : last + 1]  # what was alive when the step began, then each change
        if part.any():
            live[category] = part
    moments = np.concatenate([[0.0], (times[first:last] - begin_s) * 1e3])
    return moments, live
