"""Memory: states, shards, units that come whole, activations, and what fits."""

from __future__ import annotations

import functools
import itertools
import math
import random

from fsdp_sim.engine import memory, model_state_bytes
from fsdp_sim.learn.drill.draws import GPUS, NAMES, a_gpu, a_model, balanced, billions
from fsdp_sim.learn.drill.question import Choice, Number, Order, Slip
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import DTYPE_BYTES, Param, Unit, build
from fsdp_sim.spec import Model, Plan, block_shapes, gpu, root_shapes
from fsdp_sim.timeline import Memory, Phase

STATES = 16
"""Bytes per parameter with Adam: a sum, not a constant: 2 + 2 + 4 + 4 + 4, or 4 + 4 + 4 + 4."""


@template(
    level=1,
    seconds=60,
    section="01.4",
    rule="States per GPU with Adam: 16 B per parameter (4 + 4 + 4 + 4, or 2 + 2 + 12), divided by the ranks of FSDP.",
)
def states_of_a_rank(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b")
    ranks = draw.choice((8, 16, 32, 64))
    parameters = model.param_count
    whole = STATES * parameters
    return Number(
        text=f"{name} has {billions(parameters)} parameters. It is trained with Adam in mixed precision, fully sharded "
        f"over {ranks} GPUs. How many bytes of parameters, gradients and optimizer states does each GPU keep between "
        "steps, gradients included?",
        answer=whole / ranks,
        unit="bytes",
        given={"model": name, "parameters": parameters, "ranks": ranks},
        slips=(
            Slip(whole, "that is without sharding: every rank would hold all of it, as under DDP"),
            Slip(2 * parameters / ranks, "that is the bf16 parameters alone; gradients and Adam's states are missing"),
            Slip(4 * parameters / ranks, "that is the fp32 parameters alone; gradients and Adam's states are missing"),
            Slip(12 * parameters / ranks, "gradients are states too, 4 bytes per parameter in fp32"),
            Slip(4 * parameters + 12 * parameters / ranks, "that is ZeRO-1: FSDP shards parameters and gradients too"),
        ),
        why=f"16 B x {billions(parameters)} = {written(whole, 'bytes')}, divided by {ranks}.",
    )


@template(
    level=1,
    seconds=90,
    section="01.4",
    rule="ZeRO-1 shards the optimizer: 4 Ψ + 12 Ψ/N bytes. ZeRO-2 gradients too: 2 Ψ + 14 Ψ/N. ZeRO-3 all: 16 Ψ/N.",
    source="Rajbhandari et al. 2020 (arXiv 1910.02054), section 3",
)
def states_of_a_zero_stage(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    ranks, stage = draw.choice((8, 16, 32, 64)), draw.choice((1, 2))
    parameters = model.param_count
    whole, cut = (4, 12) if stage == 1 else (2, 14)
    other, confused = "zero2", "that is stage 2, which divides the gradients too"
    if stage == 2:
        other, confused = "zero1", "that is stage 1, which leaves the gradients whole"
    return Number(
        text=f"{name} ({billions(parameters)} parameters) is trained as in the ZeRO paper: parameters and gradients in "
        "fp16, and an optimizer that keeps an fp32 copy and two fp32 moments of each parameter. How many bytes of all "
        f"this does each of {ranks} GPUs hold with ZeRO stage {stage}?",
        answer=model_state_bytes(parameters, ranks, f"zero{stage}"),
        unit="bytes",
        given={"model": name, "parameters": parameters, "ranks": ranks, "stage": stage},
        slips=(
            Slip(STATES * parameters, "that is DDP, where nothing is divided"),
            Slip(STATES * parameters / ranks, f"that is stage 3: stage {stage} leaves the parameters whole"),
            Slip(model_state_bytes(parameters, ranks, other), confused),
            Slip(cut * parameters / ranks, "that is only what is divided; the rest is whole on every GPU"),
        ),
        why=f"{whole} B stay whole, {cut} B are divided by {ranks}: ({whole} + {cut}/{ranks}) B x "
        f"{billions(parameters)}.",
    )


NEEDS = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "FSDP over all GPUs": "fsdp2"}
"""From the least sharding to the most."""


@functools.cache
def _rooms() -> dict[str, list[tuple[str, int, int]]]:
    """For each way to shard: models, GPUs and GB of room for which it is the first that fits, and not by a hair."""
    found: dict[str, list[tuple[str, int, int]]] = {way: [] for way in NEEDS}
    for key in ("gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b"):
        for ranks in (8, 16, 32, 64):
            for room_gb in (4, 8, 12, 16, 24, 30, 40, 60, 120):
                shares = [_states(Model.preset(key).param_count, ranks, way) / 1e9 / room_gb for way in NEEDS]
                fits = [way for way, share in zip(NEEDS, shares, strict=True) if share < 1]
                if fits and all(abs(share - 1) > 0.08 for share in shares):
                    found[fits[0]].append((key, ranks, room_gb))
    return found


def _states(parameters: int, ranks: int, way: str) -> float:
    return model_state_bytes(parameters, ranks, NEEDS[way])


@template(
    level=2,
    seconds=120,
    section="10.3",
    rule="Shard as little as fits: DDP 16 Ψ, ZeRO-1 4 Ψ + 12 Ψ/N, ZeRO-2 2 Ψ + 14 Ψ/N, FSDP 16 Ψ/N bytes.",
    source="Rajbhandari et al. 2020 (arXiv 1910.02054), section 3",
)
def least_sharding_that_fits(draw: random.Random) -> Choice:
    key, ranks, room_gb = balanced(draw, _rooms())
    parameters = Model.preset(key).param_count
    needs = {way: _states(parameters, ranks, way) for way in NEEDS}
    right = next(way for way in NEEDS if needs[way] < room_gb * 1e9)
    return Choice(
        text=f"{NAMES[key]} ({billions(parameters)} parameters) is trained on {ranks} GPUs with Adam, 16 bytes of "
        f"states per parameter (2 + 2 + 12). Each GPU has {room_gb} GB to spare for them. Which of these shards least "
        "and still fits?",
        options=tuple(NEEDS),
        wrong={
            way: f"it takes {written(need, 'bytes')} on each GPU"
            + (", which fits, but less sharding does too" * (need < needs[right]))
            for way, need in needs.items()
            if way != right
        },
        given={"model": NAMES[key], "ranks": ranks, "room_gb": room_gb},
        why=", ".join(f"{way}: {written(need, 'bytes')}" for way, need in needs.items()) + f"; room: {room_gb} GB.",
    )


@template(
    level=2,
    seconds=120,
    section="10.3",
    rule="HSDP keeps 16 Ψ/S bytes of states (S = GPUs to a copy): between FSDP's 16 Ψ/N and DDP's 16 Ψ.",
    source="Rajbhandari et al. 2020 (arXiv 1910.02054), section 3; torch.distributed.fsdp.fully_shard, argument mesh",
)
def strategies_by_states(draw: random.Random) -> Order:
    ranks, shards = draw.choice((16, 32, 64, 128)), draw.choice((2, 4, 8))
    name, _ = a_model(draw)
    hybrid = f"HSDP with {shards} GPUs to a copy"
    per_parameter = {way: model_state_bytes(1, ranks, api) for way, api in NEEDS.items()}
    per_parameter[hybrid] = model_state_bytes(1, shards)
    ordered = tuple(sorted(per_parameter, key=lambda way: per_parameter[way]))
    says = {way: f"it keeps {value:.3g} bytes per parameter on each GPU" for way, value in per_parameter.items()}
    return Order(
        text=f"{name} is trained on {ranks} GPUs with Adam, 16 bytes of states per parameter (2 + 2 + 12). Order these "
        "by the bytes of states that one GPU keeps, least first.",
        options=tuple(per_parameter),
        answer=ordered,
        because=says,
        given={"ranks": ranks, "shards": shards},
        why="Bytes per parameter: " + ", ".join(f"{way} {per_parameter[way]:.3g}" for way in ordered) + ".",
    )


def _gib(card: str) -> int:
    return round(gpu(card).mem_bytes / 2**30)


@functools.cache
def _hardware() -> list[tuple[int, str, int]]:
    """Billions of parameters, a GPU and a share of its memory, whose quotient is not close to a whole number."""
    found = []
    for size in (7, 8, 13, 34, 70, 123, 175, 405):
        for card in GPUS:
            for percent in (40, 50, 60, 100):
                exact = STATES * size * 1e9 / (_gib(card) * 2**30 * percent / 100)
                if 0.15 < exact % 1 < 0.85 and 3 < exact < 100:
                    found.append((size, card, percent))
    return found


@template(
    level=1,
    seconds=90,
    section="01.7",
    rule="GPUs needed for states alone: 16 Ψ / (memory left for them), rounded up; activations and whole units come "
    "on top.",
)
def fewest_gpus(draw: random.Random) -> Number:
    size, card, percent = draw.choice(_hardware())
    states, gib = STATES * size * 1e9, _gib(card)
    room = gib * 2**30 * percent / 100
    part = "All" if percent == 100 else f"{percent} %"
    return Number(
        text=f"A model of {size} billion parameters is trained with Adam (16 bytes of states per parameter), fully "
        f"sharded, on {card.partition('-')[0]} GPUs of {gib} GiB. {part} of each GPU's memory may go to these states. "
        "How many GPUs are needed at least?",
        answer=math.ceil(states / room),
        unit="GPUs",
        rel=0,
        given={"billions": size, "gib": gib, "percent": percent},
        slips=(
            Slip(
                math.ceil(2e9 * size / room), "that many hold the bf16 weights; training keeps 16 bytes per parameter"
            ),
            Slip(math.ceil(4e9 * size / room), "that many hold the fp32 weights, without gradients and moments"),
            Slip(
                math.ceil(states / (gib * 1e9 * percent / 100)),
                f"{gib} GiB are not {gib} GB but {gib * 2**30 / 1e9:.1f}",
            ),
            Slip(math.floor(states / room), "that many are just too few: round up"),
            Slip(math.ceil(states / room * percent / 100), "you gave all of the memory to the states"),
        ),
        why=f"16 B x {size} billion = {written(states, 'bytes')}; {percent} % of {gib} GiB are "
        f"{written(room, 'bytes')}; the quotient is {states / room:.3g}.",
    )


RECIPES = {
    "fp32 parameters and gradients, two fp32 moments": (4, 4, 8),
    "bf16 parameters and gradients, an fp32 copy, two fp32 moments": (2, 2, 4, 8),
    "bf16 parameters, fp32 gradients, an fp32 copy, two fp32 moments": (2, 4, 4, 8),
    "bf16 parameters and gradients, an fp32 sum of gradients, an fp32 copy, two fp32 moments": (2, 2, 4, 4, 8),
    "bf16 parameters and gradients, two fp32 moments": (2, 2, 8),
    "everything in bf16: parameters, gradients, two moments": (2, 2, 4),
}


@template(
    level=2,
    seconds=60,
    section="01.3",
    rule="Bytes per parameter with Adam: 16 = 4+4+8 (FSDP) or 2+2+12 (ZeRO), 18 with fp32 gradients, 20 with an fp32 "
    "sum, 12 without a copy.",
    source="Rajbhandari et al. 2020 (arXiv 1910.02054), section 3; torch.distributed.fsdp.MixedPrecisionPolicy",
)
def recipe_of_a_number(draw: random.Random) -> Choice:
    name, model = a_model(draw)
    sums = {recipe: sum(parts) for recipe, parts in RECIPES.items()}
    shown = draw.sample(list(RECIPES)[draw.choice((0, 1)) :], 4)  # the first two have the same sum
    while len({sums[recipe] for recipe in shown}) < 4:
        shown = draw.sample(list(RECIPES), 4)
    right, parameters = draw.choice(shown), model.param_count
    total = written(sums[right] * parameters, "bytes")
    return Choice(
        text=f"Someone says that {name} ({billions(parameters)} parameters) takes {total} of model states with Adam, "
        "summed over all GPUs, when every state is stored once. For which recipe is that so?",
        options=tuple(shown),
        wrong={
            recipe: f"that is {' + '.join(map(str, RECIPES[recipe]))} = {sums[recipe]} bytes per parameter"
            for recipe in shown
            if recipe != right
        },
        given={"model": name, "claimed": total, "recipes": tuple(shown)},
        why=f"{total} / {billions(parameters)} = {sums[right]} bytes = {' + '.join(map(str, RECIPES[right]))}.",
    )


LLAMAS = ("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "llama3-405b")


@template(
    level=2,
    seconds=120,
    section="01.6",
    rule="A Llama block has 2 d^2 + 2 d d_kv + 3 d d_ffn parameters, a GPT block 12 d^2; gathered in bf16 2 B each, on "
    "every GPU.",
    source="fsdp_sim/spec/models.toml: Touvron et al. 2023, Grattafiori et al. 2024",
)
def whole_block(draw: random.Random) -> Number:
    name, model = a_model(draw, *LLAMAS)
    ranks, dtype = draw.choice((8, 16, 64, 256)), draw.choice(("bf16", "fp32"))
    d, ffn, kv, size = model.d_model, model.d_ffn, model.kv_heads * model.d_head, DTYPE_BYTES[dtype]
    parameters = sum(rows * columns for _, rows, columns in block_shapes(model))
    other = "fp32" if dtype == "bf16" else "bf16"
    return Number(
        text=f"A block of {name} has width {d:,}, {model.n_head} query heads and {model.kv_heads} key/value heads of "
        f"{model.d_head}, and a feed-forward of three matrices (SwiGLU) with inner width {ffn:,}; no biases. FSDP over "
        f"{ranks} GPUs gathers it in {dtype}. How many bytes are its parameters on each GPU then?",
        answer=size * parameters,
        unit="bytes",
        given={"d": d, "ffn": ffn, "kv": kv, "dtype": dtype},
        slips=(
            Slip(size * parameters / ranks, "that is a shard; for its forward a unit is whole on every GPU"),
            Slip(DTYPE_BYTES[other] * parameters, f"that is in {other}"),
            Slip(size * 12 * d * d, "12 d^2 is GPT's block: two feed-forward matrices of 4 d"),
            Slip(size * (parameters - d * ffn), "SwiGLU has three matrices, not two"),
            Slip(size * parameters + 2 * size * d * (d - kv), "keys and values have fewer heads than queries"),
        ),
        why=f"2 x {d:,}^2 + 2 x {d:,} x {kv:,} + 3 x {d:,} x {ffn:,} = {parameters / 1e6:.4g} million, x {size} B.",
    )


@template(
    level=2,
    seconds=60,
    section="06.1",
    rule="What no block takes is the root's: embedding, last norm, head. 2 V d parameters, or V d if the two are tied.",
    source="torch.distributed.fsdp.fully_shard: a call takes the parameters that no earlier call has taken",
)
def tables_of_the_root(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    dtype = draw.choice(("bf16", "fp32"))
    size, table = DTYPE_BYTES[dtype], model.vocab * model.d_model
    parameters = sum(rows * columns for _, rows, columns in root_shapes(model, 1024))
    tied = "its head uses the embedding's table" if model.tied_embeddings else "its head has a table of its own"
    if model.positions == "learned":
        tied += f", and {model.max_seq_len:,} positions have a vector each"
    wrong = "the tied table is one parameter: it is gathered once" if model.tied_embeddings else "embedding and head"
    return Number(
        text=f"{name} has a vocabulary of {model.vocab:,} and width {model.d_model:,}; {tied}. Each block is a unit of "
        f"its own, and fully_shard(model) comes last. How many bytes does the root unit take when it is whole, in "
        f"{dtype}?",
        answer=size * parameters,
        unit="bytes",
        given={"model": name, "dtype": dtype},
        slips=(
            Slip(
                size * table * (2 if model.tied_embeddings else 1),
                f"{wrong}{'' if model.tied_embeddings else ' are two tables'}",
            ),
            Slip((6 - size) * parameters, f"that is not {dtype}"),
            Slip(size * model.param_count, "that is the whole model; the blocks have units of their own"),
        ),
        why=f"{'One table' if model.tied_embeddings else 'Two tables'} of {model.vocab:,} x {model.d_model:,}, and "
        f"little else: {parameters / 1e6:.4g} million x {size} B.",
    )


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
        slips=(
            Slip(answer / ranks, "FSDP does not shard activations, and logits are one"),
            Slip(answer * (6 - size) / size, f"that is not {dtype}"),
            Slip(
                batch * tokens * model.d_model * size,
                "that is what enters the head: the width is replaced by the vocabulary",
            ),
            Slip(answer * ranks, "each GPU has the logits of its own rows alone"),
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
        slips=(
            Slip(linear + square if fused else linear, "fused attention keeps no scores: without it 5 a s^2 b bytes"),
            Slip(2 * s * batch * h, "that is the input alone, which is what full checkpointing keeps"),
            Slip(12 * h * h * 2, "those are the parameters in bf16"),
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
        slips=(
            Slip(model.n_layer * one / ranks, "activations belong to a GPU's own rows: FSDP does not shard them"),
            Slip(one, "that is one block; every block keeps its input"),
            Slip(2 * model.n_layer * one, "bf16 has 2 bytes"),
            Slip(17 * model.n_layer * one, "that is the count for a GPT block that is not checkpointed"),
        ),
        why=f"{model.n_layer} inputs of {batch} x {s:,} x {model.d_model:,} x 2 B = {written(one, 'bytes')} each.",
    )


@template(
    level=2,
    seconds=60,
    section="10.1",
    rule="HSDP: states per GPU are 16 Ψ / (GPUs that share a copy); more copies save nothing.",
    source="torch.distributed.fsdp.fully_shard, argument mesh: (replicate, shard)",
)
def states_of_hsdp(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    nodes, shards = draw.choice((2, 4, 16, 32)), draw.choice((4, 8))
    parameters = model.param_count
    whole = STATES * parameters
    return Number(
        text=f"{name} ({billions(parameters)} parameters) is trained with HSDP on {nodes} nodes of {shards} GPUs: "
        "sharded within a node, a copy per node. Parameters and gradients are fp32, Adam keeps two fp32 moments. How "
        "many bytes of these states does each GPU keep, gradients included?",
        answer=whole / shards,
        unit="bytes",
        given={"model": name, "nodes": nodes, "shards": shards},
        slips=(
            Slip(whole / (nodes * shards), "that is FSDP over all GPUs: with HSDP each node has a copy of its own"),
            Slip(whole / nodes, "it is divided by the GPUs of a node, not by the nodes"),
            Slip(whole, "that is the copy of a whole node"),
            Slip(4 * parameters / shards, "that is the parameters alone"),
        ),
        why=f"16 B x {billions(parameters)} = {written(whole, 'bytes')}, divided by the {shards} GPUs of a node.",
    )


@template(
    level=2,
    seconds=60,
    section="07.6",
    rule="Without gradient sync each GPU keeps whole gradients between micro-batches, Ψ numbers in reduce_dtype.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed",
)
def gradients_without_sync(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b")
    ranks, reduce = draw.choice((8, 16, 64)), draw.choice(("bf16", "fp32"))
    parameters, size = model.param_count, DTYPE_BYTES[reduce]
    return Number(
        text=f"{name} ({billions(parameters)} parameters) accumulates gradients over 4 micro-batches with FSDP2 on "
        f"{ranks} GPUs; set_requires_gradient_sync(False) in all but the last. Parameters are gathered in bf16, "
        f"reduce_dtype is {reduce}. How many bytes of gradients does each GPU keep between two micro-batches?",
        answer=size * parameters,
        unit="bytes",
        given={"model": name, "reduce_dtype": reduce},
        slips=(
            Slip(size * parameters / ranks, "gradients are shards only after a reduce-scatter, which was left out"),
            Slip((6 - size) * parameters, "kept gradients have the dtype in which they will be reduced"),
            Slip(size * 4 * parameters, "micro-batches are added up, not kept side by side"),
        ),
        why=f"Nothing is reduced yet, so gradients are whole: {size} B ({reduce}) x {billions(parameters)}.",
    )


@functools.cache
def _at_the_peak(phase: str, prefetch: int, buffers: int) -> int:
    """Layers' worth of bytes that stand at the peak, read off torch's program of eight equal layers."""
    layers = [Unit(f"layers.{i}", (Param("weight", (64,)),)) for i in range(8)]
    ahead = {f"{phase}_prefetch": prefetch} if prefetch else {}
    plan = Plan(**ahead, reduce_scatter_max_input_buffers=buffers)  # type: ignore[arg-type]
    profile = memory(build([Unit("root", (), ("embed", ..., "head")), *layers], plan, 8))
    whole = (Memory.UNSHARDED, Memory.AG_OUTPUT, Memory.UNSHARDED_GRAD, Memory.RS_INPUT)
    return profile.peak_of(whole, Phase(phase)) // layers[0].params[0].bytes


@template(
    level=3,
    seconds=90,
    section="07.1",
    rule="Whole layers at FSDP2's peak: 3 in forward, 4 in backward; prefetch of depth k makes it k + 2 and k + 3.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: wait_for_unshard, post_backward",
)
def layers_at_the_peak(draw: random.Random) -> Number:
    layers, phase = draw.choice((12, 24, 32, 40, 48, 80)), draw.choice(("forward", "backward"))
    prefetch, buffers = draw.choice(((0, 1), (0, 1), (2, 1), (3, 1), (0, 2)))
    buffers = buffers if phase == "backward" else 1
    setting = f"each layer explicitly prefetches the next {prefetch} in {phase}" if prefetch else "default prefetching"
    setting += f", {buffers} reduce-scatter input buffers" if buffers > 1 else ""
    answer = _at_the_peak(phase, prefetch, buffers)
    counted = "gathered parameters and flat all-gather buffers"
    if phase == "backward":
        counted = "gathered parameters, flat all-gather buffers, whole gradients and reduce-scatter inputs"
    return Number(
        text=f"{layers} equal layers, each a unit of FSDP2, resharded after forward, all in fp32, {setting}. Count "
        f"{counted}; leave out shards, activations and the root. How many layers' worth stand on a GPU at the peak of "
        f"{phase}?",
        answer=answer,
        unit="layers",
        rel=0,
        given={"phase": phase, "prefetch": prefetch, "buffers": buffers},
        slips=(
            Slip(1, "one layer computes, but the buffer it came in and gathers under way stand there too"),
            Slip(2, "the flat buffers of two gathers may stand beside the parameters that were copied out"),
            Slip(
                3 if phase == "backward" else 4, "forward holds parameters and two gathers, backward gradients as well"
            ),
            Slip(layers, "with resharding only those in use and on their way are whole"),
        ),
        why=f"One layer's parameters in use and {answer - 1} more: the flat buffers of gathers"
        + (", the layer's gradients, and what reduce-scatters still read." if phase == "backward" else " under way."),
    )


@template(
    level=2,
    seconds=60,
    section="07.3",
    rule="reshard_after_forward=False keeps all parameters whole until backward, 2 Ψ bytes in bf16; n keeps 2 Ψ/n.",
    source="torch.distributed.fsdp.fully_shard, argument reshard_after_forward",
)
def kept_until_backward(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    ranks, keep = draw.choice((32, 64, 128)), draw.choice(("False", "2", "4", "8"))
    parameters, n = model.param_count, 1 if keep == "False" else int(keep)
    answer = 2 * parameters / n
    return Number(
        text=f"{name} ({billions(parameters)} parameters) is trained on {ranks} GPUs with FSDP2 and gathered in bf16. "
        f"Every unit, the root too, gets reshard_after_forward={keep}. How many bytes of gathered parameters does each "
        "GPU still hold when forward ends, beside its fp32 shards?",
        answer=answer,
        unit="bytes",
        given={"model": name, "ranks": ranks, "keep": keep},
        slips=(
            Slip(2 * answer, "what is gathered is bf16, 2 bytes; the fp32 shards are not counted"),
            Slip(2 * parameters / ranks, "that is as small as a shard: it is what True would leave"),
            Slip(2 * parameters, f"with {keep} a slice of 1/{keep} is kept of each unit, and the rest freed")
            if n > 1
            else Slip(6 * parameters / model.n_layer, "with False nothing is freed until backward"),
        ),
        why=f"2 B x {billions(parameters)}"
        + (f", and of each unit 1/{n} stays." if n > 1 else ", and all of it stays."),
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


@template(
    level=1,
    seconds=60,
    section="01.7",
    rule='A GPU\'s 80 "GB" are 80 GiB = 85.9 GB; 16 bytes x billions of parameters gives GB: convert before comparing.',
    source="fsdp_sim/spec/gpus.toml: an A100-80GB has 81920 MiB",
)
def room_in_gib(draw: random.Random) -> Number:
    card = a_gpu(draw)
    gib = _gib(card.name)
    need_gb = round(gib * draw.choice((0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)))
    return Number(
        text=f"A calculation on paper, in GB of 10^9 bytes, says that a step needs {need_gb} GB. The GPU is an "
        f"{card.name.partition('-')[0]} with {gib} GiB. How much of its memory is left?",
        answer=gib * 2**30 - need_gb * 1e9,
        unit="bytes",
        given={"gib": gib, "need_gb": need_gb},
        slips=(
            Slip((gib - need_gb) * 1e9, "a GiB is 7.4 % more than a GB: convert before you subtract"),
            Slip((gib - need_gb) * 2**30, "what is needed was in GB, not in GiB"),
            Slip(gib * 1e9 - need_gb * 2**30, "you converted the wrong way round"),
        ),
        why=f"{gib} GiB = {gib} x 2^30 B = {gib * 2**30 / 1e9:.4g} GB, less {need_gb} GB.",
    )


@template(
    level=2,
    seconds=120,
    section="06.7",
    rule="LoRA under FSDP2: what is frozen has no gradient and no moments; an adapter of rank r has r (d_in + d_out).",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward: only parameters with gradients",
)
def states_of_lora(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    rank, layers, d = draw.choice((8, 16, 32, 64)), model.n_layer, model.d_model
    kv = model.kv_heads * model.d_head
    adapters = layers * rank * ((d + d) + (d + kv))
    return Number(
        text=f"{name} ({billions(model.param_count)} parameters) is frozen; fp32 LoRA adapters of rank {rank} train at "
        f"the query ({d:,} to {d:,}) and value ({d:,} to {kv:,}) projections of its {layers} blocks. How many bytes of "
        "gradients and Adam moments, in fp32, do all GPUs together keep under FSDP2?",
        answer=12 * adapters,
        unit="bytes",
        given={"model": name, "layers": layers, "width": d, "kv": kv, "rank": rank},
        slips=(
            Slip(12 * model.param_count, "frozen parameters have neither gradients nor moments"),
            Slip(16 * adapters, "the adapters' own weights were not asked for"),
            Slip(8 * adapters, "you forgot the gradients"),
            Slip(12 * layers * rank * (d + kv), "you counted one adapter per block, not two"),
            Slip(12 * layers * rank * 2 * d, "each adapter is two matrices, rank x inputs and outputs x rank"),
        ),
        why=f"{layers} x {rank} x ({2 * d:,} + {d + kv:,}) = {adapters / 1e6:.4g} million that train, x (4 + 8) B.",
    )


@template(
    level=2,
    seconds=60,
    section="03.2",
    rule="Every rank sends ceil(rows / N) rows of a parameter, so N ceil(rows / N) travel; the excess is padding.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param (torch.chunk, padded)",
)
def padding_in_the_gather(draw: random.Random) -> Number:
    rows, ranks = draw.choice((5, 9, 10, 13, 17, 30, 50, 100, 30522, 50257)), draw.choice((4, 6, 8, 12, 16, 48, 64))
    while rows % ranks == 0:
        ranks += 1
    chunk = -(-rows // ranks)
    return Number(
        text=f"A weight of {rows:,} rows is sharded by fully_shard over {ranks} GPUs, on dimension 0. How many of "
        "the rows that its all-gather brings to each GPU are padding?",
        answer=chunk * ranks - rows,
        unit="rows",
        rel=0,
        given={"rows": rows, "ranks": ranks},
        slips=(
            Slip(0, "a collective moves equal pieces, and these do not divide: pieces are padded"),
            Slip(rows % ranks, "that is the remainder; padding fills up to the next multiple"),
            Slip(chunk * ranks, "that is all that travels, weights and padding"),
            Slip(chunk, "that is a whole piece; padding is what is missing to N such pieces"),
        ),
        why=f"Pieces of ceil({rows:,} / {ranks}) = {chunk:,} rows; {ranks} x {chunk:,} = {chunk * ranks:,}, less "
        f"{rows:,}.",
    )
