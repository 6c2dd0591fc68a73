"""Predicted beside pretended: step time, exposed communication, peak memory.

On a GPU the prediction is the catalogue's alone. On CPUs, of whose small kernels and Python a catalogue knows little,
each piece of a step is timed over a wire that takes no time, and the simulator plays torch's program with these pieces
and the cluster's wire: what it predicts is what the wire adds. It never sees the steps that it is compared with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fsdp_sim import engine
from fsdp_sim.schedule import Instruction
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import COLLECTIVES, Op, Timeline
from labs.cluster.pretend.network import seconds_on
from labs.cluster.pretend.recorder import Piece
from labs.cluster.pretend.session import Setup, session
from labs.config import TrainConfig
from labs.experiments.result import LabResult, ResultRow, this_machine

CAVEAT = (
    "The loss means nothing: what other ranks would send is not there, copies of rank 0's shards stand in for it. "
    "Scheduling, overlap, compute and memory are real, the wire is modelled."
)
ON_CPU = (
    "On CPUs compute was predicted from pieces timed here, over a wire that takes no time; the cluster's GPU plays no "
    "part. The thread that issues also computes, so in forward an all-gather hides only behind compute that was issued "
    "after it: with explicit prefetch."
)
TINY_S = 1e-12  # so that what the catalogue takes to be free has its part of a piece


@dataclass(frozen=True)
class StepPieces:
    """What the pieces of a step took on this device's CPUs, over a wire that takes no time.

    Attributes:
        simulation: of the steps that were timed: how often each piece occurred.
        of_steps: the pieces of each step.
    """

    simulation: Simulation
    of_steps: Sequence[Mapping[Piece, float]]

    @property
    def undisturbed(self) -> StepPieces:
        """One step in which each piece takes the least that it took: for plans timed one after the other on a machine
        that does other things, too."""
        shortest = {piece: min(step[piece] for step in self.of_steps) for piece in self.of_steps[0]}
        return StepPieces(self.simulation, [shortest])

    @cached_property
    def weights(self) -> Mapping[Piece, float]:
        """The catalogue's cost of a step's pieces: by it a piece that occurs several times is divided."""
        program, costs = self.simulation.program, self.simulation.costs
        steps = 1 + max(i.step for i in program.ops)
        weights: dict[Piece, float] = defaultdict(float)
        for i in program.ops:
            weights[_piece(i)] += (costs.seconds(i) + TINY_S) / steps
        return weights


def timed(setup: Setup, steps: int = 5) -> StepPieces:
    """Time the pieces of a step in a session of its own.

    Raises:
        ValueError: as `Setup.check`.
    """
    with session(setup) as rank:
        rank.train(2)
        return StepPieces(setup.simulation, rank.train(steps).pieces)


def predict(simulation: Simulation, timed: StepPieces) -> engine.Run:
    """Torch's program on CPUs with measured pieces and the wire of the simulation's cluster.

    Args:
        simulation: may differ from the one that was timed in what is gathered and freed when, not in what a unit
            computes at once: micro-batch, units and activation checkpointing are the same.

    Returns:
        the program is played with the pieces of each step that was timed; the run of median length.
    """
    runs = [_played(simulation, pieces, timed.weights) for pieces in timed.of_steps]
    return sorted(runs, key=lambda run: run.step_time_s())[len(runs) // 2]


def _played(simulation: Simulation, pieces: Mapping[Piece, float], weights: Mapping[Piece, float]) -> engine.Run:
    costs = simulation.costs

    def taken_s(i: Instruction) -> float:
        """This one's part of a piece. What was not timed is part of what comes before it."""
        piece = _piece(i)
        return pieces[piece] * (costs.seconds(i) + TINY_S) / weights[piece] if piece in pieces else 0.0

    def seconds(i: Instruction) -> float:
        return costs.seconds(i) if i.op in COLLECTIVES else taken_s(i)

    def issue_s(i: Instruction) -> float:
        return taken_s(i) if i.op in COLLECTIVES else 0.0

    return engine.run(simulation.program, seconds, issue_s=issue_s, device="cpu")


def _piece(i: Instruction) -> Piece:
    """Recomputing is part of backward to whoever looks from outside of the unit."""
    return (Op.BWD if i.op is Op.RECOMPUTE else i.op, i.unit)


def predicted_timeline(run: engine.Run) -> Timeline:
    """Its last step."""
    timeline = run.timeline()
    return timeline.select(step=timeline.steps[-1])


def pretend(
    config: TrainConfig,
    cluster: Cluster,
    *,
    steps: int = 5,
    device: str | torch.device = "cpu",
    unshard_async_op: bool = False,
    name: str = "",
) -> LabResult:
    """Predict a step of rank 0 of a cluster, then pretend it.

    Args:
        config: the trainer's, with ``api=fsdp2`` or ``hsdp``; ``global_batch`` is over all pretended ranks.
        cluster: its number of GPUs is the number of ranks, its links are the wire.
        steps: to measure; the median counts.
        device: ``cpu``, or ``cuda``, where the cluster's GPU should be this one.
        unshard_async_op: FSDP2's ``_set_unshard_async_op``.
        name: of the rows.

    Raises:
        ValueError: it cannot be pretended here; says why and what can.
    """
    setup = Setup(config, cluster, torch.device(device), unshard_async_op)
    return compare({name or f"{cluster.gpus} ranks": setup}, steps=steps)


def compare(
    setups: Mapping[str, Setup],
    *,
    steps: int = 5,
    lab: str = "pretend",
    report: Callable[[str], object] = lambda _: None,
) -> LabResult:
    """The same for several settings, in one result, whose timelines are called ``NAME, predicted`` and so on.

    Args:
        setups: by name.
        report: is called with the name of each before it starts.

    Raises:
        ValueError: as `pretend`.
    """
    rows: list[ResultRow] = []
    timelines: dict[str, Timeline] = {}
    for setup in setups.values():
        setup.check()
    for name, setup in setups.items():
        report(name)
        on_gpu = setup.device.type == "cuda"
        with session(setup) as rank:
            rank.train(2)
            peak_bytes = rank.peak_bytes()
            times, of_steps = [], []
            for _ in range(steps):  # in turns, so that a machine that is busy for a while slows both
                of_steps += rank.train(1).pieces
                times.append(rank.train(1, seconds_on(setup.simulation)))
        measured = sorted(times, key=lambda run: run.step_time_s)[steps // 2]
        run = setup.simulation.run if on_gpu else predict(setup.simulation, StepPieces(setup.simulation, of_steps))
        timelines |= {f"{name}, predicted": predicted_timeline(run), f"{name}, pretended": measured.timeline}
        between_s = setup.simulation.between_steps_s if on_gpu else 0.0
        exposed_s = engine.exposure(run).exposed_s
        rows += [
            ResultRow(name, "step time", 1e3 * (run.step_time_s() + between_s), 1e3 * measured.step_time_s, "ms"),
            ResultRow(name, "exposed communication", 1e3 * exposed_s, 1e3 * measured.exposed_comm_s, "ms"),
            ResultRow(name, "peak memory", setup.simulation.peak_memory_bytes / 2**20, peak_bytes / 2**20, "MiB"),
        ]
    device = next(iter(setups.values())).device
    notes = (CAVEAT,) if device.type == "cuda" else (CAVEAT, ON_CPU)
    hardware = f"rank 0 alone, {this_machine(device)}"
    return LabResult(lab, "pretended", tuple(rows), hardware, timelines=timelines, notes=notes)
