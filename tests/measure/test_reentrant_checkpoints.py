"""Reentrant checkpoints of units that FSDP1 does not train: what stays of each until backward is over, in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_sim.cost.transformer import workload
from fsdp_sim.engine.memory import MemoryProfile, memory
from fsdp_sim.measure.live_bytes import CPUMeter
from fsdp_sim.schedule import build
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Op
from tests.measure.adapters import Adapted
from tests.measure.mem_tracker import fake_ranks, with_layers

LAYERS, WIDTH, ROWS = 6, 64, 1000
MODEL = with_layers("llama2-7b", LAYERS, d_model=64, n_head=4, d_ffn=96, vocab=128)
LORA: dict[str, Any] = {
    "api": "fsdp1", "activation_checkpointing": "full", "lora_rank": 4, "seq_len": 256, "micro_batch": 4,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.linear = Adapted(base, base.weight.shape, rank=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Chain(nn.Module):
    """Blocks, each checkpointed; writes down what is alive when each is computed again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = nn.ModuleList(Block() for _ in range(LAYERS)), use_reentrant
        self.meter: CPUMeter | None = None
        self.alive: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.computed, layer, x, use_reentrant=self.use_reentrant)
        return x

    def computed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.meter:
            self.alive.append(self.meter.live_bytes)
        return layer(x)


def in_torch(use_reentrant: bool) -> list[int]:
    """Bytes alive, in tensors as large as the stream, when each block is computed again, and after backward."""
    with fake_ranks(2):
        chain = Chain(use_reentrant)
        policy = CustomPolicy(lambda m: isinstance(m, Block) or (isinstance(m, nn.Linear) and m.weight.requires_grad))
        model = FullyShardedDataParallel(chain, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        for _ in range(2):  # the second step, in which nothing is new
            x = torch.zeros(ROWS, WIDTH, requires_grad=True)
            loss = model(x).sum()
            with CPUMeter([model]) as meter:
                chain.meter, chain.alive = meter, []
                loss.backward()
                chain.alive.append(meter.live_bytes)
                chain.meter = None
    return chain.alive


def in_simulation(use_reentrant: bool) -> MemoryProfile:
    plan = Plan(use_reentrant=use_reentrant, **LORA)
    work = workload(MODEL, plan)
    return memory(build(work.units, plan, 2), work)


def when_computed_again(profile: MemoryProfile) -> list[int]:
    """Bytes alive before each block is computed again, and at the end."""
    program, found, last = profile.program, [], 0
    numbers = {n for n, i in enumerate(program.instructions) if i.kind == "op" and i.op is Op.RECOMPUTE}
    for number, now in zip(profile.at, profile.bytes, strict=True):
        if number in numbers:
            numbers.discard(number)
            found.append(last)
        last = now
    return [*found, last]


def test_inputs_of_frozen_blocks_and_their_gradients_stay_as_in_torch() -> None:
    more_in_torch = [a - b for a, b in zip(in_torch(True), in_torch(False), strict=True)]
    without, with_them = (when_computed_again(in_simulation(of)) for of in (False, True))  # whose programs are one
    ours = zip(with_them, without, strict=True)
    stream = 4 * ROWS * WIDTH
    stream_of_ours = workload(MODEL, Plan(**LORA)).work["layers.0"].output_bytes

    inputs = [round(n / stream) for n in more_in_torch]

    assert inputs == [0, 1, 3, 5, 7, 9, 0], "of all blocks but the first to run the input, and its gradient"
    assert [(a - b) / stream_of_ours for a, b in ours] == inputs


def test_the_allocator_sees_them_too() -> None:
    cluster = Cluster("A100", gpus=2)
    with_them, without = (simulate(MODEL, cluster, Plan(use_reentrant=of, **LORA)) for of in (True, False))

    assert with_them.memory.reserved_bytes >= with_them.peak_memory_bytes
    assert with_them.program.instructions == without.program.instructions
    assert with_them.peak_memory_bytes > without.peak_memory_bytes


def test_nothing_stays_of_what_is_trained() -> None:
    plan = {**LORA, "lora_rank": None}
    sims = [simulate(MODEL, Cluster("A100", gpus=2), Plan(use_reentrant=of, **plan)) for of in (True, False)]

    assert sims[0].peak_memory_bytes == sims[1].peak_memory_bytes
    assert "nothing that is computed again is frozen" in sims[0].without_effect["use_reentrant"]


@pytest.mark.parametrize(("given", "says"), [
    ({"api": "fsdp2"}, "use_reentrant"), ({"activation_checkpointing": None}, "activation_checkpointing"),
])  # fmt: skip
def test_it_is_refused_where_it_means_nothing(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(use_reentrant=True, **LORA | given)


def test_a_run_in_micro_batches_ends_as_it_began() -> None:
    plan = Plan(use_reentrant=True, grad_accum=3, requires_gradient_sync="last", **LORA)
    work = workload(MODEL, plan)
    found = memory(build(work.units, plan, 2, 2), work)

    assert found.bytes[-1] <= found.state_bytes
