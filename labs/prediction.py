"""What the simulator says of a run before it is measured: step time, exposed communication, peak memory.

On GPUs it knows the hardware from its catalogue. The rates of CPU cores say little about small matrices and Python, so
there each piece of a step is timed on its own, see `labs.timing`; the simulator plays torch's program with these.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import torch

from fsdp_sim import engine
from fsdp_sim.engine.seconds import COPIES
from fsdp_sim.schedule import Instruction
from fsdp_sim.simulate import Simulation
from fsdp_sim.timeline import Op
from labs.config import TrainConfig
from labs.models import ModelConfig
from labs.place import Place
from labs.simulated import peak_memory_bytes, simulated
from labs.timing import Piece, Pieces, measure_pieces

TINY_S = 1e-12  # so that what the catalogue takes to be free has its part of a piece
COMPUTE = (Op.FWD, Op.BWD, Op.RECOMPUTE)
FREE = COPIES | {Op.H2D, Op.D2H}  # on CPU cores, where not timed: part of the piece that follows, or no copy at all


@dataclasses.dataclass(frozen=True)
class Prediction:
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
    config: TrainConfig, model_config: ModelConfig, place: Place, device: torch.device, pieces: Pieces | None = None
) -> Prediction:
    """Predict a run on one process; other ranks need not be there.

    Args:
        place: whose number of ranks is predicted for.
        device: of the run. On ``cuda`` all nodes are taken to be like this one.
        pieces: on CPU cores those that `labs.timing.measure_pieces` found; by default it is called, which takes about
            as long as 10 steps. Nothing else should run meanwhile, the training least of all.

    Raises:
        ValueError: the GPU is not in the catalogue, or the simulator cannot play this configuration; says why.
    """
    simulation = simulated(config, model_config, place, device)
    memory = peak_memory_bytes(config, simulation)
    if device.type == "cuda":
        told = f"Predicted from the catalogue's {simulation.cluster.gpu.name}, before anything was measured."
        sentences = (told, *simulation.explain().sentences)
        return Prediction(simulation.step_time_s, simulation.exposed_comm_s, memory, sentences)
    pieces = pieces or measure_pieces(config, model_config, place)
    runs = [_played(simulation, of_step) for of_step in pieces.of_steps]
    run = sorted(runs, key=lambda run: run.step_time_s())[len(runs) // 2]
    told = (
        f"Predicted from what each piece of a step takes alone on this machine, measured by {place.local_world_size} "
        f"rank{'s' * (place.local_world_size > 1)} in {pieces.wall_s:.1f} s of another run."
    )
    if place.local_world_size < place.world_size:
        told += " The network to other machines was not measured: theirs is taken to be as fast as this one's memory."
    exposed_s = statistics.fmean(engine.exposure(run, rank=rank).exposed_s for rank in range(run.ranks))
    return Prediction(run.step_time_s() + pieces.rest_s, exposed_s, memory, (told, *engine.explain(run).sentences))


def _played(simulation: Simulation, pieces: Mapping[Piece, np.ndarray]) -> engine.Run:
    return engine.run(simulation.program, _seconds(simulation, pieces), device="cpu")


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
