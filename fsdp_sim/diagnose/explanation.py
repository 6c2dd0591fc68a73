"""`explain`: why a step takes as long as it does, in numbers and in sentences.

What compute waited for is what `diagnose` finds in the run's timeline. What only a program that can be played again
tells comes on top: the critical path, what bound each unit, and what faster hardware would gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from fsdp_sim.diagnose.causes import PathPiece
from fsdp_sim.diagnose.critical_path import RunCauses, critical_path_of_run
from fsdp_sim.diagnose.diagnosis import diagnosis_of
from fsdp_sim.diagnose.findings import Blame, Diagnosis
from fsdp_sim.diagnose.look import StepObservation, look
from fsdp_sim.diagnose.sentences import blames
from fsdp_sim.engine import Exposure, Run, exposure
from fsdp_sim.schedule import Instruction, Param, Program, mesh_of, mesh_of_unit
from fsdp_sim.timeline import COLLECTIVES, Lane, Op
from fsdp_sim.words import human_ms, percent

Bound = Literal["compute", "network", "copies", "CPU"]
_CPU = Lane.CPU
_BOUND: dict[Op, Bound] = {
    **dict.fromkeys(COLLECTIVES, "network"),
    **dict.fromkeys((Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM), "compute"),
}
LEAST = 1e-3  # of a step: waits that cost less are left out
PADDED = 1.25  # times its size from which a unit's padding is worth a sentence
FEW_RANKS = 64  # of more only those on the critical path are looked at, which are the ones that others wait for
FASTER = 1.1  # what "10% faster" means: a part does 1.1 times as much in the same time


@dataclass(frozen=True)
class Explanation:
    """Why a step takes as long as it does.

    Attributes:
        run, step, rank: what is explained; the rank is the one on which the step ends.
        exposure: communication and idle times.
        observed: the idle times of the rank, with their culprits.
        critical_path: see `critical_path_of_run`.
        critical_s: seconds of the critical path by what they are spent on.
        bound: for each unit, in order of issue, what most of its part of the critical path is spent on.
        bound_s: for each of these the seconds that its units are on the critical path.
        faster: for ``compute``, ``network`` and ``cpu`` what plays the program where this is 10% faster.
        between_steps_s: what a training loop takes between two steps, which is not replayed.
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
    between_steps_s: float = 0.0

    @property
    def step_time_s(self) -> float:
        return self.exposure.step_s

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
        return {
            name: self.run.step_time_s(self.step) - play().step_time_s(self.step) for name, play in self.faster.items()
        }

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
        return self.run.step_time_s(self.step) - self.run.scaled(cpu=0.5).step_time_s(self.step)

    @property
    def sentences(self) -> list[str]:
        """The same in words, the most important first."""
        return _sentences(self)

    @property
    def gains_sentence(self) -> str:
        """What faster hardware would change."""
        return _gains(self)

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


# -- in words


def _sentences(found: Explanation) -> list[str]:
    """The explanation in words."""
    waits = [blame.sentence for blame in found.culprits if blame.idle_s >= LEAST * found.step_time_s]
    return [*_summary(found), *waits, _path(found), *_units(found), found.gains_sentence, *_padding(found)]


def _summary(found: Explanation) -> list[str]:
    step_s, e, plan = found.step_time_s, found.exposure, found.run.program.plan
    idle_s = step_s - found.compute_s
    lines = [
        f"The step takes {human_ms(step_s)}. Compute is busy for {human_ms(found.compute_s)} of it "
        f"({percent(found.compute_s, step_s)}) and waits for {human_ms(idle_s)} ({percent(idle_s, step_s)})."
    ]
    lines += _again(found)
    if plan.activation_offload:
        how = (
            "on the compute stream, which is busy meanwhile; a stream of their own would copy beside it"
            if plan.activation_offload == "save_on_cpu"
            else "on a stream of their own"
        )
        copied_s = found.seconds_of(Op.ACT_D2H, Op.ACT_H2D)
        lines.append(f"Activations are copied to the CPU's memory and back for {human_ms(copied_s)}, {how}.")
    if found.between_steps_s:
        checkpoints = ", checkpoints" if plan.save_every else ""
        clipping = "" if plan.clip_grad_norm else ", clipping"
        lines.append(
            f"Between two steps the training loop takes another {human_ms(found.between_steps_s)}, for "
            f"data{checkpoints}{clipping} and logging."
        )
    if e.comm_s and e.exposed_s > 1e-6 * step_s:
        lines.append(
            f"Communication is in flight for {human_ms(e.comm_s)}; {human_ms(e.exposed_s)} of that "
            f"({percent(e.exposed_s, e.comm_s)}) are exposed: compute waits meanwhile."
        )
    elif e.comm_s:
        lines.append(f"Communication is in flight for {human_ms(e.comm_s)}, all of it hidden behind compute.")
    return lines


def _again(found: Explanation) -> list[str]:
    """What checkpointed blocks keep of their operators, and what the rest takes again."""
    kept = found.run.program.plan.activation_checkpointing
    if kept != "selective" and not isinstance(kept, tuple):
        return []
    again_s = found.seconds_of(Op.RECOMPUTE)
    what = "attention and of every second linear layer" if kept == "selective" else _names(list(kept))
    return [
        f"Checkpointed blocks keep the outputs of {what} and compute the rest again in backward: {human_ms(again_s)} "
        f"of the busy time ({percent(again_s, found.compute_s)})."
    ]


def _padding(found: Explanation) -> list[str]:
    program = found.run.program
    return program.once("padding", lambda: _padded(program))


def _padded(program: Program) -> list[str]:
    """Dimension 0 is cut into one piece per rank: of 8 experts on 64 ranks 56 hold nothing, but all are sent."""
    plan, mesh = program.plan, mesh_of(program.plan, program.world_size)
    if plan.api != "fsdp2" or mesh.shards == 1:
        return []
    times_of: dict[str, float] = {}
    worst: dict[str, Param] = {}
    for unit in program.units:
        of_unit = mesh_of_unit(unit, mesh, plan)
        own = sum(p.bytes for p in unit.params)
        padded = {p: of_unit.padded_bytes(p) for p in unit.params}
        if own and sum(padded.values()) >= PADDED * own:
            times_of[unit.name] = sum(padded.values()) / own
            worst[unit.name] = max(unit.params, key=lambda p: padded[p] - p.bytes)
    if not times_of:
        return []
    first = max(times_of, key=lambda name: times_of[name])
    param = worst[first]
    return [
        f"{_names(list(times_of))} {'is' if len(times_of) == 1 else 'are'} padded to up to {times_of[first]:.1f} times "
        f"{'its' if len(times_of) == 1 else 'their'} size, in what is sent, kept and stepped: {param.name} has "
        f"{param.shape[0]} rows for {mesh.shards} shards. Fewer shards (shard_size), or shards of another dimension "
        f"(shard_placement_fn), need less."
    ]


def _path(found: Explanation) -> str:
    spent = sorted(
        ((kind, s) for kind, s in found.critical_s.items() if s >= 1e-3 * found.step_time_s), key=lambda one: -one[1]
    )
    shares = ", ".join(f"{percent(seconds, found.step_time_s)} {kind}" for kind, seconds in spent)
    return f"The critical path, the chain of operations that the step's time consists of, is {shares or 'empty'}."


def _units(found: Explanation) -> list[str]:
    counts = Counter(found.bound.values())
    if len(counts) < 2:
        return []
    of_kind = {"network": "the network", "CPU": "the CPU"}
    words = [
        f"{count} {'are ' * (number == 0)}bound by {of_kind.get(kind, kind)} "
        f"({_names([unit for unit, bound in found.bound.items() if bound == kind])}; "
        f"{percent(found.bound_s[kind], found.step_time_s)} of the step)"
        for number, (kind, count) in enumerate(counts.most_common())
    ]
    return [f"Of the {len(found.bound)} units on it {', '.join(words)}."]


def _gains(found: Explanation) -> str:
    gains = sorted(found.gains.items(), key=lambda one: -one[1])
    words = {name: "CPU" if name == "cpu" else name for name, _ in gains}
    least = 5e-4 * found.step_time_s  # else it would be said to save 0.0%
    of_path_s = found.critical_s["network"] * (1 - 1 / FASTER)  # all that could be saved if nothing shared the device
    slowed = (
        ", also because collectives in flight slow down what runs beside them"
        if found.gains["network"] > of_path_s + least
        else ""
    )
    gained = [
        f"10% faster {words[name]} would save {human_ms(gain)} ({percent(gain, found.step_time_s)})"
        f"{slowed if name == 'network' else ''}"
        if gain > 0
        else f"10% faster {words[name]} would cost {human_ms(-gain)}"
        for name, gain in gains
        if abs(gain) >= least
    ]
    nothing = [words[name] for name, gain in gains if abs(gain) < least]
    if nothing:
        gained.append(f"10% faster {' or '.join(nothing)} would change nothing")
    if found.run.program.plan.cpu_offload and not found.run.on_cpu:
        saved_s = found.twice_as_fast_cpu_s
        gained.append(
            f"a CPU twice as fast, which has the optimizer, would save {human_ms(saved_s)} "
            f"({percent(saved_s, found.step_time_s)})"
        )
    return f"{'; '.join(gained)}."


def _names(units: list[str]) -> str:
    """Up to three names, each once."""
    distinct = list(dict.fromkeys(unit or "the optimizer" for unit in units))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more
