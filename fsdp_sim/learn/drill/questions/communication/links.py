"""Which link the bytes take, and what it carries."""

from __future__ import annotations

import random

from fsdp_sim.learn.drill.draws import a_model, billions
from fsdp_sim.learn.drill.question import Mistake, Number
from fsdp_sim.learn.drill.questions.communication.common import passes, sent_bytes
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.spec import gpu, link


@template(
    level=3,
    seconds=120,
    section="10.2",
    rule="HSDP between nodes: each GPU all-reduces its gradient shard with R copies: 2 (R-1)/R x gradient bytes / S.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce: all-reduce of the scattered "
    "shard",
)
def hsdp_through_an_adapter(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    nodes, reduce = draw.choice((2, 4, 8, 16, 32)), draw.choice(("bf16", "fp32"))
    parameters, size = model.param_count, DTYPE_BYTES[reduce]
    answer = sent_bytes("all-reduce", nodes, size * parameters / 8)
    return Number(
        text=f"{name} ({billions(parameters)} parameters) with HSDP on {nodes} nodes of 8 GPUs, a copy per node; "
        f"each GPU has a network adapter of its own. Parameters are gathered in bf16, gradients reduced in {reduce}. "
        "How many bytes does each adapter send in a step, collectives as rings?",
        answer=answer,
        unit="bytes",
        given={"parameters": parameters, "nodes": nodes, "reduce_dtype": reduce},
        mistakes=(
            Mistake(8 * answer, "that leaves the node; its 8 adapters share it"),
            Mistake(answer / 2, "an all-reduce sends twice: reduce-scatter and all-gather"),
            Mistake(answer * (6 - size) / size, f"gradients are reduced in {reduce}"),
            Mistake(answer + 7 / 8 * 4 * parameters, "gathers stay inside the node: each node has all shards"),
            Mistake((8 * nodes - 1) / (8 * nodes) * (4 + size) * parameters / 8, "that is FSDP over all GPUs"),
        ),
        why=f"The shard is {size} B x {billions(parameters)} / 8 = {written(size * parameters / 8, 'bytes')}; x 2 x "
        f"{nodes - 1}/{nodes}.",
    )


@template(
    level=3,
    seconds=120,
    section="10.2",
    rule="FSDP over all GPUs: a node-by-node ring crosses each node's border once per step of the ring: (N-1)/N of "
    "each message leaves a node.",
)
def fsdp_out_of_a_node(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    nodes, kept = draw.choice((2, 4, 8, 16)), draw.choice((False, True))
    parameters, ranks, each = model.param_count, 8 * nodes, passes("bf16", "fp32", kept)
    answer = sent_bytes("all-gather", ranks, each * parameters)
    return Number(
        text=f"{name} ({billions(parameters)} parameters) with FSDP over all {ranks} GPUs of {nodes} nodes of 8. "
        "Gathers are bf16, reductions fp32; parameters are "
        f"{'kept from forward to backward' if kept else 'freed after forward'}. The rings pass all GPUs of a node "
        "before they go on to the next. How many bytes leave each node in a step?",
        answer=answer,
        unit="bytes",
        given={"parameters": parameters, "nodes": nodes, "kept": kept},
        mistakes=(
            Mistake(8 * answer, "that is what 8 GPUs send; 7 of 8 neighbours in the ring are in the same node"),
            Mistake(answer / 8, "that is for each of 8 adapters; the node sends through all of them"),
            Mistake(
                sent_bytes("all-reduce", nodes, 4 * parameters),
                "that is HSDP, which all-reduces gradients between nodes",
            ),
            Mistake(
                (each + (2 if kept else -2)) * answer / each,
                "kept parameters are gathered once" if kept else "backward gathers again",
            ),
        ),
        why=f"{each} B x {billions(parameters)} = {written(each * parameters, 'bytes')}, x {ranks - 1}/{ranks}.",
    )


ADAPTERS = {
    "IB EDR x8": (8, 100), "IB HDR x8": (8, 200), "IB HDR x4": (4, 200), "IB HDR x1": (1, 200), "IB NDR x8": (8, 400),
    "IB NDR x1": (1, 400), "IB XDR x8": (8, 800), "AWS EFA v1": (4, 100), "IBM H100": (2, 400),
}  # fmt: skip
"""Adapters of a node of 8 GPUs, and Gbit/s of each, as sold; what a GPU gets of it is in the catalogue."""


@template(
    level=1,
    seconds=45,
    section="10.1",
    rule="Networks are sold in Gbit/s per adapter: divide by 8 for bytes, and by the GPUs that share it; both "
    "directions at once.",
    source="fsdp_sim/spec/links.toml",
)
def share_of_the_network(draw: random.Random) -> Number:
    fabric = draw.choice(tuple(ADAPTERS))
    (adapters, gbits), answer = ADAPTERS[fabric], link(fabric).bytes_per_s
    return Number(
        text=f"A node has 8 GPUs and {adapters} network adapter{'s' * (adapters > 1)} of {gbits} "
        f"Gb/s{' each' * (adapters > 1)}. {draw.choice(('All GPUs send', 'Every GPU sends'))} at once. What rate, in "
        "bytes per second, is there for each GPU in one direction?",
        answer=answer,
        unit="bytes/s",
        given={"adapters": adapters, "gbits": gbits},
        mistakes=(
            Mistake(8 * answer, "divide by 8 twice: bits to bytes, and by the 8 GPUs that share the adapters"),
            Mistake(64 * answer, "bits are not bytes, and 8 GPUs share the adapters"),
            Mistake(gbits / 8 * 1e9, "that is one adapter; there is not one for each GPU"),
            Mistake(answer / 2, "a network's rate is for one direction, it is not halved"),
        ),
        why=f"{adapters} x {gbits} Gb/s / 8 bits / 8 GPUs.",
    )


@template(
    level=2,
    seconds=60,
    section="10.1",
    rule="NVLink's rate on data sheets adds both directions: H100's 900 GB/s carry 450 GB/s of an all-gather.",
    source="fsdp_sim/spec/gpus.toml and links.toml; NVIDIA's data sheets state both directions together",
)
def gather_over_nvlink(draw: random.Random) -> Number:
    card = gpu(draw.choice(("V100-SXM2-32GB", "A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB")))
    ranks, megabytes = draw.choice((4, 8)), draw.choice((218, 436, 634, 1711, 2100))
    rate = link(card.intra).bytes_per_s
    answer = sent_bytes("all-gather", ranks, megabytes * 1e6) / rate
    return Number(
        text=f"The data sheet gives the {card.name.partition('-')[0]} {2 * rate / 1e9:,.0f} GB/s of NVLink, both "
        f"directions together. {ranks} of them in a node all-gather a unit of {megabytes:,} MB in a ring. How long "
        "does that take at least?",
        answer=answer,
        unit="s",
        given={"ranks": ranks, "megabytes": megabytes, "sheet_gbytes_per_s": 2 * rate / 1e9},
        mistakes=(
            Mistake(answer / 2, "a GPU sends and receives at half of that each"),
            Mistake(answer * ranks / (ranks - 1), "a GPU has its own shard already: (N-1)/N of the unit travels"),
            Mistake(answer / ranks, "that is a shard; each GPU has to receive N-1 of them"),
            Mistake(8 * answer, "the data sheet's GB/s are bytes"),
        ),
        why=f"{ranks - 1}/{ranks} x {megabytes:,} MB / {rate / 1e9:g} GB/s.",
    )
