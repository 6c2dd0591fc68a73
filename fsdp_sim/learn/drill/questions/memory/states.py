"""States: parameters, gradients and what the optimizer keeps, and how many GPUs they take."""

from __future__ import annotations

import functools
import math
import random

from fsdp_sim.engine import model_state_bytes
from fsdp_sim.learn.drill.draws import GPUS, NAMES, a_gpu, a_model, balanced, billions
from fsdp_sim.learn.drill.question import Choice, Mistake, Number, Order
from fsdp_sim.learn.drill.questions.memory.common import STATES
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.spec import Model, gpu


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
        mistakes=(
            Mistake(whole, "that is without sharding: every rank would hold all of it, as under DDP"),
            Mistake(
                2 * parameters / ranks, "that is the bf16 parameters alone; gradients and Adam's states are missing"
            ),
            Mistake(
                4 * parameters / ranks, "that is the fp32 parameters alone; gradients and Adam's states are missing"
            ),
            Mistake(12 * parameters / ranks, "gradients are states too, 4 bytes per parameter in fp32"),
            Mistake(
                4 * parameters + 12 * parameters / ranks, "that is ZeRO-1: FSDP shards parameters and gradients too"
            ),
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
        mistakes=(
            Mistake(STATES * parameters, "that is DDP, where nothing is divided"),
            Mistake(STATES * parameters / ranks, f"that is stage 3: stage {stage} leaves the parameters whole"),
            Mistake(model_state_bytes(parameters, ranks, other), confused),
            Mistake(cut * parameters / ranks, "that is only what is divided; the rest is whole on every GPU"),
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
    part = "All" if percent == 100 else f"{percent}%"
    return Number(
        text=f"A model of {size} billion parameters is trained with Adam (16 bytes of states per parameter), fully "
        f"sharded, on {card.partition('-')[0]} GPUs of {gib} GiB. {part} of each GPU's memory may go to these states. "
        "How many GPUs are needed at least?",
        answer=math.ceil(states / room),
        unit="GPUs",
        rel=0,
        given={"billions": size, "gib": gib, "percent": percent},
        mistakes=(
            Mistake(
                math.ceil(2e9 * size / room), "that many hold the bf16 weights; training keeps 16 bytes per parameter"
            ),
            Mistake(math.ceil(4e9 * size / room), "that many hold the fp32 weights, without gradients and moments"),
            Mistake(
                math.ceil(states / (gib * 1e9 * percent / 100)),
                f"{gib} GiB are not {gib} GB but {gib * 2**30 / 1e9:.1f}",
            ),
            Mistake(math.floor(states / room), "that many are just too few: round up"),
            Mistake(math.ceil(states / room * percent / 100), "you gave all of the memory to the states"),
        ),
        why=f"16 B x {size} billion = {written(states, 'bytes')}; {percent}% of {gib} GiB are "
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
        mistakes=(
            Mistake(whole / (nodes * shards), "that is FSDP over all GPUs: with HSDP each node has a copy of its own"),
            Mistake(whole / nodes, "it is divided by the GPUs of a node, not by the nodes"),
            Mistake(whole, "that is the copy of a whole node"),
            Mistake(4 * parameters / shards, "that is the parameters alone"),
        ),
        why=f"16 B x {billions(parameters)} = {written(whole, 'bytes')}, divided by the {shards} GPUs of a node.",
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
        mistakes=(
            Mistake((gib - need_gb) * 1e9, "a GiB is 7.4% more than a GB: convert before you subtract"),
            Mistake((gib - need_gb) * 2**30, "what is needed was in GB, not in GiB"),
            Mistake(gib * 1e9 - need_gb * 2**30, "you converted the wrong way round"),
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
        mistakes=(
            Mistake(12 * model.param_count, "frozen parameters have neither gradients nor moments"),
            Mistake(16 * adapters, "the adapters' own weights were not asked for"),
            Mistake(8 * adapters, "you forgot the gradients"),
            Mistake(12 * layers * rank * (d + kv), "you counted one adapter per block, not two"),
            Mistake(12 * layers * rank * 2 * d, "each adapter is two matrices, rank x inputs and outputs x rank"),
        ),
        why=f"{layers} x {rank} x ({2 * d:,} + {d + kv:,}) = {adapters / 1e6:.4g} million that train, x (4 + 8) B.",
    )
