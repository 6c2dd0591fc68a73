"""Activations and logits, which the batch of a rank decides and FSDP does not shard."""

from __future__ import annotations

import functools
import itertools
import random

from fsdp_sim.learn.drill.draws import NAMES, a_model, balanced, billions
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.memory.common import LLAMAS, STATES
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.spec import Model, block_shapes


@template(
    level=1,
    seconds=60,
    section="07.5",
    rule="Logits: batch x tokens x vocabulary x bytes, for every copy; no sharding of parameters makes them smaller.",
)
def logits(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "llama2-7b", "llama3-8b", "llama3-70b")
    batch, ranks, dtype = draw.choice((1, 2, 4)), draw.choice((8, 64)), draw.choice(("bf16", "fp32"))
    tokens = 1024 if model.max_seq_len else draw.choice((2048, 4096, 8192))
    size = DTYPE_BYTES[dtype]
    answer = batch * tokens * model.vocab * size
    return Number(
        text=f"{name} has a vocabulary of {model.vocab:,} and width {model.d_model:,}. With FSDP on {ranks} GPUs each "
        f"one trains on {batch} sequence{'s' * (batch > 1)} of {tokens:,} tokens. How large is one copy of the logits "
        f"in {dtype} on a GPU?",
        answer=answer,
        unit="bytes",
        given={"batch": batch, "tokens": tokens, "vocab": model.vocab, "dtype": dtype},
        mistakes=(
            Mistake(answer / ranks, "FSDP does not shard activations, and logits are one"),
            Mistake(answer * (6 - size) / size, f"that is not {dtype}"),
            Mistake(
                batch * tokens * model.d_model * size,
                "that is what enters the head: the width is replaced by the vocabulary",
            ),
            Mistake(answer * ranks, "each GPU has the logits of its own rows alone"),
        ),
        why=f"{batch} x {tokens:,} x {model.vocab:,} x {size} B.",
    )


@template(
    level=3,
    seconds=120,
    section="07.4",
    rule="Activations of a GPT layer in 16 bits: s b h (34 + 5 a s/h) bytes; fused attention drops the second term.",
    source="Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1",
)
def activations_of_a_layer(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "gpt3-175b")
    batch, fused = draw.choice((1, 2, 4, 8)), draw.choice((True, False))
    s, h, a = draw.choice((512, 1024, 2048)), model.d_model, model.n_head
    linear, square = 34 * s * batch * h, 5 * a * s * s * batch
    kernel = (
        "Fused attention stores nothing of size tokens x tokens." if fused else "Attention is not fused: it stores "
    )
    kernel += "" if fused else "softmax, its dropout's mask and the dropped-out scores."
    return Number(
        text=f"A layer of {name} (width {h:,}, {a} heads) is trained in bf16 with dropout on {batch} x {s:,} tokens a "
        f"GPU, without checkpointing or tensor parallelism. {kernel} How many bytes does it keep for backward, by the "
        "count of Korthikanti et al.?",
        answer=linear + (0 if fused else square),
        unit="bytes",
        rel=0.05,
        given={"batch": batch, "tokens": s, "width": h, "heads": a, "fused": fused},
        mistakes=(
            Mistake(
                linear + square if fused else linear, "fused attention keeps no scores: without it 5 a s^2 b bytes"
            ),
            Mistake(2 * s * batch * h, "that is the input alone, which is what full checkpointing keeps"),
            Mistake(12 * h * h * 2, "those are the parameters in bf16"),
        ),
        why=f"s b h = {s * batch * h / 1e6:.3g} million; x 34 = {written(linear, 'bytes')}"
        + ("." if fused else f"; 5 a s^2 b = {written(square, 'bytes')}."),
    )


@template(
    level=1,
    seconds=60,
    section="07.4",
    rule="Full activation checkpointing keeps each block's input, 2 b s d bytes in bf16, and computes the rest again.",
)
def checkpointed_activations(draw: random.Random) -> Number:
    name, model = a_model(draw, *LLAMAS)
    batch, s, ranks = draw.choice((1, 2, 4)), draw.choice((4096, 8192, 16384)), draw.choice((8, 64, 512))
    one = 2 * batch * s * model.d_model
    return Number(
        text=f"{name}, {model.n_layer} blocks of width {model.d_model:,}, is trained in bf16 by FSDP on {ranks} GPUs, "
        f"{batch} sequence{'s' * (batch > 1)} of {s:,} tokens on each, each block checkpointed in full. How many bytes "
        "do the blocks keep for backward on each GPU, before recomputation begins?",
        answer=model.n_layer * one,
        unit="bytes",
        given={"model": name, "batch": batch, "tokens": s},
        mistakes=(
            Mistake(model.n_layer * one / ranks, "activations belong to a GPU's own rows: FSDP does not shard them"),
            Mistake(one, "that is one block; every block keeps its input"),
            Mistake(2 * model.n_layer * one, "bf16 has 2 bytes"),
            Mistake(17 * model.n_layer * one, "that is the count for a GPT block that is not checkpointed"),
        ),
        why=f"{model.n_layer} inputs of {batch} x {s:,} x {model.d_model:,} x 2 B = {written(one, 'bytes')} each.",
    )


PARTS = {
    "model states: fp32 parameters, gradients and Adam's moments": "16 B x parameters / GPUs",
    "the inputs of all checkpointed blocks, in bf16": "blocks x tokens x width x 2 B",
    "one copy of the logits in fp32": "tokens x vocabulary x 4 B",
    "three gathered blocks in bf16": "3 x a block's parameters x 2 B",
}


def _parts(key: str, ranks: int, batch: int, tokens: int, offloaded: bool) -> dict[str, float]:
    model = Model.preset(key)
    block = sum(rows * columns for _, rows, columns in block_shapes(model))
    states = 0 if offloaded else STATES * model.param_count / ranks
    rows = batch * tokens
    sizes = (states, 2 * model.n_layer * rows * model.d_model, 4 * rows * model.vocab, 6 * block)
    return dict(zip(PARTS, sizes, strict=True))


@functools.cache
def _settings() -> dict[str, list[tuple[str, int, int, int, bool]]]:
    """For each part: the settings in which it is the largest by a quarter."""
    found: dict[str, list[tuple[str, int, int, int, bool]]] = {part: [] for part in PARTS}
    grid = ((8, 32, 128), (1, 2, 4), (1024, 4096, 8192), (False, True))
    for setting in itertools.product(LLAMAS[:4], *grid):
        sizes = _parts(*setting)
        second, first = sorted(sizes.values())[-2:]
        if first > 1.25 * second:
            found[max(sizes, key=lambda part: sizes[part])].append(setting)
    return found


@template(
    level=3,
    seconds=180,
    section="01.5",
    rule="Look for what the peak is made of: 16 Ψ/N, 2 L b s d checkpoints, 4 b s V logits, 3 to 4 whole units.",
)
def largest_part(draw: random.Random) -> Choice:
    key, ranks, batch, tokens, offloaded = balanced(draw, _settings())
    sizes, model = _parts(key, ranks, batch, tokens, offloaded), Model.preset(key)
    right = max(sizes, key=lambda part: sizes[part])
    block = sum(rows * columns for _, rows, columns in block_shapes(model))
    return Choice(
        text=f"{NAMES[key]}: {billions(model.param_count)} parameters, {model.n_layer} blocks of {block / 1e6:.3g} "
        f"million, width {model.d_model:,}, vocabulary {model.vocab:,}. FSDP on {ranks} GPUs, Adam, {batch} x "
        f"{tokens:,} tokens on each, blocks checkpointed in full, shards "
        f"{'offloaded to the CPU' if offloaded else 'on the GPU'}. Which of these takes most memory of a GPU?",
        options=tuple(PARTS),
        wrong={
            part: "offloaded, they are in the CPU's memory"
            if not sizes[part]
            else f"{PARTS[part]} is {written(sizes[part], 'bytes')}"
            for part in PARTS
            if part != right
        },
        given={"model": NAMES[key], "ranks": ranks, "batch": batch, "tokens": tokens, "offloaded": offloaded},
        why=f"{PARTS[right]} is {written(sizes[right], 'bytes')}; the next is "
        f"{written(sorted(sizes.values())[-2], 'bytes')}.",
    )
