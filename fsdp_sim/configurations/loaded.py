"""How Hugging Face's trainers load a model: its dtype, LoRA's adapters, a loss without logits.

Sources: accelerate 1.15.0, `fsdp2_prepare_model` and `Accelerator.prepare_model` (what is trained becomes fp32, what is
frozen keeps its dtype); peft 0.18, `LoraConfig`; liger-kernel, `LigerFusedLinearCrossEntropyLoss`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdp_sim.configurations.keys import Keys

ALL_LINEAR = ("all", "all-linear", "all_linear")
PLAIN = re.compile(r"[\w.-]+")
MOST_CHUNKS = 8


def lora_plan(keys: Keys, rank: int, targets: Sequence[str] | None, dotted: str) -> dict[str, Any]:
    """The fields of `Plan` of adapters.

    Args:
        targets: names of linear layers; None leaves them to peft.
        dotted: the key that says them.

    Raises:
        ValueError: they are a pattern.
    """
    if targets is None:
        keys.remarks.append(f"{keys.file} leaves the targets of LoRA to peft; taken to be all linear layers.")
    elif strange := [name for name in targets if not PLAIN.fullmatch(name)]:
        raise keys.wrong(dotted, strange[0], "names of linear layers, such as q_proj, or all-linear", "no pattern")
    everything = targets is None or any(name in ALL_LINEAR for name in targets)
    return {"lora_rank": rank, "lora_targets": "all-linear" if everything else tuple(targets or ())}


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


def chunked_loss(keys: Keys, named: str, seq_len: int) -> dict[str, int]:
    """The field of `Plan` of a head and a loss whose logits are never whole."""
    chunks = next(n for n in range(min(MOST_CHUNKS, seq_len), 0, -1) if seq_len % n == 0)
    keys.remarks.append(
        f"{named} of {keys.file} never has all logits: taken to be loss_chunks={chunks}; its own chunks follow from "
        f"the vocabulary, and its kernels are not timed."
    )
    return {"loss_chunks": chunks}
