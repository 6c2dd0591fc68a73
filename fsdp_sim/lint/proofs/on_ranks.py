"""Proofs of the traps in what every rank must do. What would hang is given a second."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method

from fsdp_sim.lint.proofs._toy import (
    Collectives,
    Shown,
    Toy,
    fsdp2,
    fully_shard,
    hangs_on_rank_0,
    impatient,
    is_timeout,
    own_tokens,
    raised,
)


def collective_on_one_rank() -> Shown:
    with impatient() as mesh:
        trap = hangs_on_rank_0(lambda: dist.all_reduce(torch.ones(1), group=mesh.get_group()))
    fix = raised(dist.barrier)
    return Shown(is_timeout(trap) and not fix, trap, fix or "all come")


def forward_on_one_rank() -> Shown:
    with impatient() as mesh:
        model = fully_shard(Toy(), mesh=mesh)
        fix = raised(lambda: model(own_tokens()))
        model.reshard()
        trap = hangs_on_rank_0(lambda: model(own_tokens()))
    return Shown(is_timeout(trap) and not fix, trap, fix or "all come")


def state_dict_on_one_rank() -> Shown:
    """How many collectives a full state dict issues, each of which needs every rank."""
    model = fsdp2(Toy())

    def count(full: bool) -> int:
        with Collectives() as collectives:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=full))
        return len(collectives.seen)

    trap, fix = count(True), count(False)
    return Shown(trap > 0 and fix == 0, f"a full state dict needs all ranks {trap} times", f"a sharded one {fix} times")


def step_skipped_on_one_rank() -> Shown:
    with impatient() as mesh:
        model = fully_shard(Toy(), mesh=mesh)
        loss = model(own_tokens()).mean() * (float("nan") if dist.get_rank() == 1 else 1.0)
        trap = hangs_on_rank_0(loss.backward)  # rank 1 has a NaN, and has left
    bad = loss.isnan().float()
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return Shown(is_timeout(trap) and bool(bad), trap, "all know of the NaN")


def sharded_save_on_one_rank() -> Shown:
    model, file = fsdp2(Toy()), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    held = sum(t.to_local().numel() for t in torch.load(file, weights_only=True).values())
    whole = sum(t.numel() for t in Toy().state_dict().values())
    return Shown(held <= 0.6 * whole, f"the file has {held} of {whole} elements", f"{whole}")


def forward_called_directly() -> Shown:
    model = fsdp2(Toy())
    trap = raised(lambda: model.forward(own_tokens()))
    fix = raised(lambda: model(own_tokens()))
    return Shown(bool(trap) and not fix, trap, fix or "runs")


def generate_without_hooks() -> Shown:
    model = fsdp2(Toy())
    trap = raised(lambda: model.generate(own_tokens()))
    register_fsdp_forward_method(model, "generate")
    fix = raised(lambda: model.generate(own_tokens()))
    return Shown(bool(trap) and not fix, trap, fix or "runs")


def inference_mode() -> Shown:
    def trains(mode: type) -> str:
        model = fsdp2(Toy())
        with mode():
            model(own_tokens())
        return raised(lambda: model(own_tokens()).sum().backward())

    trap, fix = trains(torch.inference_mode), trains(torch.no_grad)
    return Shown("nference" in trap and not fix, trap, fix or "trains")
