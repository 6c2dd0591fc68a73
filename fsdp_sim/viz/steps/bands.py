"""A thousand ranks in one picture: when each operation ran on most of them, and the ranks that the others wait for.

Every rank plays the same program, so the same operation can be looked up on each of them: its median is drawn as a
bar, 5 to 95% of the ranks as a paler one behind it. So a picture of a thousand ranks has as many bars as that of a few.
From a `fsdp_sim.engine.run.Run` this takes no events of theirs: its times are arrays over the ranks already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fsdp_sim.engine import Run, shown_lane
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Lane, Op, Phase, Timeline, communicates, computes
from fsdp_sim.viz.steps.bars import SMALL_OPS, bar_trace, kinds_in_order
from fsdp_sim.viz.steps.rows import BAR, THIN
from fsdp_sim.viz.steps.step_view import LaneGroup, StepView, Timelines, step_views
from fsdp_sim.viz.steps.summary import exposure_sentence
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import KINDS, OP_DOES, OP_NAMES, safe, short_unit
from fsdp_sim.words import human_ms

MANY = 8  # ranks; above this bands are drawn unless ranks are asked for
ALL = -1  # stands for all ranks in the rows of a panel
LOW, HIGH = 5, 95  # per cent of the ranks
ALIKE = 0.03  # of a step: a rank that computes at most this much longer than the median is no straggler


class OperationKey(NamedTuple):
    """What is the same about an operation on all ranks."""

    op: Op
    lane: Lane
    unit: str
    phase: Phase
    micro_batch: int


@dataclass(frozen=True)
class Bands:
    """One step of many ranks: arrays of shape (operations, ranks), not a number where a rank lacks an operation.

    Attributes:
        unlaunched_s: see `Event`.
    """

    ops: tuple[OperationKey, ...]
    ranks: tuple[int, ...]
    start_s: np.ndarray
    end_s: np.ndarray
    unlaunched_s: np.ndarray

    @cached_property
    def origin_s(self) -> float:
        return float(np.nanmin(self.start_s))

    @cached_property
    def step_s(self) -> float:
        return float(np.nanmax(self.end_s)) - self.origin_s

    @cached_property
    def computing_s(self) -> np.ndarray:
        """Seconds each rank computes, of shape (ranks,)."""
        rows = [k for k, o in enumerate(self.ops) if computes(o.op, o.lane)]
        return np.nansum(self.end_s[rows] - self.start_s[rows] - self.unlaunched_s[rows], axis=0)

    @property
    def waiting_s(self) -> np.ndarray:
        """Seconds each rank does not compute, of shape (ranks,)."""
        return self.step_s - self.computing_s

    @property
    def alike(self) -> bool:
        """Whether no rank computes for much longer than the others."""
        return float(self.computing_s.max() - np.median(self.computing_s)) < ALIKE * self.step_s

    @property
    def slowest(self) -> int:
        """The rank that computes longest: the others wait for it where they meet."""
        return self.ranks[int(np.argmax(self.computing_s))]

    @property
    def typical(self) -> int:
        """A rank that computes for about as long as half of the others."""
        return self.ranks[int(np.argsort(self.computing_s)[len(self.ranks) // 2])]

    def quantiles_ms(self) -> dict[str, np.ndarray]:
        """Of each operation ``start`` and ``end`` of the median rank, ``early`` and ``late`` of most ranks."""
        ms = 1e3
        low, high = (np.nanpercentile(a, q, axis=1) for a, q in ((self.start_s, LOW), (self.end_s, HIGH)))
        start, end = (np.nanmedian(a, axis=1) for a in (self.start_s, self.end_s))
        return {
            name: (column - self.origin_s) * ms
            for name, column in {"start": start, "end": end, "early": low, "late": high}.items()
        }


def bands_of_run(run: Run, step: int = -1) -> Bands:
    """The last step of a run (or another) on all its ranks; no events are made.

    Raises:
        ValueError: the program has no such step.
    """
    run.step_time_s(step)  # or an error
    step %= len(run.step_ends_s)
    rows = [k for k, i in enumerate(run.ops) if i.step == step]
    ops = tuple(
        OperationKey(i.op, shown_lane(i, run.on_cpu), i.unit, i.phase, i.micro_batch)
        for i in (run.ops[k] for k in rows)
    )
    columns = run.columns
    start_s, end_s = (run.array([column[k] for k in rows]) for column in (columns.start_s, columns.end_s))
    return Bands(ops, tuple(range(run.ranks)), start_s, end_s, np.zeros_like(start_s))


def bands_of(timeline: Timeline, step: int) -> Bands:
    """A step of a timeline on all its ranks; an operation is found again by what it is and how often it came before."""
    place = {rank: n for n, rank in enumerate(timeline.ranks)}
    rows: dict[tuple[OperationKey, int], int] = {}
    seen: dict[int, dict[OperationKey, int]] = defaultdict(dict)
    found: list[tuple[int, int, float, float, float]] = []
    for e in timeline.ops:
        if e.step != step:
            continue
        same = OperationKey(e.op, e.lane, e.unit, e.phase, e.micro_batch)
        before = seen[e.rank].get(same, 0)
        seen[e.rank][same] = before + 1
        found.append((rows.setdefault((same, before), len(rows)), place[e.rank], e.start_s, e.end_s, e.unlaunched_s))
    row, rank, start, end, unlaunched = (np.array(column) for column in zip(*found, strict=True))
    start_s, end_s, unlaunched_s = (np.full((len(rows), len(place)), np.nan) for _ in range(3))
    start_s[row, rank], end_s[row, rank], unlaunched_s[row, rank] = start, end, unlaunched
    return Bands(tuple(same for same, _ in rows), timeline.ranks, start_s, end_s, unlaunched_s)


@dataclass(frozen=True)
class ManyRanks(StepView):
    """A step of many ranks; its timeline and ranks are those few that are drawn by themselves."""

    bands: Bands

    @property
    def origin_s(self) -> float:
        return self.bands.origin_s

    @property
    def step_s(self) -> float:
        return self.bands.step_s

    @cached_property
    def rows(self) -> list[int]:
        """What is drawn of the few ranks: what they compute."""
        lanes = self.timeline.columns["lane"]
        return [row for row in super().rows if lanes[row] is Lane.COMPUTE]

    def groups(self) -> list[LaneGroup]:
        used = {o.lane for o in self.bands.ops} | {Lane.COMPUTE}
        names = ["an example"] if self.bands.alike else ["slowest", "typical"]
        return [
            LaneGroup(
                ALL, f"<b>{len(self.bands.ranks):,} ranks</b> · compute", tuple(lane for lane in Lane if lane in used)
            ),
            *(
                LaneGroup(rank, f"<b>rank {rank}</b> · {name}", (Lane.COMPUTE,))
                for rank, name in zip(self.ranks, names, strict=False)
            ),
        ]


def many_ranks(what: Timeline | Run | Simulation, name: str, step: int) -> ManyRanks:
    """The view of many ranks, of which the slowest and a typical one are drawn by themselves too."""
    run = what.run if isinstance(what, Simulation) else what
    bands = bands_of_run(run, step) if isinstance(run, Run) else bands_of(run, step)
    few = (bands.slowest,) if bands.alike else (bands.slowest, bands.typical)
    if isinstance(what, Simulation):
        shown = what.memory.timeline(what.header, dict.fromkeys(few))
    elif isinstance(what, Run):  # its memory is only that of FSDP's buffers
        shown = what.timeline(few).select(lambda e: not e.is_memory)
    else:
        shown = what.select(rank=few)
    if isinstance(run, Run):
        step %= len(run.step_ends_s)
    return ManyRanks(name, shown, step, tuple(dict.fromkeys(few)), bands)


def views_of(timelines: Timelines, *, ranks: Iterable[int] | None = None, **which: Any) -> list[StepView]:
    """`step_views`; timelines of more than `MANY` ranks become bands where no ranks are asked for."""
    views = step_views(timelines, ranks=ranks, **which)
    if ranks is not None:
        return views
    return [
        many_ranks(view.timeline, view.name, view.step) if len(view.timeline.ranks) > MANY else view for view in views
    ]


def band_traces(view: ManyRanks, rows: dict[tuple[int, Lane], float], step_ms: float) -> list[dict[str, Any]]:
    """Of each operation that occurs most ranks, pale, and over all of these the median rank."""
    bands = view.bands
    q = bands.quantiles_ms()
    pale, solid = [], []
    for op in kinds_in_order({o.op for o in bands.ops}):
        some = [k for k, o in enumerate(bands.ops) if o.op is op]
        kind = KINDS[op]
        y = np.array([rows[ALL, bands.ops[k].lane] for k in some])
        height = np.array([BAR * THIN.get(bands.ops[k].lane, 1.0) for k in some])
        early, late, start, end = (q[name][some] for name in ("early", "late", "start", "end"))
        if kind not in SMALL_OPS:  # their bands would only cover others
            trace = bar_trace(kind, early, late - early, y, height, step_ms)
            trace["marker"] = {"color": kind.color, "opacity": 0.35, "line": {"width": 0}}
            pale.append(trace | {"hoverinfo": "skip", "showlegend": False})
        last = [bands.ranks[n] for n in np.nanargmax(bands.end_s[some], axis=1)]
        texts = [
            [safe(bands.ops[k].unit), human_ms((b - a) / 1e3), f"{human_ms((z - b) / 1e3)} later", f"{rank}"]
            for k, a, b, z, rank in zip(some, start, end, late, last, strict=True)
        ]
        solid.append(
            bar_trace(kind, start, end - start, y, height * 0.7, step_ms)
            | {
                "text": [safe(short_unit(bands.ops[k].unit)) for k in some],
                "textposition": "inside",
                "customdata": texts,
                "hovertemplate": f"<b>{OP_NAMES[op]} %{{customdata[0]}}</b>, %{{customdata[1]}} on the median rank<br>"
                f"<i>{OP_DOES[op]}</i><br>%{{base:,.2f}} to %{{x:,.2f}} ms<br>"
                f"{HIGH}% of the ranks end at most %{{customdata[2]}}<br>"
                "last to end: rank %{customdata[3]}<extra></extra>",
            }
        )
    return [*pale, *solid]


def bands_sentence(view: ManyRanks) -> str:
    """Who the others wait for; if all are alike, what they wait for."""
    bands = view.bands
    if bands.alike:
        return exposure_sentence(view)
    slow, median = float(bands.computing_s.max()), float(np.median(bands.computing_s))
    return (
        f"Rank {bands.slowest} keeps {len(bands.ranks) - 1:,} ranks waiting: it computes {human_ms(slow)}, "
        f"their median {human_ms(median)}."
    )


def bands_subtitle(bands: Bands) -> str:
    """How long the step takes, and how to read bands."""
    alike = "; no rank is much slower than the others" if bands.alike else ""
    return (
        f"A step takes {human_ms(bands.step_s)}{alike}. A bar is the median of {len(bands.ranks):,} ranks, the paler "
        f"one behind it spans {LOW} to {HIGH}% of them."
    )


def bands_table(bands: Bands) -> Table:
    """How long ranks compute and wait, and how far apart they are when communication ends."""

    def row(name: str, seconds: np.ndarray) -> tuple[str, ...]:
        values = [np.min(seconds), *np.percentile(seconds, (LOW, 50, HIGH)), np.max(seconds)]
        return (name, *(human_ms(float(v)) for v in values), str(bands.ranks[int(np.argmax(seconds))]))

    rows = [row("computing", bands.computing_s), row("not computing", bands.waiting_s)]
    comm = [k for k, o in enumerate(bands.ops) if communicates(o.op, o.lane)]
    if comm:
        rows.append(row("communicating, summed", np.nansum(bands.end_s[comm] - bands.start_s[comm], axis=0)))
    header = ("seconds of a step", "least", f"{LOW}%", "median", f"{HIGH}%", "most", "rank with most")
    return Table(f"How {len(bands.ranks):,} ranks differ", header, tuple(rows))
