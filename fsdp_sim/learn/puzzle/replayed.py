"""`replay`: an order of a level's lines as a program, checked and played by the engine.

One thread issues the lines from top to bottom, and computes; so a collective runs beside the compute lines below it.
What must come before what is checked on the way: `_Writer` knows of each unit whether it is whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_sim import engine
from fsdp_sim.diagnose import Culprit, Diagnosis, diagnose
from fsdp_sim.learn.puzzle.level import Level
from fsdp_sim.schedule import Instruction, Kind, Param, Program, Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Event, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.words import human_bytes

OPS = {
    "AG": (Op.ALL_GATHER, Lane.ALL_GATHER),
    "RS": (Op.REDUCE_SCATTER, Lane.REDUCE_SCATTER),
    "AR": (Op.ALL_REDUCE, Lane.ALL_REDUCE),
    "FWD": (Op.FWD, Lane.COMPUTE),
    "BWD": (Op.BWD, Lane.COMPUTE),
}
RANKS = 8
SAME_S = 1e-9  # two times nearer than this are equal


@dataclass(frozen=True, repr=False)
class Replayed:
    """A legal order and what the engine makes of it.

    Attributes:
        idle: places in ``order`` of lines that find nothing to do: a gather of what is whole, a reshard of what is not.
    """

    level: Level
    order: tuple[str, ...]
    program: Program
    timeline: Timeline
    idle: frozenset[int]

    @property
    def step_s(self) -> float:
        return self.timeline.span_s

    @cached_property
    def events(self) -> dict[int, Event]:
        """The operation of each line that has one, by its place in ``order``."""
        lines = [n for n, line in enumerate(self.order) if n not in self.idle and not line.startswith("RESHARD")]
        return dict(zip(lines, self.timeline.ops, strict=True))

    @cached_property
    def whole_spans(self) -> list[tuple[str, float, float]]:
        """Unit, from when to when its whole parameters have memory: from the issue of the gather on, seconds."""
        since: dict[str, float] = {}
        spans = []
        for e in self.timeline.events:
            if e.category is Memory.UNSHARDED and e.op is Op.ALLOC:
                since[e.unit] = e.start_s
            elif e.category is Memory.UNSHARDED and e.op is Op.FREE:
                spans.append((e.unit, since.pop(e.unit), e.start_s))
        return spans

    @cached_property
    def whole(self) -> int:
        """The most units that are whole at once, in order of issue."""
        now = most = 0
        for i in self.program:
            now += (i.kind is Kind.ALLOC) - (i.kind is Kind.FREE)
            most = max(most, now)
        return most

    @property
    def peak_bytes(self) -> int:
        """The most bytes of whole parameters at once."""
        return engine.memory(self.program).peak_of([Memory.UNSHARDED])

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(self.timeline)

    @property
    def exposed_s(self) -> float:
        return self.diagnosis.exposed_s

    @property
    def fits(self) -> bool:
        return self.level.whole is None or self.whole <= self.level.whole

    @property
    def stars(self) -> int:
        """0; 1 where the goal is reached; 2 where no order is better."""
        if not self.fits or self.step_s * 1e3 > self.level.goal_ms + SAME_S:
            return 0
        return 2 if self.step_s * 1e3 <= self.level.best_ms + SAME_S else 1

    @property
    def waits(self) -> str:
        """What compute waits for longest, found by `fsdp_sim.diagnose`."""
        if self.exposed_s <= SAME_S:
            return "Compute waits for nothing."
        worst = self.diagnosis.culprits[0]
        if worst.culprit is Culprit.COMPUTING_THREAD:  # whose sentence is about torch on a CPU
            units = ", ".join(worst.units)
            return f"Compute asks for a gather only when it needs it ({units}): {ms(worst.idle_s)}."
        return worst.sentence

    @property
    def numbers(self) -> str:
        """Step time, whole units and exposed communication, in one line."""
        limit = "" if self.level.whole is None else f" (at most {self.level.whole} allowed)"
        units = "unit" if self.whole == 1 else "units"
        return (
            f"step {ms(self.step_s)}, goal {self.level.goal_ms:g} ms; {self.whole} {units} whole at once{limit}, "
            f"{human_bytes(self.peak_bytes)}; {ms(self.exposed_s)} of communication exposed"
        )

    @property
    def said(self) -> str:
        """Whether it is won, and what for."""
        if self.stars:
            best = "No order is faster." if self.stars == 2 else "Won, and a faster order exists."
            return f"{'★' * self.stars} {best} {self.level.won}"
        return "" if self.fits else f"{self.whole} units are whole at once; {self.level.whole} may be."

    def __str__(self) -> str:
        return "\n".join(filter(None, [f"{self.level.title}: {self.numbers}", self.said, self.waits]))

    __repr__ = __str__


def ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 3):g} ms"


def replay(level: Level, order: Sequence[str]) -> Replayed:
    """Play an order of a level's lines.

    Raises:
        ValueError: it is no order of these lines, or a line comes before what it needs; says which.
    """
    lines = _lines(level, order)
    writer = _Writer(level)
    for number, line in enumerate(lines):
        writer.issue(number, line)
    writer.end()
    units = tuple(Unit(name, (Param("weight", (n_bytes // 4,)),)) for name, n_bytes in zip(*_sizes(level), strict=True))
    program = Program(units, Plan(), RANKS, tuple(writer.out))
    return Replayed(
        level, lines, program, engine.replay(program, _seconds(level), device="cpu"), frozenset(writer.idle)
    )


def _lines(level: Level, order: Sequence[str]) -> tuple[str, ...]:
    if isinstance(order, str) or not isinstance(order, (list, tuple)):
        raise ValueError(f"an order is a list of lines, such as [{level.start[0]!r}, ...]; this is {order!r:.60}")
    if len(order) > 10 * len(level.start):
        raise ValueError(f"this level has {len(level.start)} lines; you gave {len(order):,}")
    lines = tuple(re.sub(r"\s+", " ", line).strip().upper() if isinstance(line, str) else repr(line) for line in order)
    given, wanted = Counter(lines), Counter(level.start)
    for line in given:
        if line not in wanted:
            raise ValueError(f"{line!r:.60} is no line of this level; its lines are {', '.join(dict.fromkeys(wanted))}")
    for line, times in wanted.items():
        if given[line] != times:
            raise ValueError(
                f"{line} is {_times(given[line])} and must be {_times(times)}: lines are moved, not added or dropped"
            )
    compute = tuple(line for line in lines if line in level.compute)
    for is_, must in zip(compute, level.compute, strict=True):
        if is_ != must:
            raise ValueError(f"{is_} comes where {must} must: the model computes in its own order; move collectives")
    return lines


def _times(n: int) -> str:
    return {0: "missing", 1: "there once", 2: "there twice"}.get(n, f"there {n} times")


def _sizes(level: Level) -> tuple[list[str], list[int]]:
    mib = level.mib or (100,) * len(level.gather_ms)
    return [f"unit {n}" for n in range(len(mib))], [n * 2**20 for n in mib]


def _seconds(level: Level) -> dict[tuple[Op, str], float]:
    """By operation and unit."""
    of = {
        Op.ALL_GATHER: level.gather_ms, Op.REDUCE_SCATTER: level.reduce_ms, Op.ALL_REDUCE: level.all_reduce_ms,
        Op.FWD: level.forward_ms, Op.BWD: level.backward_ms,
    }  # fmt: skip
    return {(op, f"unit {n}"): t / 1e3 for op, times in of.items() for n, t in enumerate(times)}


class _Writer:
    """Writes the instructions of each line, and refuses one that comes before what it needs."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.out: list[Instruction] = []
        self.idle: set[int] = set()
        self.left = Counter(level.compute)
        self.events: dict[tuple[str, str], int] = {}  # of the last collective of a kind and unit
        self.whole: set[str] = set()  # asked for, and not yet freed
        self.unused: set[str] = set()  # asked for, and not yet computed with
        self.done: set[str] = set()
        self.phase = Phase.FORWARD if level.forward_ms else Phase.BACKWARD
        self.bytes = dict(zip(*_sizes(level), strict=True))

    def issue(self, number: int, line: str) -> None:
        kind, _, n = line.partition(" ")
        if kind == "BWD":
            self.phase = Phase.BACKWARD
        elif kind == "FWD":
            self.phase = Phase.FORWARD
        getattr(self, f"_{kind.lower()}")(number, n, f"unit {n}")

    def _ag(self, number: int, n: str, unit: str) -> None:
        if unit in self.whole:
            self.idle.add(number)
            return
        if not any(self.left[f"{kind} {n}"] for kind in ("FWD", "BWD")):
            raise ValueError(f"AG {n} comes after the last line that computes with unit {n}: nobody would use it")
        self.whole.add(unit)
        self.unused.add(unit)
        self._memory(Kind.ALLOC, Op.ALLOC, unit)
        self._collective("AG", unit)

    def _compute(self, kind: str, n: str, unit: str) -> None:
        if unit not in self.whole:
            raise ValueError(f"{kind} {n} needs unit {n} whole, and no AG {n} stands before it since it was last freed")
        self._wait("AG", unit, Lane.COMPUTE)
        op, lane = OPS[kind]
        self._add(Kind.OP, lane, op=op, unit=unit)
        self.left[f"{kind} {n}"] -= 1
        self.unused.discard(unit)
        if not self.level.reshards(n):
            self._free(unit)

    def _fwd(self, number: int, n: str, unit: str) -> None:
        self._compute("FWD", n, unit)

    def _bwd(self, number: int, n: str, unit: str) -> None:
        self._compute("BWD", n, unit)

    def _reshard(self, number: int, n: str, unit: str) -> None:
        if unit in self.unused:
            raise ValueError(f"RESHARD {n} frees unit {n} before anything has used what AG {n} brings")
        if unit not in self.whole:
            self.idle.add(number)
            return
        self._free(unit)

    def _rs(self, number: int, n: str, unit: str) -> None:
        if self.left[f"BWD {n}"]:
            raise ValueError(f"RS {n} needs the gradients of unit {n}, and its last BWD {n} comes only after it")
        self._add(Kind.WAIT_STREAM, Lane.REDUCE_SCATTER, other=Lane.COMPUTE)
        self._collective("RS", unit)
        self.done.add(f"RS {n}")

    def _ar(self, number: int, n: str, unit: str) -> None:
        if f"RS {n}" not in self.done:
            raise ValueError(f"AR {n} adds up what RS {n} leaves on this rank, and RS {n} comes only after it")
        self._wait("RS", unit, Lane.ALL_REDUCE)
        self._collective("AR", unit)

    def end(self) -> None:
        if self.whole:
            unit = min(self.whole)
            raise ValueError(
                f"{unit} is still whole at the end of the step: the optimizer would change the shards under it"
            )
        for (kind, unit), _ in list(self.events.items()):
            if kind != "AG":
                self._wait(kind, unit, Lane.COMPUTE)

    # -- instructions

    def _add(self, kind: Kind, lane: Lane, **fields: object) -> None:
        self.out.append(Instruction(kind, 0, 0, self.phase, lane, **fields))  # type: ignore[arg-type]

    def _memory(self, kind: Kind, op: Op, unit: str) -> None:
        self._add(kind, Lane.COMPUTE, op=op, unit=unit, bytes=self.bytes[unit], category=Memory.UNSHARDED)

    def _free(self, unit: str) -> None:
        self.whole.discard(unit)
        self._memory(Kind.FREE, Op.FREE, unit)

    def _collective(self, kind: str, unit: str) -> None:
        op, lane = OPS[kind]
        own = {"AG": "gather", "RS": "reduce", "AR": "replicate"}[kind]
        communicator = "shard" if kind != "AR" and self.level.communicators == 1 else own
        self._add(
            Kind.OP, lane, op=op, unit=unit, bytes=self.bytes[unit], group_size=RANKS, communicator=communicator,
            dtype="fp32",
        )  # fmt: skip
        self.events[kind, unit] = event = len(self.out)
        self._add(Kind.RECORD, lane, event=event, event_lane=lane)

    def _wait(self, kind: str, unit: str, lane: Lane) -> None:
        self._add(Kind.WAIT, lane, event=self.events[kind, unit], event_lane=OPS[kind][1])
