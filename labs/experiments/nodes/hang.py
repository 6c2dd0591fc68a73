"""A rank that never comes: the others wait for it in a collective, and each rank's flight recorder knows its part.

torch's own FSDP trains on four ranks. One of them does something else before the forward of one unit, as a rank does
that waits for a file, a debugger or a lock. The others hang in the all-gather of that unit. Nobody prints anything; two
look on: the recorder's dumps, which is what one has on a cluster, and the watchdog of `fsdp_sim.ranks`.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.ranks import RanksError, run
from labs.cluster.flight_recorder import Dump, Mismatch, diagnose, read, recorded
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.nodes.traffic import program_of
from labs.loop.minimal import make_optimizer, shard, train_step
from labs.model import build
from labs.model.gpt import GPT

BUFFER = "TORCH_FR_BUFFER_SIZE"
_IDLE_S = 1.0


@dataclass(frozen=True)
class Hang:
    """What was found out about a hang.

    Attributes:
        dumps: what each rank's recorder held.
        findings: what they say together, the cause first.
        watchdog: what the watchdog of `fsdp_sim.ranks` said when it stopped the ranks.
        why: of that, what a dump cannot know: what the missing rank was doing instead.
    """

    dumps: dict[int, Dump]
    findings: list[Mismatch]
    watchdog: str
    why: str


def hang(rank: int = 1, unit: str = "layers.3", step: int = 1, ranks: int = 4) -> Hang:
    """Train until ``rank`` stops before ``unit`` in the forward of ``step``, and find out from the dumps who and where.

    Raises:
        RuntimeError: the dumps cannot be had from this torch, or nothing hung.
    """
    before = os.environ.get(BUFFER)
    os.environ[BUFFER] = "2000"  # the default of torch 2.13; ranks read it when their first group is made
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(_train, ranks, Path(folder), rank, unit, step, timeout_s=6 * _IDLE_S, progress=False, record=False)
            raise RuntimeError(f"rank {rank} was to stop before {unit}, and all steps were done")
        except RanksError as error:
            message, why = str(error), error.verdict.why
        finally:
            if before is None:
                del os.environ[BUFFER]
            else:
                os.environ[BUFFER] = before
        try:
            dumps = read(Path(folder))
        except ValueError:
            raise RuntimeError(f"no rank wrote a dump before it ended: {message}") from None
    program = program_of(TrainConfig(api="fsdp2"), RankPlace(world_size=ranks, local_world_size=ranks))
    return Hang(dumps, diagnose(dumps, program), message, why)


def _train(folder: Path, stops: int, unit: str, at_step: int) -> None:
    torch.manual_seed(0)
    config = TrainConfig().model_config
    model = build(config)
    assert isinstance(model, GPT)
    shard(model, fully_shard)
    optimizer = make_optimizer(model)
    x = torch.randint(config.vocab_size, (1, 32))
    with recorded(folder, dist.get_rank(), idle_s=_IDLE_S):
        for step in range(at_step + 1):
            if (dist.get_rank(), step) == (stops, at_step):
                # First of all hooks: fully_shard's own issues the all-gather.
                model.get_submodule(unit).register_forward_pre_hook(_wait_for_ever, prepend=True)
            train_step(model, optimizer, x, x)


def _wait_for_ever(*_: Any) -> None:
    while True:
        time.sleep(60)
