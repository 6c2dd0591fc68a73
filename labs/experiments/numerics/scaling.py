"""Gradients too small for fp16, and the scaler that lifts them."""

from __future__ import annotations

import torch

from labs.experiments.numerics.small_training import MODEL, rows_of
from labs.experiments.result import ResultRow
from labs.model import build
from labs.model.gpt import loss_of

FP16_SMALLEST = 2.0**-24
"""What is at most half of it becomes 0."""
SCALE = 2.0**16
"""With which `torch.amp.GradScaler` begins."""


def predict_vanished(n_tokens: int, scale: float = 1.0) -> float:
    """The share of the logits' gradients that are 0 in fp16, before anything has been learnt.

    The loss is a mean over the tokens of all ranks. Of each, the gradient of a wrong logit is then 1 / (vocabulary
    x tokens), that of the right one about 1 / tokens.
    """
    vocabulary = MODEL.vocab_size
    wrong, right = (scale / (n_tokens * n) <= FP16_SMALLEST / 2 for n in (vocabulary, 1))
    return (wrong * (vocabulary - 1) + right) / vocabulary


def vanished(n_tokens: int, scale: float = 1.0) -> float:
    """The same, by backward through logits in fp16 on this rank's rows of a batch of ``n_tokens``."""
    x, y = rows_of(4)
    with torch.no_grad():
        logits = build(MODEL)(x)
    logits = logits.half().requires_grad_()
    (loss_of(logits, y, "sum") * (scale / n_tokens)).backward()
    assert logits.grad is not None
    return float((logits.grad == 0).float().mean())


def fp16(n_tokens: int = 2**19) -> list[ResultRow]:
    """Without a scaler and with one. (The trainer has fp16 on GPUs only: CPUs compute it slowly, if at all.)"""
    return [
        ResultRow(f"fp16, {name}", "gradients lost", predict_vanished(n_tokens, s), vanished(n_tokens, s), "of 1")
        for name, s in (("no scaler", 1.0), (f"scaled by {SCALE:,.0f}", SCALE))
    ]
