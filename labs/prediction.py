"""What the simulator says of a run before it is measured: step time, exposed communication, peak memory.

On GPUs it knows the hardware from its catalogue. The rates of CPU cores say little about small matrices and Python, so
there each piece of a step (a block's forward, an all-gather, the optimizer) is timed on its own, by as many ranks as
there will be, in a run of a few steps in which nothing overlaps; the simulator plays torch's program with these.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_sim import engine
from fsdp_sim.cost import Workload
from fsdp_sim.engine.seconds import COPIES
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.schedule import Instruction
from fsdp_sim.simulate import Simulation, simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import RECORDER, Memory, Op, Timeline
from fsdp_sim.timeline.analysis import piece_durations, step_time_s
from labs.config import TrainConfig
from labs.loader import Batch
from labs.models import ModelConfig, empty
from labs.optimizer import make_optimizer
from labs.place import Place, use_threads
from labs.step import agree, train_step
from labs.wrapping import wrap
from labs.wrapping.mesh import is_hybrid, make_mesh, shard_size
from labs.wrapping.precision import DTYPES
from labs.wrapping.units import find_units

WARM_UP_STEPS, TIMED_STEPS = 2, 6
TINY_S = 1e-12  # so that what the catalogue takes to be free has its part of a piece
COMPUTE = (Op.FWD, Op.BWD, Op.RECOMPUTE)
WHOLE_MODEL = ("single", "ddp")
FREE = COPIES | {Op.H2D, Op.D2H}  # on CPU cores, where not timed: part of the piece that follows, or no copy at all
SIMULATED_AS = {"single": "ddp", "hsdp": "fsdp2", "mini": "fsdp2"}  # torch's program is the same, or there is none


Piece = tuple[Op, str]
"""Operation and unit."""


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


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What each piece of a step takes alone on CPU cores.

    Attributes:
        of_steps: for each step the seconds of each piece, shape (ranks,); of one that occurs several times, their sum.
        rest_s: seconds of a step between the optimizer's end and the next forward; the median.
        wall_s: how long it took to measure.
    """

    of_steps: tuple[dict[Piece, np.ndarray], ...]
    rest_s: float
    wall_s: float


def predict(
    config: TrainConfig, model_config: ModelConfig, place: Place, device: torch.device, pieces: Pieces | None = None
) -> Prediction:
    """Predict a run on one process; other ranks need not be there.

    Args:
        place: whose number of ranks is predicted for.
        device: of the run. On ``cuda`` all nodes are taken to be like this one.
        pieces: on CPU cores those that `measure_pieces` found; by default it is called, which takes about as long as
            10 steps. Nothing else should run meanwhile, the training least of all.

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


# ---- What the simulator is asked ------------------------------------------------------------------------------------


def plan_of(config: TrainConfig, place: Place) -> Plan:
    """The same settings in the simulator's words, which are torch's."""
    rows = config.global_batch // place.world_size
    micro_batch = config.micro_batch or rows
    api = SIMULATED_AS.get(config.api, config.api)
    names = find_units(empty(config.model_config), config.wrap).names
    settings: dict[str, Any] = {
        "api": api, "micro_batch": micro_batch, "grad_accum": rows // micro_batch, "seq_len": config.seq_len,
        "wrap": names or "root", "compile": config.compile, "requires_gradient_sync": config.requires_gradient_sync,
        "activation_checkpointing": None if config.activation_checkpointing == "none" else
        config.activation_checkpointing,
    }  # fmt: skip
    if config.api not in WHOLE_MODEL:
        mixed = config.param_dtype != "fp32"
        settings |= {
            "param_dtype": config.param_dtype if mixed else None,
            "reduce_dtype": config.reduce_dtype or ("fp32" if mixed else None),
            "cpu_offload": config.cpu_offload,
            "forward_prefetch": config.forward_prefetch,
            "backward_prefetch": "none" if config.backward_prefetch == "off" else config.backward_prefetch,
            "shard_size": shard_size(config, place) if is_hybrid(config) else None,
        }
    if api == "fsdp2":
        settings |= {"reshard_after_forward": config.reshard_after_forward, "is_last_backward": "last"}
    if api == "fsdp1":
        settings |= {"sharding_strategy": config.sharding_strategy, "limit_all_gathers": config.limit_all_gathers}
    return Plan(**settings)


def cluster_of(place: Place, device: torch.device) -> Cluster:
    """The machines: GPUs from the catalogue by their driver's name, or processes on CPU cores.

    Raises:
        ValueError: no such GPU in the catalogue.
    """
    if device.type == "cpu":
        return Cluster("cpu", gpus=place.world_size)
    name = torch.cuda.get_device_name(device)
    return Cluster(name, gpus=place.world_size, gpus_per_node=place.local_world_size)


def simulated(config: TrainConfig, model_config: ModelConfig, place: Place, device: torch.device) -> Simulation:
    """The simulation of a run, with the cost of each kernel as the catalogue has it."""
    plan = plan_of(config, place)
    return simulate(_workload(config, model_config, plan, device), cluster_of(place, device), plan)


def _workload(config: TrainConfig, model_config: ModelConfig, plan: Plan, device: torch.device) -> Workload:
    rows = torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.int64)
    kernels_of: Any = "cpu" if device.type == "cpu" else "gpu"
    autocast = config.api in WHOLE_MODEL and config.param_dtype != "fp32"
    with torch.autocast("cpu", DTYPES[config.param_dtype], enabled=autocast):  # where the traced tensors seem to be
        return model_from_module(
            empty(model_config), (rows, rows), plan=plan, name=config.model, device=kernels_of, progress=False
        )


def peak_memory_bytes(config: TrainConfig, simulation: Simulation) -> int:
    """The most bytes of tensors alive on a rank.

    DDP keeps its buckets of gradients from step to step. A single process has none: the most is alive at the end of
    the first forward, or when all gradients are there.
    """
    memory = simulation.memory
    if config.api != "single":
        return memory.peak_bytes
    before_gradients = memory.peak_of(set(Memory) - {Memory.UNSHARDED_GRAD})
    return max(before_gradients, int(memory.bytes[-1]))


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


# ---- What pieces take on CPU cores ----------------------------------------------------------------------------------


def measure_pieces(config: TrainConfig, model_config: ModelConfig, place: Place) -> Pieces:
    """Time the pieces of a step on this machine: as many ranks as here, the same rows each, random tokens.

    Sharded models are wrapped by the project's own FSDP, whose hooks say what takes how long. Training itself is not
    touched: the ranks are processes of their own.

    Raises:
        ValueError: a rank failed; says which and why.
    """
    from fsdp_sim.ranks import RanksError, run  # starts a server that imports torch, so not before it is needed

    local = dataclasses.replace(
        place, rank=0, local_rank=0, world_size=place.local_world_size, torchrun=True, restarts=0
    )
    rows = config.global_batch // place.world_size * place.local_world_size
    config = dataclasses.replace(config, global_batch=rows, init_from=None, nonfinite="skip")
    timed: Any = _time_whole if config.api in WHOLE_MODEL else _time_sharded
    buckets = _buckets(config, model_config, local) if config.api == "ddp" else []
    try:
        results = run(
            timed, local.world_size, config, model_config, local, buckets, serial=True, progress=False,
            show_output=False, timeout_s=600.0,
        )  # fmt: skip
    except RanksError as error:
        raise ValueError(f"the pieces of a step could not be timed: {error}") from error
    timeline = results.timeline.select(lambda event: event.op is not Op.ALL_REDUCE or event.unit != "")
    steps = timeline.steps[WARM_UP_STEPS:]
    walls_s = [max(of_ranks) for of_ranks in zip(*results, strict=True)][WARM_UP_STEPS:]
    rest_s = statistics.median(
        max(0.0, wall_s - step_time_s(timeline, step)) for wall_s, step in zip(walls_s, steps, strict=True)
    )
    return Pieces(tuple(_sums(timeline, step) for step in steps), rest_s, results.wall_s)


def _sums(timeline: Timeline, step: int) -> dict[Piece, np.ndarray]:
    """`piece_durations` has the mean of what occurs several times."""
    ranks = len(timeline.ranks)
    occurs = Counter((event.op, event.unit) for event in timeline.ops if event.step == step)
    return {piece: seconds * (occurs[piece] / ranks) for piece, seconds in piece_durations(timeline, step).items()}


def _buckets(config: TrainConfig, model_config: ModelConfig, place: Place) -> list[tuple[str, int]]:
    """DDP's buckets of gradients: name and bytes of each."""
    ops = simulated(config, model_config, place, torch.device("cpu")).program.ops
    return list(dict.fromkeys((i.unit, i.bytes) for i in ops if i.op is Op.ALL_REDUCE))


def _time_sharded(config: TrainConfig, model_config: ModelConfig, place: Place, buckets: Sequence[Any]) -> list[float]:
    """On a rank: train; the mini-FSDP records. Returns the seconds of each step."""
    place = dataclasses.replace(place, rank=dist.get_rank(), local_rank=dist.get_rank())
    use_threads(place)
    cpu = torch.device("cpu")
    mesh = make_mesh(config, place, cpu)
    plain = TrainConfig()
    fsdp1_only = ("sharding_strategy", "limit_all_gathers", "use_orig_params", "sync_module_states", "shard_size")
    changes: dict[str, Any] = {key: getattr(plain, key) for key in fsdp1_only}
    # Where nothing overlaps, prefetch changes only the order.
    changes |= {"api": "mini", "forward_prefetch": None, "backward_prefetch": None}
    wrapped = wrap(dataclasses.replace(config, **changes), model_config, place, cpu, mesh)
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = _batch(config, model_config, place)
    walls_s = []
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        start_s = time.perf_counter()
        train_step(wrapped, optimizer, batch, step, config, n_micro_batches=n_micro_batches)
        walls_s.append(time.perf_counter() - start_s)
    return walls_s


def _time_whole(
    config: TrainConfig, model_config: ModelConfig, place: Place, buckets: list[tuple[str, int]]
) -> list[float]:
    """On a rank: the steps of a model that no rank shares, then what DDP would reduce. Returns the seconds of each."""
    place = dataclasses.replace(place, rank=dist.get_rank(), local_rank=dist.get_rank())
    use_threads(place)
    alone = dataclasses.replace(place, rank=0, world_size=1)
    wrapped = wrap(dataclasses.replace(config, api="single"), model_config, alone, torch.device("cpu"))
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = _batch(config, model_config, place)
    gradients = [(name, torch.zeros(n_bytes // 4)) for name, n_bytes in buckets]
    walls_s = []
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        RECORDER.step = step
        start_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for x, y in zip(batch.x.chunk(n_micro_batches), batch.y.chunk(n_micro_batches), strict=True):
            with RECORDER.span(Op.FWD, ""), wrapped.micro_batch(is_last=True):
                loss = wrapped.model(x, y, reduction="sum") / batch.n_tokens
            with RECORDER.span(Op.BWD, ""):
                loss.backward()
            losses.append(loss.detach())
        with RECORDER.span(Op.OPTIM, ""):
            agree(torch.stack(losses).sum(), wrapped.clip_grad_norm(config.clip), 0)
            optimizer.step()
        walls_s.append(time.perf_counter() - start_s)
        for name, gradient in gradients:
            with RECORDER.label(name):
                dist.all_reduce(gradient)
    return walls_s


def _batch(config: TrainConfig, model_config: ModelConfig, place: Place) -> tuple[Batch, int]:
    rows = config.global_batch // place.world_size
    tokens = torch.randint(0, model_config.vocab_size, (rows, config.seq_len + 1))
    n_tokens = config.global_batch * config.seq_len
    return Batch(tokens[:, :-1], tokens[:, 1:], n_tokens, 0), rows // (config.micro_batch or rows)
