"""What logits cost a loop: the loss of transformers before 5, and outputs that the loop holds, in real torch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_sim.cost.activations import head_activations
from fsdp_sim.measure.live_bytes import live_bytes
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan
from tests.measure.mem_tracker import with_layers

MODEL = with_layers("gpt2-124m", 2, d_model=64, n_head=4, vocab=4096, norm="layernorm")
LORA: dict[str, Any] = {"lora_rank": 8, "param_dtype": "bf16", "seq_len": 64}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`ForCausalLMLoss` of transformers 4.48 (loss/loss_utils.py)."""
    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, logits.shape[-1]), shift_labels.view(-1))


def peak_of(micro_batch: int, *, backward: bool, hold: bool) -> int:
    """Of a norm and a head that are frozen, beyond what was there."""
    x = torch.zeros(micro_batch, 64, MODEL.d_model, dtype=torch.bfloat16, requires_grad=True)
    weight, table = x.new_ones(MODEL.d_model), x.new_zeros(MODEL.vocab, MODEL.d_model)
    labels = torch.zeros(micro_batch, 64, dtype=torch.long)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.layer_norm(x, weight.shape, weight, weight)
        logits = F.linear(hidden, table)
        return loss_of(logits, labels), logits

    with live_bytes(x, weight, table, labels) as meter:
        loss, outputs = forward()
        outputs = outputs.float() if hold else None
        if backward:
            loss.backward()
        del outputs
    return meter.peak_bytes - sum(t.nbytes for t in (x, weight, table, labels))


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_loss_copies_the_logits_of_several_sequences(micro_batch: int) -> None:
    plan = Plan(cross_entropy="shifted", micro_batch=micro_batch, **LORA)
    ours = head_activations(MODEL, plan)

    assert ours.saved_bytes + ours.forward_temporary_bytes == pytest.approx(
        peak_of(micro_batch, backward=False, hold=False), rel=0.02
    )


def test_outputs_that_are_held_are_there_in_backward() -> None:
    plan = functools.partial(Plan, stack="hf-trainer-2024", micro_batch=2, activation_checkpointing="full", **LORA)
    alone, held = (simulate(MODEL, Cluster("A100", gpus=1), plan(api="ddp", held_logits=of)) for of in (None, "fp32"))
    in_torch = peak_of(2, backward=True, hold=True) - peak_of(2, backward=True, hold=False)

    assert held.peak_memory_bytes - alone.peak_memory_bytes == pytest.approx(in_torch, rel=0.06)
    assert held.memory.bytes[-1] == alone.memory.bytes[-1]
