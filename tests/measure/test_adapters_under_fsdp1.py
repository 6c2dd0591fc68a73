"""Adapters under FSDP1: peak memory is that of torch's own units, one for each trained matrix inside its block's."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from fsdp_sim.cost.transformer import workload
from fsdp_sim.engine.memory import memory
from fsdp_sim.measure.live_bytes import live_bytes
from fsdp_sim.schedule import build
from fsdp_sim.spec import Plan
from labs.model.gpt import Block
from tests.measure.adapters import with_adapters
from tests.measure.mem_tracker import fake_ranks, gpt_of, with_layers

MODEL = with_layers("gpt2-124m", 4, d_model=512, n_head=8, d_ffn=2048, vocab=512, max_seq_len=64)


def is_a_unit(module: nn.Module) -> bool:
    """peft's `fsdp_auto_wrap_policy`."""
    weight = getattr(module, "weight", None)
    leaf = not list(module.children())
    return isinstance(module, Block) or (leaf and weight is not None and bool(weight.requires_grad))


def torch_says(plan: Plan) -> int:
    with fake_ranks(2):
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_a_unit)
        model = FullyShardedDataParallel(
            with_adapters(gpt_of(MODEL), plan.lora_rank or 0), auto_wrap_policy=policy, device_id=torch.device("cpu")
        )
        if plan.activation_checkpointing:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.long)

        def step() -> None:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with live_bytes(model, optimizer) as meter:
            step()
    return meter.peak_bytes


@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_frozen_weights_have_no_gradients_and_one_block_is_gathered_ahead(checkpointing: str | None) -> None:
    plan = Plan(api="fsdp1", lora_rank=8, seq_len=64, activation_checkpointing=checkpointing)
    work = workload(MODEL, plan)

    ours = memory(build(work.units, plan, 2), work).peak_bytes

    assert ours == pytest.approx(torch_says(plan), rel=0.04)
