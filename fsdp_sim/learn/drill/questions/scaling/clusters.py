"""Where shards lie, and what more GPUs and nodes cost."""

from __future__ import annotations

import math
import random

from fsdp_sim.engine import model_state_bytes
from fsdp_sim.learn.drill.draws import a_gpu, a_model, billions
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.scaling.common import GIB
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written

SIXTEEN = "16 B: Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 3"


@template(
    level=2,
    seconds=120,
    section="10.8",
    rule="HSDP divides states by the shard group, not by the world; take the smallest group in which they fit.",
    source=SIXTEEN,
)
def shard_size_that_fits(draw: random.Random) -> Choice:
    name, model = a_model(draw, "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b")
    gpus, room = draw.choice((512, 1024, 2048)), draw.choice((12, 20, 30, 40))
    sizes = {size: model_state_bytes(model.param_count, size) / 1e9 for size in (8, 16, 32, 64, 128, 256)}
    right = next(size for size in sizes if sizes[size] <= room)
    shown = [size for size in sizes if size // 4 <= right <= size * 4]
    return Choice(
        text=f"{name} ({billions(model.param_count)} parameters, 16 B of states each) trains on {gpus} GPUs, 8 per "
        f"node. Of each GPU {room} GB are left for states. Shard groups should be as small as they can be, for gathers "
        "in few nodes. Which shard group of HSDP do you take?",
        options=tuple(f"{size} GPUs, {gpus // size} copies" for size in shown),
        wrong={
            f"{size} GPUs, {gpus // size} copies": f"it leaves {sizes[size]:.3g} GB on each GPU, "
            + ("which does not fit" if size < right else "and a smaller group fits as well")
            for size in shown
            if size != right
        },
        given={"model": name, "gpus": gpus, "room": room},
        why=f"16 B x {billions(model.param_count)} / {right} = {sizes[right]:.3g} GB fit"
        + ("." if right == 8 else f"; with {right // 2} GPUs it would be twice that."),
    )


@template(
    level=3,
    seconds=120,
    section="10.2",
    rule="Leaving a node: FSDP (N-1)/N of all gathered and reduced; HSDP with k copies 2 (k-1)/k of the gradients.",
    source="ring algorithms: Patarasuk and Yuan 2009; groups as torch makes them: DeviceMesh (replicate, shard)",
)
def leaves_a_node(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    nodes, hsdp = draw.choice((2, 4, 8, 16, 32)), draw.choice((True, False))
    parameters, ranks = model.param_count, 8 * nodes
    gradients = 4 * parameters
    fsdp = (2 + 2 + 4) * parameters * (ranks - 1) / ranks
    answer = 2 * (nodes - 1) / nodes * gradients if hsdp else fsdp
    how = "HSDP, a copy per node" if hsdp else "FSDP over all GPUs, parameters freed after forward"
    return Number(
        text=f"{name} ({billions(parameters)} parameters) on {nodes} nodes of 8 GPUs: {how}. bf16 all-gathers, fp32 "
        "gradients in all reductions, one micro-batch, rings that enter and leave each node once. How many bytes does "
        "each node send to other nodes per step, all its GPUs together?",
        answer=answer,
        unit="bytes",
        given={"model": name, "nodes": nodes, "hsdp": hsdp},
        mistakes=(
            Mistake(answer / 8, "that is the share of one of the node's 8 GPUs"),
            Mistake(answer * 8, "each of 8 rings carries an eighth, or one ring carries all, but not 8 times all"),
            Mistake(fsdp, "gathers and reduce-scatters of HSDP stay in the node; only the all-reduce leaves it"),
            Mistake(
                2 * (nodes - 1) / nodes * gradients,
                "that is HSDP's all-reduce; here every gather crosses nodes as well",
            ),
            Mistake(
                6 * parameters * (ranks - 1) / ranks, "either backward's gather is missing, or gradients count as bf16"
            ),
            Mistake((nodes - 1) / nodes * gradients, "an all-reduce sends twice: it reduces and then gathers"),
        ),
        why=f"2 x {nodes - 1}/{nodes} x {written(gradients, 'bytes')} of gradients in 8 rings, an eighth in each."
        if hsdp
        else f"(2 + 2 + 4) B x {billions(parameters)} x {ranks - 1}/{ranks} through one ring of all GPUs.",
    )


@template(
    level=1,
    seconds=75,
    section="01.7",
    rule="GPUs needed: 16 B x parameters / (memory less activations, gathered units, buffers), in whole nodes.",
    source=f"{SIXTEEN}; memory: fsdp_sim/spec/gpus.toml",
)
def gpus_for_a_model(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b")
    gpu, reserved = a_gpu(draw, "A100-SXM-40GB", "A100-SXM-80GB", "H100-SXM-80GB"), draw.choice((15, 20, 25))
    parameters, memory = model.param_count, gpu.mem_bytes / GIB
    states = model_state_bytes(parameters, 1)

    def nodes(n_bytes: float) -> int:
        return 8 * math.ceil(states / n_bytes / 8)

    left = (memory - reserved) * GIB
    return Number(
        text=f"{name} ({parameters / 1e9:.1f} billion parameters, 16 B of states each) is trained with FSDP on nodes "
        f"of 8 GPUs with {memory:.0f} GiB. On each GPU {reserved} GiB are kept for activations, gathered units and "
        "buffers. How many GPUs are the least, in whole nodes?",
        answer=nodes(left),
        unit="GPUs",
        rel=0,
        given={"model": name, "memory": memory, "reserved": reserved},
        mistakes=(
            Mistake(nodes(memory * GIB), "activations and gathered units need the memory that is kept for them"),
            Mistake(math.ceil(states / left), "whole nodes: round up to a multiple of 8"),
            Mistake(nodes(left / GIB * 1e9), "those are GB; a GiB is 7% more"),
            Mistake(nodes(left * 8), "2 B are the bf16 parameters alone, without gradients and optimizer"),
            Mistake(nodes(left * 4), "4 B are the fp32 parameters alone, without gradients and optimizer"),
        ),
        why=f"{written(states, 'bytes')} of states over {memory - reserved:.0f} GiB = {states / left:.1f} GPUs.",
    )


@template(
    level=2,
    seconds=60,
    section="02.9",
    rule="A ring sends (N-1)/N of the message per GPU, nearly the same for any N; its steps (latency) grow with N.",
)
def latency_of_a_long_ring(draw: random.Random) -> Number:
    few, more, hop = draw.choice((8, 16)), draw.choice((128, 256, 512, 1024)), draw.choice((2, 4, 5, 8))
    blocks = draw.choice((32, 40, 80))
    answer = 3 * blocks * (more - few) * hop * 1e-6
    return Number(
        text=f"{blocks} blocks are units of FSDP, freed after forward. A collective is a ring whose every step costs "
        f"{hop} us of latency. A job moves from {few} to {more:,} GPUs, with one ring over all. How much latency per "
        "step of training do the blocks' collectives have more, if nothing hides it?",
        answer=answer,
        unit="s",
        given={"few": few, "more": more, "hop": hop, "blocks": blocks},
        mistakes=(
            Mistake(answer / 3, "each block has three collectives: two all-gathers and a reduce-scatter"),
            Mistake(answer * 2 / 3, "you forgot the backward all-gathers"),
            Mistake(3 * blocks * (more - 1) * hop * 1e-6, "that is all of it; the smaller ring had its steps too"),
            Mistake(answer * 4 / 3, "an all-reduce has twice the steps, but FSDP's reduce-scatter is half of one"),
            Mistake(0.0, "bytes per GPU hardly grow, but the number of steps does"),
        ),
        why=f"3 x {blocks} collectives, each with {more - 1:,} in place of {few - 1} steps of {hop} us.",
    )


def members(nodes: int, per_node: int, shards: int, rank: int, which: str) -> tuple[int, ...]:
    """The ranks of a group of the mesh (replicate, shard): the last dimension varies fastest."""
    if which == "shard":
        return tuple(range(rank // shards * shards, rank // shards * shards + shards))
    return tuple(range(rank % shards, nodes * per_node, shards))


@template(
    level=2,
    seconds=60,
    section="10.1",
    rule="Mesh (replicate, shard): the last dimension varies fastest, so shard groups are neighbours, inside a node.",
    source="torch.distributed.device_mesh.init_device_mesh: row-major over ranks; fully_shard: mesh (replicate, shard)",
)
def ranks_of_a_group(draw: random.Random) -> Choice:
    per_node, nodes = draw.choice(((4, 2), (4, 4), (8, 2), (8, 4)))
    rank, which = draw.randrange(nodes * per_node), draw.choice(("shard", "replicate"))
    swapped = draw.choice((True, False))
    shards = nodes if swapped else per_node
    right = members(nodes, per_node, shards, rank, which)
    other = "replicate" if which == "shard" else "shard"
    everyone = tuple(range(nodes * per_node))
    first = tuple(range(rank % 2, nodes * per_node, 2))
    reasons = {
        members(nodes, per_node, shards, rank, other): f"that is its {other} group",
        members(nodes, per_node, nodes * per_node // shards, rank, which): "the sizes of the mesh are swapped there",
        everyone: "that is plain FSDP: one group of all ranks",
        first: "ranks are numbered row by row, the last dimension fastest",
    }
    reasons = {group: why for group, why in reasons.items() if group != right}
    mesh = f"({nodes * per_node // shards}, {shards})"
    return Choice(
        text=f"{nodes} nodes of {per_node} GPUs, ranks numbered node by node. HSDP on init_device_mesh of shape {mesh} "
        f"with the names ('replicate', 'shard'). Which ranks are in the {which} group of rank {rank}?",
        options=tuple(map(_listed, (right, *reasons))),
        wrong={_listed(group): why for group, why in reasons.items()},
        given={"ranks": nodes * per_node, "shards": shards, "rank": rank, "which": which},
        why=f"Row-major: rank = replica x {shards} + shard, so rank {rank} is replica {rank // shards}, shard "
        f"{rank % shards}.",
    )


def _listed(group: tuple[int, ...]) -> str:
    shown = group if len(group) <= 8 else (*group[:3], "...", group[-1])
    return ", ".join(map(str, shown))


DIMENSIONS = ("tensor parallel", "FSDP's shard", "HSDP's replicate")


@template(
    level=3,
    seconds=180,
    section="10.1",
    rule="The busiest mesh dimension goes on NVLink: tensor parallel bytes grow with tokens, FSDP's do not.",
    source="4 all-reduces per block and step: Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3",
)
def busiest_dimension(draw: random.Random) -> Choice:
    name, model = a_model(draw, "llama2-13b", "llama3-70b", "llama3-405b")
    tensor, shards, copies, tokens = (
        8,
        draw.choice((8, 32)),
        draw.choice((2, 4)),
        draw.choice((1024, 2048, 16384, 65536)),
    )
    own = model.param_count / tensor
    sent = {
        "tensor parallel": model.n_layer * 4 * 2 * (tensor - 1) / tensor * tokens * model.d_model * 2,
        "FSDP's shard": (2 + 2 + 4) * own * (shards - 1) / shards,
        "HSDP's replicate": 2 * (copies - 1) / copies * 4 * own / shards,
    }
    right = max(sent, key=lambda dimension: sent[dimension])
    by_dimension = ", ".join(f"{dimension} {written(sent[dimension], 'bytes')}" for dimension in DIMENSIONS)
    reasons = {
        "tensor parallel": "its bytes follow the tokens, and these are few: here a rank's parameters are more",
        "FSDP's shard": "its bytes do not grow with the tokens, and here the activations are more",
        "HSDP's replicate": "it reduces no more than a shard of the gradients",
    }
    every = "all the same: each moves the gradients once"
    wrong = {option: reason for option, reason in reasons.items() if option != right}
    return Choice(
        text=f"{name} ({billions(model.param_count)} parameters, {model.n_layer} blocks, width {model.d_model:,}): "
        f"tensor parallel {tensor}, FSDP over {shards} shards, {copies} copies; {tokens:,} tokens per step in each "
        "tensor-parallel group. Tensor parallelism all-reduces tokens x width in bf16 4 times per block; parameters "
        "are gathered twice in bf16, gradients reduced in fp32. Which dimension moves most bytes per GPU and "
        "step, and belongs on NVLink first?",
        options=(*DIMENSIONS, every),
        wrong=wrong | {every: "they move different things: activations, parameters, and shards of gradients"},
        given={"model": name, "tensor": tensor, "shards": shards, "copies": copies, "tokens": tokens},
        why=f"Sent per GPU in rings: {by_dimension}.",
    )
