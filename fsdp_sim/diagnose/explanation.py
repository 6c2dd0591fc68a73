"""`explain`: why a step takes as long as it does, in numbers and in sentences.

What compute waited for is what `diagnose` finds in the run's timeline. What only a program that can be played again
tells comes on top: the critical path, what bound each unit, and what faster hardware would gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from fsdp_sim.diagnose.causes import PathPiece
from fsdp_sim.diagnose.critical_path import RunCauses, critical_path_of_run
from fsdp_sim.diagnose.diagnosis import diagnosis_of
from fsdp_sim.diagnose.explanation_in_words import FASTER, Bound, gains_in_words, in_words
from fsdp_sim.diagnose.findings import Blame, Diagnosis
from fsdp_sim.diagnose.look import StepObservation, look
from fsdp_sim.diagnose.sentences import blames
from fsdp_sim.engine import Exposure, Run, exposure
from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import COLLECTIVES, Lane, Op

_CPU = Lane.CPU
_BOUND: dict[Op, Bound] = {
    **dict.fromkeys(COLLECTIVES, "network"),
    **dict.fromkeys((Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM), "compute"),
}
FEW_RANKS = 64  # of more only those on the critical path are looked at, which are the ones that others wait for


def _no_checkpoints(step_s: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Explanation:
    """Why a step takes as long as it does.

    Attributes:
        run, step, rank: what is explained; the rank is the one on which the step ends.
        exposure: communication and idle times.
        observed: the idle times of the rank, with their culprits.
        critical_path: see `critical_path_of_run`.
        critical_s: seconds of the critical path by what they are spent on.
        bound: for each unit (and bucket, and matrix of Muon), in order of issue, what most of its part of the critical
            path is spent on.
        bound_s: for each of these the seconds that its units are on the critical path.
        faster: for ``compute``, ``network`` and ``cpu`` what plays the program where this is 10% faster.
        loop_s: what a training loop takes between two steps for data, clipping and logging, which is not replayed.
        checkpoint_s: what checkpoints take of a step whose operations take so many seconds.
    """

    run: Run = field(repr=False)
    step: int
    rank: int
    exposure: Exposure = field(repr=False)
    observed: StepObservation = field(repr=False)
    critical_path: tuple[PathPiece, ...] = field(repr=False)
    critical_s: dict[Bound, float]
    bound: dict[str, Bound]
    bound_s: dict[Bound, float]
    faster: Mapping[str, Callable[[], Run]] = field(repr=False)
    loop_s: float = 0.0
    checkpoint_s: Callable[[float], float] = field(default=_no_checkpoints, repr=False)

    @property
    def step_time_s(self) -> float:
        """Seconds from the first operation of the step to the end of the last."""
        return self.exposure.step_s

    @property
    def whole_step_s(self) -> float:
        """With what passes between two steps."""
        return self._whole_s(self.step_time_s)

    def _whole_s(self, step_s: float) -> float:
        return step_s + self.loop_s + self.checkpoint_s(step_s)

    def saved_s(self, run: Run) -> float:
        """Seconds that the step is shorter where its operations run so."""
        return self._whole_s(self.run.step_time_s(self.step)) - self._whole_s(run.step_time_s(self.step))

    @cached_property
    def compute_s(self) -> float:
        """Seconds in which the device computes or copies; waits for an operation's next kernel do not count."""
        return self.exposure.compute_s - sum([e.unlaunched_s for e in self.observed.computing])

    @cached_property
    def culprits(self) -> list[Blame]:
        """What compute waits for, what costs most first."""
        return blames(self.observed)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What `diagnose` says of the run's timeline: the culprits, and besides them each collective in words."""
        return diagnosis_of(self.observed)

    @cached_property
    def gains(self) -> dict[str, float]:
        """Seconds that the step would be shorter if ``compute``, ``network`` or ``cpu`` were 10% faster.

        The program is played again for each when this is first asked for.
        """
        return {name: self.saved_s(play()) for name, play in self.faster.items()}

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed communication of each unit, largest first."""
        units: dict[str, float] = {}
        for (_, unit), seconds in self.exposure.by_unit.items():
            units[unit] = units.get(unit, 0.0) + seconds
        return dict(sorted(units.items(), key=lambda one: -round(one[1], 12)))

    @property
    def optimizer_s(self) -> float:
        """Seconds in which the optimizer runs on the rank."""
        return self.seconds_of(Op.OPTIM)

    def seconds_of(self, *ops: Op) -> float:
        """Seconds that kernels of such operations of the step run on the rank, together."""
        return float(sum([e.duration_s - e.unlaunched_s for e in self.observed.events if e.op in ops]))

    @cached_property
    def twice_as_fast_cpu_s(self) -> float:
        """Seconds that the step would be shorter if the CPU were twice as fast, in what it computes and in issuing."""
        return self.saved_s(self.run.scaled(cpu=0.5))

    @property
    def sentences(self) -> list[str]:
        """The same in words, the most important first."""
        return in_words(self)

    @property
    def gains_sentence(self) -> str:
        """What faster hardware would change."""
        return gains_in_words(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def explain(run: Run, *, step: int = -1, faster: Mapping[str, Callable[[], Run]] | None = None) -> Explanation:
    """Say why a step (the last by default) takes as long as it does.

    Args:
        run: what was played.
        step: which step.
        faster: for ``compute``, ``network`` and ``cpu`` a function that plays the program on hardware of which this is
            10% faster. By default the durations of the run are divided by 1.1: of what the device computes, of
            collectives, or of issuing and what the CPU computes (which on a CPU cluster is not all that is computed).

    Raises:
        ValueError: the program has no such step, or no operations.

    Example:
        >>> from fsdp_sim.engine import run
        >>> from fsdp_sim.schedule import Param, Unit, build
        >>> from fsdp_sim.spec import Plan
        >>> layers = [Unit(f"layers.{i}", (Param("w", (8, 4)),)) for i in range(3)]
        >>> program = build([Unit("root", segments=(...,)), *layers], Plan(), world_size=8)
        >>> seconds = {Op.FWD: 0.025, Op.BWD: 0.05, Op.ALL_GATHER: 0.01, Op.REDUCE_SCATTER: 0.01}
        >>> for sentence in explain(run(program, lambda i: seconds.get(i.op, 0.0))).sentences[:3]:
        ...     print(sentence)
        The step takes 245 ms. Compute is busy for 225 ms of it (92%) and waits for 20.0 ms (8.2%).
        Communication is in flight for 90.0 ms; 20.0 ms of that (22%) are exposed: compute waits meanwhile.
        Forward cannot begin before ALL_GATHER(layers.0) arrives, and has nothing to compute meanwhile: 10.0 ms.
    """
    run.step_time_s(step)  # or an error
    step %= len(run.step_ends_s)
    causes = RunCauses(run)
    path = critical_path_of_run(run, step, causes)
    rank = causes.last(step)[0] if path else 0
    found = exposure(run, step, rank)
    others = range(run.ranks) if run.ranks <= FEW_RANKS else {piece.rank for piece in path}
    observed = look(run.timeline({rank, *others}), step=step, rank=rank)
    replays: dict[str, Callable[[], Run]] = {
        name: partial(run.scaled, **{name: 1 / FASTER}) for name in ("compute", "network", "cpu")
    }
    replays |= faster or {}
    critical_s: dict[Bound, float] = {"compute": 0.0, "network": 0.0, "copies": 0.0, "CPU": 0.0}
    on_path: dict[tuple[str, Bound], float] = {}
    issue_s = {rank: run.of_rank(run.columns.issue_s, rank) for rank in {piece.rank for piece in path if piece.cpu}}
    owner = {segment: unit.name for unit in run.program.units for segment in unit.names_of_segments}
    ops = run.ops
    for piece in path:
        (rank_of_piece, k), cpu, start_s, end_s = piece
        op = ops[k]
        kind = bound_of(op, cpu)
        critical_s[kind] += end_s - start_s
        for i, seconds in _issued(run, piece, issue_s[rank_of_piece]) if cpu else ((op, end_s - start_s),):
            what = owner.get(i.unit, i.unit), kind
            on_path[what] = on_path.get(what, 0.0) + seconds
    bound: dict[str, Bound] = {}
    for (unit, kind), seconds in on_path.items():
        if unit and (unit not in bound or seconds > on_path[unit, bound[unit]]):
            bound[unit] = kind
    bound_s: dict[Bound, float] = {}
    for (unit, _), seconds in on_path.items():
        if unit:
            bound_s[bound[unit]] = bound_s.get(bound[unit], 0.0) + seconds
    return Explanation(run, step, rank, found, observed, tuple(path), critical_s, bound, bound_s, replays)


def bound_of(op: Instruction, cpu: bool) -> Bound:
    """What a piece of the critical path is spent on."""
    return "CPU" if cpu or op.lane is _CPU else _BOUND.get(op.op, "copies")


def _issued(run: Run, piece: PathPiece, issue_s: Sequence[float]) -> list[tuple[Instruction, float]]:
    """What the CPU issues in a piece of the critical path, and how long it takes for each."""
    found = []
    ops, start_s, until = run.ops, piece.start_s, piece.end_s
    for k in range(piece.key[1], -1, -1):
        since = max(issue_s[k - 1] if k else 0.0, start_s)
        found.append((ops[k], until - since))
        until = since
        if since <= start_s:
            break
    return found
