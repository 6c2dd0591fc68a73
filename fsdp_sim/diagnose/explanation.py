"""`Explanation`: why a step takes as long as it does, in numbers and in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fsdp_sim.diagnose.causes import PathPiece
from fsdp_sim.diagnose.diagnosis import diagnosis_of
from fsdp_sim.diagnose.findings import Blame, Diagnosis
from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.diagnose.sentences import blames
from fsdp_sim.engine import Exposure, Run
from fsdp_sim.schedule import Param, Program, mesh_of, mesh_of_unit
from fsdp_sim.timeline import Op
from fsdp_sim.words import human_ms, percent

Bound = Literal["compute", "network", "copies", "CPU"]
FASTER = 1.1  # what "10% faster" means: a part does 1.1 times as much in the same time
LEAST = 1e-3  # of a step: waits that cost less are left out
PADDED = 1.25  # times its size from which a unit's padding is worth a sentence


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

    @property
    def between_steps_s(self) -> float:
        """What passes between two steps: `loop_s`, and checkpoints."""
        return self.loop_s + self.checkpoint_s(self.step_time_s)

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
        return _in_words(self)

    @property
    def gains_sentence(self) -> str:
        """What faster hardware would change."""
        return _gains(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


# -- in words


def _in_words(found: Explanation) -> list[str]:
    """The explanation in words."""
    waits = [blame.sentence for blame in found.culprits if blame.idle_s >= LEAST * found.step_time_s]
    said = [*_summary(found), *_of_ranks(found), *waits, _path(found), *_units(found)]
    return [*said, found.gains_sentence, *_padding(found)]


def _summary(found: Explanation) -> list[str]:
    step_s, e, plan = found.step_time_s, found.exposure, found.run.program.plan
    idle_s = step_s - found.compute_s
    between_s = found.between_steps_s
    lines = [
        f"{'The operations of a step take' if between_s else 'The step takes'} {human_ms(step_s)}. Compute is busy for "
        f"{human_ms(found.compute_s)} of it ({percent(found.compute_s, step_s)}) and waits for {human_ms(idle_s)} "
        f"({percent(idle_s, step_s)})."
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
    if between_s:
        lines.append(_between(found, between_s))
    if e.comm_s and e.exposed_s > 1e-6 * step_s:
        lines.append(
            f"Communication is in flight for {human_ms(e.comm_s)}; {human_ms(e.exposed_s)} of that "
            f"({percent(e.exposed_s, e.comm_s)}) are exposed: compute waits meanwhile."
        )
    elif e.comm_s:
        lines.append(f"Communication is in flight for {human_ms(e.comm_s)}, all of it hidden behind compute.")
    return lines


def _of_ranks(found: Explanation) -> list[str]:
    """Of ranks that were played each, whose times these are, and which rank the others wait for."""
    if found.run.ranks == 1:
        return []
    said = [f"These are the times of rank {found.rank}, on which the step ends."]
    if found.run.ranks > len(found.diagnosis.rank_times):  # of many not all were looked at
        return said
    return [*said, found.diagnosis.straggler.sentence] if found.diagnosis.straggler else said


def _between(found: Explanation, between_s: float) -> str:
    """What passes between two steps, and what for."""
    step_s = found.step_time_s
    saved_s = found.checkpoint_s(step_s)
    what = between_steps(found.loop_s, saved_s, clips=found.run.program.plan.clip_grad_norm)
    of_it = f", {human_ms(saved_s)} of it for checkpoints" if saved_s and found.loop_s else ""
    average = ", on average over the steps from one checkpoint to the next" if saved_s else ""
    late = (  # a longer step would leave the storage more time
        " Each is still being written when the next is due, and training waits for the storage."
        if saved_s and found.checkpoint_s(1.01 * step_s) < saved_s
        else ""
    )
    return f"Between two steps the training loop takes another {human_ms(between_s)}, for {what}{of_it}{average}.{late}"


def between_steps(loop_s: float, checkpoint_s: float, *, clips: bool) -> str:
    """What passes between two steps, in words.

    Args:
        clips: gradients are clipped in the step, among its operations.
    """
    what = ["data"] * (loop_s > 0) + ["checkpoints"] * (checkpoint_s > 0)
    what += ([] if clips else ["clipping"]) + ["logging"] if loop_s > 0 else []
    return f"{', '.join(what[:-1])} and {what[-1]}" if len(what) > 1 else "".join(what)


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
        f"{count} {_is_or_are(count) * (number == 0)}bound by {of_kind.get(kind, kind)} "
        f"({_names([unit for unit, bound in found.bound.items() if bound == kind])}; "
        f"{percent(found.bound_s[kind], found.step_time_s)} of the step)"
        for number, (kind, count) in enumerate(counts.most_common())
    ]
    units = len(found.bound.keys() & {unit.name for unit in found.run.program.units})
    others = len(found.bound) - units
    kind = "Muon's {} matrices" if found.run.program.plan.optimizer == "muon" else "{} buckets"
    beside = f" and {kind.format(others)}" if others else ""
    return [f"Of the {units} units{beside} on it {', '.join(words)}."]


def _is_or_are(count: int) -> str:
    return "is " if count == 1 else "are "


def _gains(found: Explanation) -> str:
    gains = sorted(found.gains.items(), key=lambda one: -one[1])
    words = {name: "CPU" if name == "cpu" else name for name, _ in gains}
    whole_s = found.whole_step_s
    least = 5e-4 * whole_s  # else it would be said to save 0.0%
    of_path_s = found.critical_s["network"] * (1 - 1 / FASTER)  # all that could be saved if nothing shared the device
    slowed = (
        ", also because collectives in flight slow down what runs beside them"
        if found.gains["network"] > of_path_s + least
        else ""
    )
    gained = [
        f"10% faster {words[name]} would save {human_ms(gain)} ({percent(gain, whole_s)})"
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
            f"({percent(saved_s, whole_s)})"
        )
    return f"{'; '.join(gained)}."


def _names(units: list[str]) -> str:
    """Up to three names, each once."""
    distinct = list(dict.fromkeys(unit or "the optimizer" for unit in units))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more
