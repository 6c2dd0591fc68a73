"""The parity ladder: the same GPT, seed and text trained in every way, and where two ways part.

    ladder = climb(Setting(ranks=2))
    ladder                                  # in a notebook a table, in a terminal the same as text
    ladder["mini-fsdp"].against_above       # bit by bit, and to a tolerance
    climb(Setting(ranks=2), broken={"mini-fsdp": "stale-shard"})

Every rung runs on ranks of its own (`fsdp_sim.ranks.run`), with the same loop. A rung is compared with the nearest rung
above it that is right, and with one process on the whole batch: see `labs.divergence`. A rung of the mini is compared
with its twin of torch in another way too: do both issue the same collectives? A unit that is not freed, for example, is
gathered once less, and all numbers are right.

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

from tqdm import tqdm

from fsdp_sim.ranks import run
from fsdp_sim.ranks.output import in_notebook
from fsdp_sim.timeline import Event, Op, Phase, Timeline
from fsdp_sim.timeline.analysis import communicates
from labs.divergence import Divergence, RankRun, Tensors, first_divergence, largest_error, noise_elements
from labs.faults import check_fault
from labs.gpt import did_you_mean
from labs.ladder_run import STEP, Setting, Spans, train
from labs.rungs import RUNGS, Rung

ONE = "one-process"


@dataclasses.dataclass(frozen=True)
class Comparison:
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
class Row:
    """A rung, climbed.

    Attributes:
        fault: seeded into it, or empty.
        losses: of the whole batch; grad_norms; parameter_norms: the 2-norm of all parameters. One entry per step.
        collectives: by phase and kind, those of the last step, of rank 0.
        peak_bytes: of the rank that had most.
        against_above, against_one: None where there is none.
        twin: name of the rung with the same collectives; ``program``: the first difference, None if none.
    """

    rung: Rung
    ranks: int
    fault: str
    losses: list[float]
    grad_norms: list[float]
    parameter_norms: list[float]
    collectives: dict[Phase, dict[Op, Count]]
    peak_bytes: int
    against_above: Comparison | None
    against_one: Comparison | None
    twin: str
    program: Divergence | None

    @property
    def divergences(self) -> dict[str, Divergence]:
        """What is wrong, by what it is compared with."""
        found = {RUNGS[c.against].title: c.beyond for c in (self.against_above, self.against_one) if c and c.beyond}
        return found | ({f"the collectives of {RUNGS[self.twin].title}": self.program} if self.program else {})


@dataclasses.dataclass(frozen=True)
class _Climbed:
    """A run, as long as others are compared with it."""

    name: str
    runs: list[RankRun]
    program: list[tuple[int, Phase, Event]]  # of rank 0
    right: bool = True


def choose(names: Iterable[str] | None, ranks: int) -> list[str]:
    """The rungs to climb, in the ladder's order; one process is always among them. By default all that go.

    Raises:
        ValueError: there is no such rung, or it takes an even number of ranks.
    """
    wanted = (
        list(names) if names is not None else [n for n, rung in RUNGS.items() if ranks % 2 == 0 or not rung.even_ranks]
    )
    for name in wanted:
        if name not in RUNGS:
            raise ValueError(f"there is no rung {name!r}{did_you_mean(name, RUNGS)}")
        if ranks % 2 and RUNGS[name].even_ranks:
            raise ValueError(f"{name} is a mesh of two rows: it takes 2 or 4 ranks, not {ranks}")
    return [name for name in RUNGS if name in wanted or name == ONE]


def climb(
    setting: Setting | None = None,
    rungs: Iterable[str] | None = None,
    *,
    broken: Mapping[str, str] | None = None,
    progress: Callable[[Sequence[str]], Iterable[str]] | None = None,
) -> Ladder:
    """Train every rung and compare.

    Args:
        rungs: names from `labs.rungs.RUNGS`; by default all.
        broken: a fault (`labs.faults.FAULTS`) for a rung, by its name.
        progress: goes through the names and shows how far it is; by default a bar in a notebook, nothing elsewhere.

    Raises:
        ValueError: a rung or a fault that does not exist or does not go; nothing has been started.
        RanksError: a rung failed.
    """
    setting, broken = setting or Setting(), dict(broken or {})
    names = choose(rungs, setting.ranks)
    for name, fault in broken.items():
        check_fault(fault, name, setting.ranks)
        if name not in names:
            raise ValueError(f"{name} is to be broken, but is not climbed; the rungs are {', '.join(names)}")
    noise = noise_elements(setting.build, *setting.rows(0, 0, 1))
    rows: list[Row] = []
    seen: list[_Climbed] = []  # the ones that others are compared with: one process, the last right one, twins
    for name in (progress or _bar)(names):
        row, climbed = _climb_one(setting, RUNGS[name], broken.get(name, ""), seen, noise)
        rows.append(row)
        if climbed.right:
            twins = {RUNGS[n].twin for n in names[len(rows) :]}
            seen = [c for c in seen if c.name == ONE or c.name in twins] + [climbed]
    return Ladder(setting, rows, noise)


def _bar(names: Sequence[str]) -> Iterable[str]:
    shown = in_notebook()
    return tqdm(names, desc="climbing", unit=" rungs", file=sys.stdout, leave=False, disable=not shown)


def _climb_one(setting: Setting, rung: Rung, fault: str, seen: list[_Climbed], noise: Tensors) -> tuple[Row, _Climbed]:
    ranks = 1 if rung.name == ONE else setting.ranks
    results = run(train, ranks, setting, rung.name, fault, title=rung.title, progress=False, show_output=False)
    runs = [result[0] for result in results]
    program = _program(results.timeline, results[0][1])
    by_name = {c.name: c for c in seen}
    n_shards = rung.n_shards(ranks) if rung.n_shards else None

    def compare(other: _Climbed | None) -> Comparison | None:
        if other is None:
            return None
        bitwise, beyond = (
            first_divergence(other.runs, runs, tolerance, noise, n_shards) for tolerance in (None, setting.tolerance)
        )
        return Comparison(other.name, bitwise, beyond, largest_error(other.runs, runs, noise))

    twin = by_name.get(rung.twin)
    last = setting.steps - 1
    row = Row(
        rung=rung,
        ranks=ranks,
        fault=fault,
        losses=[sum(r.losses[step] for r in runs) / ranks for step in range(setting.steps)],
        grad_norms=runs[0].norms,
        parameter_norms=[_norm(parameters) for parameters in runs[0].parameters[1:]],
        collectives={phase: _counts(e for s, p, e in program if s == last and p is phase) for phase in STEP},
        peak_bytes=max(result[2] for result in results),
        against_above=compare(seen[-1] if seen and seen[-1].name != ONE else None),
        against_one=compare(by_name.get(ONE)),
        twin=twin.name if twin else "",
        program=_first_other_collective(twin, program) if twin else None,
    )
    return row, _Climbed(rung.name, runs, program, not row.divergences)


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


def _first_other_collective(twin: _Climbed, program: list[tuple[int, Phase, Event]]) -> Divergence | None:
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
    said = [f"{line[2]}({line[3]}) of {line[4]:,} bytes" if line else "nothing more" for line in rest]
    return Divergence(
        step + 1, "collectives", unit or "unnamed",
        detail=f"in {phase}, {RUNGS[twin.name].title} issues {said[0]}, this rung {said[1]}",
    )  # fmt: skip


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors.values()))


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What `climb` found; ``ladder["mini-fsdp"]`` is a row."""

    setting: Setting
    rows: list[Row]
    noise: Tensors

    def __getitem__(self, name: str) -> Row:
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
        from labs.ladder_table import html

        return html(self)

    def __repr__(self) -> str:
        return f"Ladder({len(self.rows)} rungs on {self.setting.ranks} ranks: {self.divergences or 'no divergence'})"
