"""The parity ladder: the same GPT, seed and text trained in every way, and where two ways part.

    ladder = climb(LadderConfig(ranks=2))
    ladder                                  # in a notebook a table, in a terminal the same as text
    ladder["mini-fsdp"].against_above       # bit by bit, and to a tolerance
    climb(LadderConfig(ranks=2), broken={"mini-fsdp": "stale-shard"})

Every rung runs on ranks of its own (`fsdp_sim.ranks.run`), with the same loop. A rung is compared with the nearest rung
above it that is right, and with one process on the whole batch: see `labs.experiments.ladder.divergence`. A rung of the
mini is compared with its twin of torch in two other ways too. Do both issue the same collectives? A unit that is not
resharded is gathered once less, and all numbers are right. And does it hold no more at its peak? A buffer that is never
freed shows nowhere else.

What a rung communicates is counted within the steps. Bytes are those of the whole message: what an all-gather makes,
what a reduce-scatter or all-reduce takes. The peak of live bytes is that of one more step, with the meter of
`fsdp_sim.measure.live_bytes`, which counts every tensor: parameters, gradients, AdamW's state, activations.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from tqdm import tqdm

from fsdp_sim.ranks import run
from fsdp_sim.ranks.output import in_notebook
from fsdp_sim.timeline import Event, Op, Phase, Timeline
from fsdp_sim.timeline.analysis import communicates
from fsdp_sim.words import human_bytes
from labs.experiments.ladder.divergence import (
    ORDERS,
    Divergence,
    RankRun,
    Tensors,
    first_divergence,
    largest_error,
    noise_elements,
)
from labs.experiments.ladder.faults import FAULTS, Fault, check_fault
from labs.experiments.ladder.on_ranks import STEP, LadderConfig, Spans, train
from labs.experiments.ladder.rungs import RUNGS, Rung
from labs.model.gpt import did_you_mean

ONE = "one-process"
# One thread each: of two, which adds what up depends on how busy the machine is, and the last bit with it.
_run = partial(run, threads=1, progress=False, show_output=False)
MORE_MEMORY = 1.02  # a twin may hold so much more at its peak: the mini's own bookkeeping has tensors too


@dataclasses.dataclass(frozen=True)
class RungComparison:
    """How a rung compares with another.

    Attributes:
        against: the other's name.
        bitwise: the first number of which a bit differs; None if none.
        beyond: the first number that is off by more than the tolerance; None if none.
        error: the largest relative error of any number but noise.
    """

    against: str
    bitwise: Divergence | None
    beyond: Divergence | None
    error: float


Count = tuple[int, int]
"""How many collectives, and of how many bytes."""


@dataclasses.dataclass(frozen=True)
class RungResult:
    """A rung, climbed.

    Attributes:
        fault: seeded into it, or empty.
        losses: of the whole batch; grad_norms; parameter_norms: the 2-norm of all parameters. One entry per step.
        collectives: by phase and kind, those of the last step, of rank 0.
        peak_bytes: of the rank that had most.
        against_above, against_one: None where there is none.
        twin: name of the rung with the same collectives; ``program``: the first difference, None if none.
        memory: what it holds at its peak beyond its twin; None if no more.
    """

    rung: Rung
    ranks: int
    fault: str
    losses: list[float]
    grad_norms: list[float]
    parameter_norms: list[float]
    collectives: dict[Phase, dict[Op, Count]]
    peak_bytes: int
    against_above: RungComparison | None
    against_one: RungComparison | None
    twin: str
    program: Divergence | None
    memory: Divergence | None

    @property
    def divergences(self) -> dict[str, Divergence]:
        """What is wrong, by what it is compared with."""
        found = {RUNGS[c.against].title: c.beyond for c in (self.against_above, self.against_one) if c and c.beyond}
        for of, divergence in (("collectives", self.program), ("memory", self.memory)):
            if divergence:
                found[f"the {of} of {RUNGS[self.twin].title}"] = divergence
        return found


@dataclasses.dataclass(frozen=True)
class _ComparedRun:
    """A run, as long as others are compared with it."""

    name: str
    runs: list[RankRun]
    program: list[tuple[int, Phase, Event]]  # of rank 0
    peak_bytes: int
    right: bool = True


def choose(names: Iterable[str] | None, ranks: int, batch: int) -> list[str]:
    """The rungs to climb, in the ladder's order; one process is always among them. By default all that go.

    Raises:
        ValueError: there is no such rung, it takes an even number of ranks, or a batch that divides into its parts.
    """
    wanted = list(names) if names is not None else [n for n in RUNGS if not _why_not(n, ranks, batch)]
    for name in wanted:
        if name not in RUNGS:
            raise ValueError(f"there is no rung {name!r}{did_you_mean(name, RUNGS)}")
        if why_not := _why_not(name, ranks, batch):
            raise ValueError(f"{name} {why_not}")
    return [name for name in RUNGS if name in wanted or name == ONE]


def _why_not(name: str, ranks: int, batch: int) -> str:
    rung = RUNGS[name]
    if ranks % 2 and rung.even_ranks:
        return f"is a mesh of two rows: it takes 2 or 4 ranks, not {ranks}"
    parts = (rung.ranks or ranks) * rung.micro_batches
    if rung.micro_batches > 1 and batch % parts:
        return f"cuts the batch into {parts} equal parts, {rung.micro_batches} on each rank: {batch} rows do not divide"
    return ""


def _ranks_of(rung: Rung, setting: LadderConfig) -> int:
    return 1 if rung.name == ONE else rung.ranks or setting.ranks


def climb(
    setting: LadderConfig | None = None,
    rungs: Iterable[str] | None = None,
    *,
    broken: Mapping[str, str | Fault] | None = None,
    progress: Callable[[Sequence[str]], Iterable[str]] | None = None,
    last: Rung | None = None,
) -> Ladder:
    """Train every rung and compare.

    Args:
        rungs: names from `labs.experiments.ladder.rungs.RUNGS`; by default all.
        broken: a fault for a rung, by its name: one of `FAULTS` in `faults`, by its name, or your own.
        progress: goes through the names and shows how far it is; by default a bar in a notebook, nothing elsewhere.
        last: one rung more, that is none of `RUNGS`: the learner's own, see `labs.experiments.ladder.rungs.yours`.

    Raises:
        ValueError: a rung or a fault that does not exist or does not go; nothing has been started.
        RanksError: a rung failed.
    """
    setting, broken = setting or LadderConfig(), dict(broken or {})
    names = choose(rungs, setting.ranks, setting.batch)
    for name, fault in broken.items():
        if isinstance(fault, str):
            check_fault(fault, name, (name in RUNGS and RUNGS[name].ranks) or setting.ranks)
        if name not in names:
            raise ValueError(f"{name} is to be broken, but is not climbed; the rungs are {', '.join(names)}")
    noise = noise_elements(setting.build, *setting.rows(0, 0, 1))
    to_one = setting.tolerance
    rows: list[RungResult] = []
    seen: list[_ComparedRun] = []  # the ones that others are compared with: one process, the last right one, twins
    more = {last.name: last} if last else {}
    for name in (progress or _bar)([*names, *more]):
        rung = more.get(name) or RUNGS[name]
        row, climbed = _climb_one(setting, rung, broken.get(name), seen, noise, to_one)
        rows.append(row)
        if name == ONE and len(names) > 1:
            to_one = max(setting.tolerance, ORDERS * _other_order(setting, climbed, noise))
        if climbed.right:
            twins = {RUNGS[n].twin for n in names[len(rows) :]} | {more[n].twin for n in more}
            seen = [c for c in seen if c.name == ONE or c.name in twins] + [climbed]
    return Ladder(setting, rows, noise, to_one)


def _other_order(setting: LadderConfig, one: _ComparedRun, noise: Tensors) -> float:
    """How far one process gets from itself by adding the batch up in parts, see `divergence`."""
    parts = max(setting.ranks, 2)
    if setting.batch % parts:
        return 0.0
    results = _run(train, 1, setting, RUNGS[ONE], None, parts, title="one process, in parts")
    return largest_error(one.runs, [results[0][0]], noise)


def _bar(names: Sequence[str]) -> Iterable[str]:
    shown = in_notebook()
    return tqdm(names, desc="climbing", unit=" rungs", file=sys.stdout, leave=False, disable=not shown)


def _climb_one(
    setting: LadderConfig,
    rung: Rung,
    broken: str | Fault | None,
    seen: list[_ComparedRun],
    noise: Tensors,
    to_one: float,
) -> tuple[RungResult, _ComparedRun]:
    ranks = _ranks_of(rung, setting)
    fault = FAULTS[broken] if isinstance(broken, str) else broken
    results = _run(train, ranks, setting, rung, fault, title=rung.title)
    runs = [result[0] for result in results]
    program = _program(results.timeline, results[0][1])
    by_name = {c.name: c for c in seen}
    n_shards = rung.n_shards(ranks) if rung.n_shards else None

    def compare(other: _ComparedRun | None) -> RungComparison | None:
        if other is None:
            return None
        same_order = other.name != ONE and len(other.runs) == ranks
        tolerances = (None, setting.tolerance if same_order else to_one)
        bitwise, beyond = (first_divergence(other.runs, runs, tolerance, noise, n_shards) for tolerance in tolerances)
        return RungComparison(other.name, bitwise, beyond, largest_error(other.runs, runs, noise))

    twin = by_name.get(rung.twin)
    if rung.only_twin:
        above, one = twin, None
    else:
        precise = [c for c in seen if c.name != ONE and not RUNGS[c.name].only_twin]
        above, one = precise[-1] if precise else None, by_name.get(ONE)
    peak_bytes = max(result[2] for result in results)
    last = setting.steps - 1
    row = RungResult(
        rung=rung,
        ranks=ranks,
        fault=broken if isinstance(broken, str) else fault.help if fault else "",
        losses=[sum(r.losses[step] for r in runs) / ranks for step in range(setting.steps)],
        grad_norms=runs[0].norms,
        parameter_norms=[_norm(parameters) for parameters in runs[0].parameters[1:]],
        collectives={phase: _counts(e for s, p, e in program if s == last and p is phase) for phase in STEP},
        peak_bytes=peak_bytes,
        against_above=compare(above),
        against_one=compare(one),
        twin=twin.name if twin else "",
        program=_first_other_collective(twin, program) if twin else None,
        memory=_more_memory(twin, peak_bytes, setting.steps) if twin else None,
    )
    return row, _ComparedRun(rung.name, runs, program, peak_bytes, not row.divergences)


def _more_memory(twin: _ComparedRun, peak_bytes: int, steps: int) -> Divergence | None:
    if peak_bytes <= MORE_MEMORY * twin.peak_bytes:
        return None
    held, other = human_bytes(peak_bytes), human_bytes(twin.peak_bytes)
    return Divergence(steps + 1, "memory", detail=f"{held} are alive at the peak, {other} in {RUNGS[twin.name].title}")


def _program(timeline: Timeline, spans: Spans) -> list[tuple[int, Phase, Event]]:
    """Rank 0's collectives within the steps, in the order of issue, with step and phase."""
    events = [e for e in timeline.ops if e.rank == 0 and communicates(e.op, e.lane)]
    return [(step, phase, e) for step, phase, start_s, end_s in spans for e in events if start_s <= e.issue_s < end_s]


def _counts(events: Iterable[Event]) -> dict[Op, Count]:
    numbers: Counter[Op] = Counter()
    n_bytes: Counter[Op] = Counter()
    for event in events:
        numbers[event.op] += 1
        n_bytes[event.op] += event.bytes
    return {op: (numbers[op], n_bytes[op]) for op in numbers}


def _first_other_collective(twin: _ComparedRun, program: list[tuple[int, Phase, Event]]) -> Divergence | None:
    """The first step, phase and unit in which two rungs do not issue the same collectives in the same order."""

    def lines(issued: list[tuple[int, Phase, Event]]) -> list[tuple[int, Phase, Op, str, int, int]]:
        # FSDP1 and DDP of torch do not say for which unit
        named = all(e.unit for _, _, e in issued)
        return [(s, p, e.op, e.unit if named else "", e.bytes, e.group_size) for s, p, e in issued]

    theirs, mine = lines(twin.program), lines(program)
    if not all(line[3] for line in theirs):
        mine = [(*line[:3], "", *line[4:]) for line in mine]
    if theirs == mine:
        return None
    at = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
    rest = [issued[at] if at < len(issued) else None for issued in (theirs, mine)]
    step, phase, _, unit, *_ = next(line for line in rest if line is not None)
    issued = [f"{line[2]}({line[3]}) of {line[4]:,} bytes" if line else "nothing more" for line in rest]
    return Divergence(
        step + 1, "collectives", unit or "unnamed",
        detail=f"in {phase}, {RUNGS[twin.name].title} issues {issued[0]}, this rung {issued[1]}",
    )  # fmt: skip


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors.values()))


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What `climb` found; ``ladder["mini-fsdp"]`` is a row."""

    setting: LadderConfig
    rows: list[RungResult]
    noise: Tensors
    to_one: float
    """Relative, for what adds up in another order, as against one process: see `labs.experiments.ladder.divergence`."""

    def __getitem__(self, name: str) -> RungResult:
        return next(row for row in self.rows if row.rung.name == name)

    @property
    def divergences(self) -> list[str]:
        """Every divergence beyond the tolerance as a sentence; empty if all rungs agree."""
        return [
            f"{row.rung.title}, against {other}: first diverges {divergence}."
            for row in self.rows
            for other, divergence in row.divergences.items()
        ]

    def _repr_html_(self) -> str:
        from labs.experiments.ladder.table import html

        return html(self)

    def __repr__(self) -> str:
        return f"Ladder({len(self.rows)} rungs on {self.setting.ranks} ranks: {self.divergences or 'no divergence'})"
