"""A step whose compute is sleep: real ranks, the mini-FSDP and its collectives, and no noise worth the name.

Blocks that compute compete for the cores of this machine with each other and with whatever else runs on it. Blocks that
sleep do not: forward and backward take as long as they are told, the modelled network does too, and what a step takes
can be said beforehand to the millisecond. What prefetch hides is then in the picture and not in the noise.

    step = SleepTimes()
    step.predict(forward_prefetch=1)    # by arithmetic: nothing has run
    step.run(forward_prefetch=1)        # on ranks
"""

from __future__ import annotations

import dataclasses
import time
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fsdp_sim.engine import replay
from fsdp_sim.measure import units_from_module
from fsdp_sim.mini import fully_shard
from fsdp_sim.ranks import Network, run, track
from fsdp_sim.schedule import Instruction, Unit
from fsdp_sim.schedule import build as build_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES, Op, Timeline
from labs.experiments.prefetch import prefetch_forward

WIDTH = 512
"""Of the square weight that each block shards, gathers and reduces."""


@dataclasses.dataclass(frozen=True)
class SleepTimes:
    """What is trained, and how long its pieces take."""

    world_size: int = 4
    blocks: int = 4
    forward_s: float = 0.060
    backward_s: float = 0.100
    collective_s: float = 0.050

    @property
    def network(self) -> Network:
        """On which a block's all-gather, and its reduce-scatter, takes ``collective_s``; all of that is latency."""
        return Network(bandwidth_gbps=1e6, latency_us=self.collective_s * 1e6)

    @cached_property
    def units(self) -> list[Unit]:
        """The blocks, and a root that has nothing of its own."""
        with torch.device("meta"):
            root, *blocks = units_from_module(Blocks(self))
        return [dataclasses.replace(root, segments=(...,)), *blocks]

    @property
    def hideable_s(self) -> float:
        """What prefetch gains: each block's all-gather but the first hides behind the forward before it."""
        return (self.blocks - 1) * min(self.forward_s, self.collective_s)

    def predict(self, *, forward_prefetch: int | None = None) -> Timeline:
        """The step that the program of these blocks takes, by arithmetic alone."""
        program = build_program(self.units, Plan(forward_prefetch=forward_prefetch), self.world_size)
        return replay(program, self._seconds, device="cpu", ranks=self.world_size)

    def _seconds(self, instruction: Instruction) -> float:
        if instruction.op in COLLECTIVES:
            return self.collective_s
        of_a_block = instruction.unit.startswith("layers")
        return {Op.FWD: self.forward_s, Op.BWD: self.backward_s}.get(instruction.op, 0.0) if of_a_block else 0.0

    def run(self, steps: int = 4, *, forward_prefetch: int | None = None, **how: Any) -> Timeline:
        """Train on the ranks; ``how`` goes to `fsdp_sim.ranks.run`."""
        title = f"blocks that sleep, prefetch {forward_prefetch or 'off'}"
        options: dict[str, Any] = {"network": self.network, "threads": 1, "title": title} | how
        return run(train, self.world_size, self, steps, forward_prefetch, **options).timeline


class _Sleep(torch.autograd.Function):
    """Passes on what it is given, and takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Block(nn.Module):
    """One product, and a sleep."""

    def __init__(self, lengths: SleepTimes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1 / WIDTH))
        self.lengths = lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x @ self.weight, self.lengths.forward_s, self.lengths.backward_s)


class Blocks(nn.Module):
    """Blocks, one after the other; nothing is left for the root."""

    def __init__(self, lengths: SleepTimes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(lengths) for _ in range(lengths.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(lengths: SleepTimes, steps: int, forward_prefetch: int | None) -> None:
    """What a rank runs."""
    model = Blocks(lengths)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if forward_prefetch:
        prefetch_forward(model.layers, depth=forward_prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in track(range(steps)):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
