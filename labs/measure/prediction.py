"""What the simulator says of a run before it is measured: step time, exposed communication, peak memory.

On GPUs it knows the hardware from its catalogue. The rates of CPU cores say little about small matrices and Python, so
there each piece of a step is timed on its own, see `labs.measure.piece_times`; the simulator plays torch's program with
these. Or, without a run of the same configuration, with the cluster that ``fsdp-sim calibrate`` wrote:
`predict_calibrated`.

[Note: collectives on CPU cores]  torch's FSDP issues collectives on streams of a GPU and goes on. On CPU cores there
are no streams, and each returns when it is done (torch 2.13, `foreach_all_gather`: async_op=False):
nothing overlaps, whatever is prefetched. DDP and the mini-FSDP issue theirs asynchronously. Then gloo's threads work
beside the training, and where each rank has but one core they take turns with it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fsdp_sim import engine
from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.diagnose import explain
from fsdp_sim.engine.seconds import COPIES
from fsdp_sim.ranks import Network
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import Cluster, Gpu, gpu_names
from fsdp_sim.timeline import COLLECTIVES, Op
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.measure.piece_times import Piece, Pieces, measure_pieces
from labs.measure.simulated import WHOLE_MODEL, peak_memory_bytes, simulated
from labs.model import ModelConfig

WAITS = ("fsdp2", "hsdp", "fsdp1")  # for each collective, on CPU cores
DTENSOR_LAUNCHES = 2  # of a kernel, around each parameter in the gradients' norm and in the optimizer
SMALL_REDUCES = {"single": 0, "ddp": 1}  # in a step: what all ranks agree on; where sharded, the norm too: 2

TINY_S = 1e-12  # so that what the catalogue takes to be free has its part of a piece
COMPUTE = (Op.FWD, Op.BWD, Op.RECOMPUTE)
FREE = COPIES | {Op.H2D, Op.D2H}  # on CPU cores, where not timed: part of the piece that follows, or no copy at all


@dataclass(frozen=True)
class StepPrediction:
    """What the simulator says.

    Attributes:
        step_time_s: of an optimizer step.
        exposed_comm_s: of it, seconds in which a rank communicates and does not compute; the mean of the ranks.
        peak_memory_bytes: of tensors, on the rank that has the most.
        sentences: what it is based on, and why the step takes as long as it does.
    """

    step_time_s: float
    exposed_comm_s: float
    peak_memory_bytes: int
    sentences: tuple[str, ...]


def predict(
    config: TrainConfig, model_config: ModelConfig, place: RankPlace, device: torch.device, pieces: Pieces | None = None
) -> StepPrediction:
    """Predict a run on one process; other ranks need not be there.

    Args:
        place: whose number of ranks is predicted for.
        device: of the run. On ``cuda`` all nodes are taken to be like this one.
        pieces: on CPU cores those that `labs.measure.piece_times.measure_pieces` found; by default it is called,
            which takes about as long as 10 steps. Nothing else should run meanwhile, the training least of all.

    Raises:
        ValueError: the simulator cannot play this configuration; says why.
    """
    simulation = simulated(config, model_config, place, device)
    memory = peak_memory_bytes(config, simulation)
    if device.type == "cuda":
        sentence = _sentence(simulation.cluster.gpu)
        sentences = (sentence, *simulation.explain().sentences)
        return StepPrediction(simulation.step_time_s, simulation.exposed_comm_s, memory, sentences)
    pieces = pieces or measure_pieces(config, model_config, place)
    program = _waiting(simulation.program) if config.api in WAITS else simulation.program
    runs = [engine.run(program, _seconds(simulation, of_step), device="cpu") for of_step in pieces.of_steps]
    run = sorted(runs, key=lambda run: run.step_time_s())[len(runs) // 2]
    sentence = (
        f"Predicted from what each piece of a step takes alone on this machine, measured by {place.local_world_size} "
        f"rank{'s' * (place.local_world_size > 1)} in {pieces.wall_s:.1f} s of another run."
    )
    if place.local_world_size < place.world_size:
        sentence += (
            " The network to other machines was not measured: theirs is taken to be as fast as this one's memory."
        )
    exposed_s = statistics.fmean(engine.exposure(run, rank=rank).exposed_s for rank in range(run.ranks))
    return StepPrediction(run.step_time_s() + pieces.rest_s, exposed_s, memory, (sentence, *explain(run).sentences))


def _sentence(gpu: Gpu) -> str:
    if gpu.name in gpu_names():
        return f"Predicted from the catalogue's {gpu.name}, before anything was measured."
    return f"Predicted before anything was measured. {gpu.notes}"


def predict_calibrated(
    config: TrainConfig, model_config: ModelConfig, place: RankPlace, cluster: Cluster, network: Network | None = None
) -> StepPrediction:
    """Predict a run on CPU cores from what ``fsdp-sim calibrate`` measured on this machine, before anything is trained.

    Args:
        place: whose number of ranks is predicted for; all on one machine.
        cluster: of kind ``cpu``, calibrated with as many ranks: `Cluster.from_file`.
        network: the slow network that the ranks are started with, see `fsdp_sim.ranks.run`.

    Raises:
        ValueError: a cluster of GPUs, or of another number of ranks.
    """
    from fsdp_sim.measure.calibrate import cores

    if cluster.kind != "cpu" or cluster.gpus != place.world_size:
        raise ValueError(
            f"the cluster has {cluster.gpus} ranks on {cluster.gpu.name}, and {place.world_size} ranks on CPU cores "
            f"are asked for; measure them with fsdp-sim calibrate --device cpu --ranks {place.world_size}"
        )
    traced = simulated(config, model_config, place, torch.device("cpu"))
    simulation = Simulation(traced.workload, cluster, traced.plan)
    costs = simulation.costs

    def seconds(i: Instruction) -> float:
        alone_s = costs.seconds(i)
        if i.op not in COLLECTIVES or network is None:
            return alone_s
        return max(network.seconds(i.op.lower(), i.bytes, i.group_size), alone_s)

    def slowdown(slowed: Instruction, by: Instruction) -> float:
        """gloo's threads need a core while they copy and sum, not while the wire is waited for."""
        return 1.0 + costs.seconds(by) / max(seconds(by), TINY_S)

    crowded = cores() < 2 * place.local_world_size
    contention = engine.Contention(compute_slowdown_by_collective=slowdown) if crowded else None
    program = _waiting(simulation.program) if config.api in WAITS else simulation.program
    run = engine.run(program, seconds, issue_s=costs.issue_s, device="cpu", contention=contention)
    sharded = config.api not in WHOLE_MODEL
    n_params = sum(len(unit.params) for unit in simulation.workload.units)
    rest_s = (cluster.gpu.launch_s or 0.0) * n_params * (DTENSOR_LAUNCHES if sharded else 1)
    if place.world_size > 1:
        n_bytes = 4 * place.world_size
        small_s = collective_s("all_reduce", n_bytes, place.world_size, cluster)
        wire_s = network.seconds("all_reduce", n_bytes, place.world_size) if network else 0.0
        rest_s += SMALL_REDUCES.get(config.api, 2) * (max(small_s, wire_s) + (cluster.gpu.collective_s or 0.0))
    memory = peak_memory_bytes(config, simulation)
    sentence = f"Predicted from what fsdp-sim calibrate measured on {cluster.gpu.name} with {cluster.gpus} ranks."
    exposed_s = engine.exposure(run).exposed_s
    return StepPrediction(run.step_time_s() + rest_s, exposed_s, memory, (sentence, *explain(run).sentences))


def _waiting(program: Program) -> Program:
    """The same program where the CPU waits for each collective, see [Note: collectives on CPU cores]."""
    instructions: list[Instruction] = []
    for i in program.instructions:
        instructions.append(i)
        if i.kind is Kind.OP and i.op in COLLECTIVES:
            instructions.append(Instruction(Kind.CPU_SYNC, i.step, i.micro_batch, i.phase))
    return replace(program, instructions=tuple(instructions))


def _seconds(simulation: Simulation, pieces: Mapping[Piece, np.ndarray]) -> Callable[[Instruction], np.ndarray | float]:
    """What each operation of the program takes: as measured, one number per rank.

    Where a piece is several operations of the program (parameters that are copied one by one, all blocks of a model
    that is not sharded), it is divided among them as the catalogue's costs are. A collective lasts as long as on the
    rank where it lasted longest: ranks that share cores wait for each other, in training too.
    """
    program, costs, world = simulation.program, simulation.costs, simulation.cluster.gpus
    steps = 1 + max(i.step for i in program.ops)
    in_all: Counter[Piece] = Counter()
    for i in program.ops:
        in_all[_piece(i, pieces)] += (costs.seconds(i) + TINY_S) / steps  # type: ignore[assignment]

    def seconds(i: Instruction) -> np.ndarray | float:
        piece = _piece(i, pieces)
        if piece not in pieces:
            if i.op in FREE:
                return 0.0
            raise ValueError(
                f"nothing was timed for {i.op} of {i.unit or 'the model'}, so there is no prediction of "
                f"api={simulation.plan.api} on CPU cores; use api=fsdp2 or ddp"
            )
        return np.resize(pieces[piece] * ((costs.seconds(i) + TINY_S) / in_all[piece]), world)

    return seconds


def _piece(i: Instruction, pieces: Mapping[Piece, np.ndarray]) -> Piece:
    """The piece that an operation is part of: what is computed again is a forward to the mini-FSDP's hooks, and part
    of backward where nothing is sharded."""
    if (Op.FWD, "") in pieces and i.op in COMPUTE:
        return (Op.FWD if i.op is Op.FWD else Op.BWD, "")
    return (Op.FWD if i.op is Op.RECOMPUTE else i.op, i.unit)
