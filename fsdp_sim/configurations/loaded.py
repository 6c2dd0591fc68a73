"""How Hugging Face's trainers load a model: its dtype, a loss without logits, and what a pair is of preferences.

Sources: accelerate 1.15.0, `fsdp2_prepare_model` and `Accelerator.prepare_model` (what is trained becomes fp32, what is
frozen keeps its dtype); liger-kernel, `LigerFusedLinearCrossEntropyLoss`.
"""

from __future__ import annotations

from typing import Any

from fsdp_sim.configurations.keys import Keys

MOST_CHUNKS = 8


def dims_of(keys: Keys, plan: dict[str, Any], dtype: str) -> dict[str, str]:
    """The fields of `Model` for one that is loaded in ``dtype``, before ``plan`` trains it."""
    cast = plan.get("param_dtype")
    if dtype == "fp32":
        return {"dtype": dtype}
    if plan.pop("float32_matmul_precision", None):
        keys.remarks.append(f"{keys.file} loads the model in {dtype}, where TF32 changes nothing.")
    if plan.get("lora_rank"):
        keys.remarks.append(
            f"{keys.file} loads the frozen model in {dtype}, and trains fp32 adapters; here adapters are {dtype} too."
        )
        return {"dtype": dtype}
    if cast and plan["api"] != "ddp":  # there what is trained is fp32: Accelerate casts it, ZeRO has a copy
        return {"dtype": "fp32"}
    return {"dtype": dtype}


def of_preferences(
    keys: Keys, plan: dict[str, Any], pairs: bool = True, left_out: str = "what a reference model computes"
) -> None:
    """A batch of pairs, the preferred answer and the other, is computed as one of twice as many sequences.

    Sources: trl's `DataCollatorForPreference`, LLaMA-Factory's `PairwiseDataCollatorWithPadding`, torchtune's
    `padded_collate_dpo`.
    """
    of_two = ""
    if pairs:
        of_two = " on pairs, of which each is two sequences"
        if type(plan.get("micro_batch")) is int:
            plan["micro_batch"] *= 2
    keys.remarks.append(f"{keys.file} trains on preferences{of_two}: {left_out} is not simulated.")


def chunked_loss(keys: Keys, named: str, seq_len: int) -> dict[str, int]:
    """The field of `Plan` of a head and a loss whose logits are never whole."""
    chunks = next(n for n in range(min(MOST_CHUNKS, seq_len), 0, -1) if seq_len % n == 0)
    keys.remarks.append(
        f"{named} of {keys.file} never has all logits: taken to be loss_chunks={chunks}; its own chunks follow from "
        f"the vocabulary, and its kernels are not timed."
    )
    return {"loss_chunks": chunks}
