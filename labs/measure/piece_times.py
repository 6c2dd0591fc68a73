"""What each piece of a step takes alone on CPU cores: a block's forward, an all-gather, the optimizer.

They are timed by as many ranks as there will be, in a run of a few steps in which nothing overlaps.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_sim.measure.heap import keep_freed_memory
from fsdp_sim.ranks import RanksError, run
from fsdp_sim.timeline import RECORDER, Op, Timeline
from fsdp_sim.timeline.analysis import piece_durations, step_time_s
from labs.cluster.process_group import RankPlace, use_threads
from labs.config import TrainConfig
from labs.data.random_batch import random_batch
from labs.loop.optimizer import make_optimizer
from labs.loop.step import Agreement, train_step
from labs.measure.simulated import WHOLE_MODEL, simulated
from labs.model import ModelConfig
from labs.wrapping import wrap
from labs.wrapping.mesh import make_mesh

WARM_UP_STEPS, TIMED_STEPS = 3, 9

Piece = tuple[Op, str]
"""Operation and unit."""


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


def measure_pieces(config: TrainConfig, model_config: ModelConfig, place: RankPlace) -> Pieces:
    """Time the pieces of a step on this machine: as many ranks as here, the same rows each, random tokens.

    Sharded models are wrapped by the project's own FSDP, whose hooks say what takes how long. Training itself is not
    touched: the ranks are processes of their own.

    Raises:
        ValueError: a rank failed; says which and why.
    """
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


def _buckets(config: TrainConfig, model_config: ModelConfig, place: RankPlace) -> list[tuple[str, int]]:
    """DDP's buckets of gradients: name and bytes of each."""
    ops = simulated(config, model_config, place, torch.device("cpu")).program.ops
    return list(dict.fromkeys((i.unit, i.bytes) for i in ops if i.op is Op.ALL_REDUCE))


def _time_sharded(
    config: TrainConfig, model_config: ModelConfig, place: RankPlace, buckets: Sequence[Any]
) -> list[float]:
    """On a rank: train; the mini-FSDP records. Returns the seconds of each step."""
    place = dataclasses.replace(place, rank=dist.get_rank(), local_rank=dist.get_rank())
    use_threads(place)
    keep_freed_memory()
    cpu = torch.device("cpu")
    mesh = make_mesh(config, place, cpu)
    plain = TrainConfig().by_key()
    fsdp1_only = ("sharding_strategy", "limit_all_gathers", "use_orig_params", "sync_module_states", "shard_size")
    changes: dict[str, Any] = {key: plain[key] for key in fsdp1_only}
    # Where nothing overlaps, prefetch changes only the order.
    changes |= {"api": "mini", "forward_prefetch": None, "backward_prefetch": None}
    wrapped = wrap(dataclasses.replace(config, **changes), model_config, place, cpu, mesh)
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = random_batch(config, model_config, place)
    walls_s = []
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        start_s = time.perf_counter()
        train_step(wrapped, optimizer, batch, step, config, n_micro_batches=n_micro_batches)
        walls_s.append(time.perf_counter() - start_s)
    return walls_s


def _time_whole(
    config: TrainConfig, model_config: ModelConfig, place: RankPlace, buckets: list[tuple[str, int]]
) -> list[float]:
    """On a rank: the steps of a model that no rank shares, then what DDP would reduce. Returns the seconds of each."""
    place = dataclasses.replace(place, rank=dist.get_rank(), local_rank=dist.get_rank())
    use_threads(place)
    keep_freed_memory()
    alone = dataclasses.replace(place, rank=0, world_size=1)
    wrapped = wrap(dataclasses.replace(config, api="single"), model_config, alone, torch.device("cpu"))
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = random_batch(config, model_config, place)
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
            Agreement(torch.stack(losses).sum(), wrapped.clip_grad_norm(config.clip), stop=0).read()
            optimizer.step()
        walls_s.append(time.perf_counter() - start_s)
        for name, gradient in gradients:
            with RECORDER.label(name):
                dist.all_reduce(gradient)
    return walls_s
