"""Communication: what a collective sends, what a step sends, through which link, and how long that takes."""

from __future__ import annotations

import functools
import itertools
import random

from fsdp_sim.learn.drill.draws import NAMES, a_model, balanced, billions
from fsdp_sim.learn.drill.question import Choice, Number, Order, Slip
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import DTYPE_BYTES, build, toy
from fsdp_sim.spec import Plan, gpu, link
from fsdp_sim.timeline import Op, Phase

HALVES = ("all-gather", "reduce-scatter")
PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often a ring of N sends (N-1)/N of the message: an all-reduce is a reduce-scatter and an all-gather."""
FABRICS = ("NVLink3", "NVLink4", "IB HDR x8", "IB NDR x8", "IB XDR x8", "AWS EFA v1")


def _sent(op: str, ranks: int, message: float) -> float:
    """Bytes that each rank of a ring sends."""
    return PASSES[op] * (ranks - 1) / ranks * message


def _seconds(op: str, ranks: int, message: float, latency_s: float, bytes_per_s: float) -> float:
    """Of a ring: steps, each with its latency and a chunk."""
    return PASSES[op] * (ranks - 1) * (latency_s + message / ranks / bytes_per_s)


@template(
    level=1,
    seconds=45,
    section="02.5",
    rule="Ring all-reduce: each GPU sends 2 (N-1)/N of the message, half in its reduce-scatter, half in its "
    "all-gather.",
)
def sent_in_an_all_reduce(draw: random.Random) -> Number:
    ranks, gigabytes = draw.choice((4, 8, 16, 32)), draw.choice((1.2, 1.5, 3, 5, 6.4, 14, 16, 26))
    answer = _sent("all-reduce", ranks, gigabytes * 1e9)
    return Number(
        text=f"{ranks} GPUs all-reduce gradients of {gigabytes} GB in a ring. How many bytes does each GPU send?",
        answer=answer,
        unit="bytes",
        given={"ranks": ranks, "message_bytes": gigabytes * 1e9},
        slips=(
            Slip(answer / 2, "that is one half, the reduce-scatter or the all-gather; an all-reduce is both"),
            Slip(2e9 * gigabytes, "a GPU does not send its own last chunk: the factor is 2 (N-1)/N"),
            Slip((ranks - 1) * 1e9 * gigabytes, "that is everyone sending all to everyone, not a ring"),
            Slip(answer * ranks, "that is what all GPUs send together"),
            Slip(answer / ranks, "that is for a shard of the gradients; all of the message goes round the ring"),
        ),
        why=f"2 x {ranks - 1}/{ranks} x {gigabytes} GB.",
    )


@template(
    level=1,
    seconds=45,
    section="02.4",
    rule="Ring all-gather or reduce-scatter: each GPU sends (N-1)/N of the whole, or N-1 times one shard.",
)
def sent_from_a_shard(draw: random.Random) -> Number:
    op, ranks = draw.choice(HALVES), draw.choice((4, 8, 16, 64))
    shard_mb = draw.choice((3, 6, 12, 13.5, 25, 27, 54))
    answer = _sent(op, ranks, ranks * shard_mb * 1e6)
    begin = "Before an all-gather each" if op == "all-gather" else "After a reduce-scatter each"
    return Number(
        text=f"{begin} of {ranks} GPUs has a shard of {shard_mb} MB. The collective "
        "runs as a ring. How many bytes does each GPU send in it?",
        answer=answer,
        unit="bytes",
        given={"op": op, "ranks": ranks, "shard_bytes": shard_mb * 1e6},
        slips=(
            Slip(shard_mb * 1e6, "in a ring a GPU also passes on what it received"),
            Slip((ranks - 1) / ranks * shard_mb * 1e6, "(N-1)/N is of the whole message, and this is a shard"),
            Slip(ranks * shard_mb * 1e6, "there are N-1 steps, not N: nobody sends to itself"),
            Slip(2 * answer, "that would be an all-reduce, which is both halves"),
        ),
        why=f"{ranks - 1} steps, a chunk of {shard_mb} MB in each: {ranks - 1}/{ranks} of "
        f"{written(ranks * shard_mb * 1e6, 'bytes')}.",
    )


@template(
    level=2,
    seconds=60,
    section="02.2",
    rule="All-gather against an owner that sends to each in turn: N times as fast, for every GPU's link works all "
    "the time.",
)
def owner_against_ring(draw: random.Random) -> Number:
    ranks, megabytes = draw.choice((4, 6, 8, 16, 32, 72)), draw.choice((100, 300, 436, 634, 1711))
    return Number(
        text=f"A layer of {megabytes} MB must come to all of {ranks} GPUs, whose links are equal and work both ways "
        "at once; ignore latency. Either one GPU owns it and sends all of it to each other GPU, one after the "
        "other; or each owns an equal shard, and a ring all-gathers. How many times as long as the ring does the "
        "owner take?",
        answer=ranks,
        unit="times",
        rel=0.005,
        given={"ranks": ranks, "megabytes": megabytes},
        slips=(
            Slip(ranks - 1, "the owner sends N-1 times the layer, but the ring sends only (N-1)/N of it"),
            Slip(1, "every GPU receives the same bytes, but one link sends them all"),
            Slip(2, "that is an all-reduce against an all-gather"),
        ),
        why=f"The owner's link carries {ranks - 1} layers, each link of the ring {ranks - 1}/{ranks} of one.",
    )


def _passes(dtype: str, reduce: str, kept: bool) -> int:
    """Bytes per parameter that FSDP moves in a step, without (N-1)/N."""
    return (1 if kept else 2) * DTYPE_BYTES[dtype] + DTYPE_BYTES[reduce]


@template(
    level=2,
    seconds=90,
    section="02.8",
    rule="FSDP sends 3 Ψ elements a step, DDP 2 Ψ; in bytes bf16 gathers and fp32 reductions make 2 + 2 + 4 = "
    "8, as fp32 DDP.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: param_dtype of gathers, reduce_dtype of reductions",
)
def times_ddp(draw: random.Random) -> Number:
    dtype, reduce = draw.choice((("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")))
    ddp, kept, ranks = draw.choice(("bf16", "fp32")), draw.choice((False, True)), draw.choice((8, 64, 256))
    mine, theirs = _passes(dtype, reduce, kept), 2 * DTYPE_BYTES[ddp]
    elements = (2 if kept else 3) / 2
    return Number(
        text=f"A step on {ranks} GPUs. FSDP gathers in {dtype}, reduces gradients in {reduce} and "
        f"{'keeps parameters from forward to backward' if kept else 'frees every unit after forward, the root too'}. "
        f"DDP all-reduces gradients in {ddp}. How many times as many bytes as with DDP does a GPU send with FSDP?",
        answer=mine / theirs,
        unit="times",
        given={"param_dtype": dtype, "reduce_dtype": reduce, "ddp_dtype": ddp, "kept": kept},
        slips=(
            Slip(elements, "that counts elements; bytes depend on the dtypes"),
            Slip(mine / theirs * 2, "an all-reduce sends everything twice: reduce-scatter and all-gather"),
            Slip(
                _passes(dtype, reduce, not kept) / theirs,
                "kept parameters are not gathered again" if kept else "backward gathers again",
            ),
            Slip(theirs / mine, "that is DDP over FSDP"),
        ),
        why=f"FSDP: {'' if kept else '2 x '}{DTYPE_BYTES[dtype]} + {DTYPE_BYTES[reduce]} = {mine} B per parameter, "
        f"DDP: 2 x {DTYPE_BYTES[ddp]} = {theirs} B; (N-1)/N is in both.",
    )


@template(
    level=2,
    seconds=90,
    section="02.8",
    rule="A step of FSDP sends (N-1)/N Ψ x (2 x bytes gathered + bytes reduced); 1 x if parameters are kept.",
    source="torch.distributed.fsdp.ShardingStrategy: SHARD_GRAD_OP keeps parameters from forward to backward",
)
def sent_in_a_step(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    ranks, kept = draw.choice((4, 8, 16)), draw.choice((False, True))
    dtype, reduce = draw.choice((("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")))
    parameters, each = model.param_count, _passes(dtype, reduce, kept)
    part = (ranks - 1) / ranks * parameters
    how = "SHARD_GRAD_OP" if kept else "FULL_SHARD, freeing also the root after forward"
    return Number(
        text=f"{name} ({billions(parameters)} parameters) on {ranks} GPUs, FSDP with {how}. Gathers are in {dtype}, "
        f"gradients are reduced in {reduce}, collectives are rings. How many bytes does each GPU send in a step?",
        answer=each * part,
        unit="bytes",
        given={"parameters": parameters, "ranks": ranks, "param_dtype": dtype, "reduce_dtype": reduce, "kept": kept},
        slips=(
            Slip(
                _passes(dtype, reduce, not kept) * part,
                "kept parameters are gathered once" if kept else "you forgot the backward all-gather",
            ),
            Slip(each * part - DTYPE_BYTES[reduce] * part, "you forgot the gradients' reduce-scatter"),
            Slip(each * part + DTYPE_BYTES[reduce] * part, "gradients are reduce-scattered, not all-reduced: one pass"),
            Slip(each * parameters / ranks, "that is 1/N of it: a GPU sends (N-1)/N"),
            Slip(
                (2 if kept else 3) * 2 * part if reduce == "fp32" else 12 * part,
                f"mind the dtypes: {dtype} and {reduce}",
            ),
        ),
        why=f"{'' if kept else '2 x '}{DTYPE_BYTES[dtype]} B + {DTYPE_BYTES[reduce]} B = {each} B, x "
        f"{ranks - 1}/{ranks} x {billions(parameters)}.",
    )


@template(
    level=3,
    seconds=90,
    section="02.8",
    rule="torch keeps the root after forward, so it travels twice, not three times: 1.5 x DDP less half the root's "
    "share.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward defaults to True, for the root to False",
)
def root_below_three_halves(draw: random.Random) -> Number:
    layers, root = draw.choice((4, 6, 8, 12, 16)), draw.choice((2, 3, 4, 6))
    share = root / (layers + root)
    return Number(
        text=f"A model has {layers} equal blocks and a root, embedding and head, as large as {root} of them. Each "
        "block and the root are a unit of FSDP2 with default settings, all in fp32. How many times as many "
        "elements as with DDP does a GPU send with FSDP2?",
        answer=1.5 - share / 2,
        unit="times",
        rel=0.01,
        given={"layers": layers, "root": root},
        slips=(
            Slip(1.5, "the root is not freed after forward by default, so backward does not gather it"),
            Slip(1, "that is with parameters kept everywhere; blocks are gathered again"),
            Slip(1.5 * (1 - share), "the root is gathered once and reduced once, not left out"),
            Slip((3 * layers + 2 * root) / (layers + root), "DDP sends every element twice"),
        ),
        why=f"(3 x {layers} + 2 x {root}) / (2 x {layers + root}).",
    )


@template(
    level=2,
    seconds=90,
    section="08.4",
    rule="M micro-batches send M (2 gathers + 1 reduction); without sync until the last, 2 M gathers + 1 reduction.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
)
def sent_while_accumulating(draw: random.Random) -> Number:
    name, model = a_model(draw, "gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b")
    ranks, batches, each = draw.choice((8, 16, 64)), draw.choice((2, 4, 8)), draw.choice((False, True))
    parameters = model.param_count
    part = (ranks - 1) / ranks * parameters
    gathers, reductions = 4 * batches, 4 * (batches if each else 1)
    setting = "in every micro-batch" if each else "in the last micro-batch only (set_requires_gradient_sync)"
    return Number(
        text=f"{name} ({billions(parameters)} parameters) accumulates {batches} micro-batches per step with FSDP2 on "
        f"{ranks} GPUs. Gathers are bf16, every unit is freed after forward and after backward, and gradients are "
        f"reduced in fp32, {setting}. How many bytes does each GPU send per step, in rings?",
        answer=(gathers + reductions) * part,
        unit="bytes",
        given={"parameters": parameters, "ranks": ranks, "batches": batches, "each": each},
        slips=(
            Slip(8 * part, "that is one micro-batch: parameters are gathered anew in each"),
            Slip(
                (gathers + 4 * (1 if each else batches)) * part,
                "gradients are reduced in every micro-batch here" if each else "only the last micro-batch reduces",
            ),
            Slip((4 + reductions) * part, "without sync or with it, every micro-batch gathers its parameters again"),
            Slip((gathers / 2 + reductions) * part, "forward and backward both gather"),
        ),
        why=f"Gathers: {batches} x 2 x 2 B; reductions: {1 if not each else batches} x 4 B; together "
        f"{gathers + reductions} B x {ranks - 1}/{ranks} x {billions(parameters)}.",
    )


WAYS: dict[str, tuple[str, str | None, str | None, bool]] = {
    "DDP, fp32 gradients": ("ddp", None, "fp32", False),
    "DDP, bf16 gradients": ("ddp", None, "bf16", False),
    "FSDP, fp32 throughout": ("fsdp2", "fp32", "fp32", False),
    "FSDP, fp32 throughout, parameters kept after forward": ("fsdp2", "fp32", "fp32", True),
    "FSDP, bf16 gathers, fp32 reductions": ("fsdp2", "bf16", "fp32", False),
    "FSDP, bf16 gathers, fp32 reductions, parameters kept after forward": ("fsdp2", "bf16", "fp32", True),
    "FSDP, bf16 throughout": ("fsdp2", "bf16", "bf16", False),
    "FSDP, bf16 throughout, parameters kept after forward": ("fsdp2", "bf16", "bf16", True),
}
"""api, dtype of gathers, dtype of reductions, whether parameters are kept."""


def _per_parameter(way: str) -> int:
    api, dtype, reduce, kept = WAYS[way]
    return 2 * DTYPE_BYTES[str(reduce)] if api == "ddp" else _passes(str(dtype), str(reduce), kept)


@template(
    level=2,
    seconds=120,
    section="02.8",
    rule="Bytes per parameter on the wire: DDP 2 x gradient; FSDP 2 x param + gradient; kept after forward param + "
    "gradient.",
)
def ways_by_bytes_sent(draw: random.Random) -> Order:
    ranks, name = draw.choice((8, 64, 512)), NAMES[draw.choice(tuple(NAMES))]
    by_bytes: dict[int, list[str]] = {}
    for way in WAYS:
        by_bytes.setdefault(_per_parameter(way), []).append(way)
    chosen = [draw.choice(by_bytes[size]) for size in sorted(by_bytes)]
    return Order(
        text=f"{name} on {ranks} GPUs, all collectives as rings. FSDP that does not keep its parameters frees every "
        "unit after forward. Order these by the bytes that each GPU sends in a step, least first.",
        options=tuple(chosen),
        answer=tuple(chosen),
        because={way: f"it sends {_per_parameter(way)} bytes per parameter, times (N-1)/N" for way in chosen},
        given={"ways": tuple(sorted(chosen)), "ranks": ranks},
        why="Bytes per parameter, in order: " + ", ".join(str(_per_parameter(way)) for way in chosen) + ".",
    )


NOTHING, NORMS = "nothing", "one all-reduce of norms, a number for each parameter"
UPDATED, GRADIENTS = "an all-gather of the updated parameters", "an all-gather of the gradients"
STEPS = {
    "DDP": {"api": "ddp"},
    "FSDP2": {},
    "HSDP": {"shard_size": 4},
    "ZeRO-1": {"api": "zero1"},
    "ZeRO-2": {"api": "zero2"},
}
ASKED = ([("FSDP2", True), ("HSDP", True)], [("ZeRO-1", False), ("ZeRO-2", False)],
         [("FSDP2", False), ("HSDP", False), ("DDP", True), ("DDP", False)])  # fmt: skip


@template(
    level=2,
    seconds=60,
    section="08.5",
    rule="FSDP's optimizer.step() communicates nothing; clipping all-reduces norms alone. ZeRO-1 and -2 gather "
    "parameters after the step.",
    source="torch/nn/utils/clip_grad.py, _get_total_norm on DTensors; Rajbhandari et al. 2020, section 7",
)
def between_backward_and_forward(draw: random.Random) -> Choice:
    name, ranks = NAMES[draw.choice(tuple(NAMES))], draw.choice((8, 16, 64))
    way, clips = draw.choice(draw.choice(ASKED))
    ops = build(toy(2), Plan(**STEPS[way]), 8).ops  # type: ignore[arg-type]
    sharded = any(i.op is Op.REDUCE_SCATTER for i in ops)
    gathers = any(i.op is Op.ALL_GATHER for i in ops if i.phase is Phase.OPTIMIZER)
    right = UPDATED if gathers else NORMS if clips and sharded else NOTHING
    norm = "every GPU has all gradients and can compute the norm alone" if clips else "nobody asks for a norm here"
    causes = {
        NOTHING: "each GPU has a part of the gradients, and the norm is of all"
        if right == NORMS
        else "each GPU updates a part of the parameters, and keeps all of them",
        NORMS: norm,
        UPDATED: "each GPU updates all parameters itself"
        if way == "DDP"
        else "the next forward gathers them, unit by unit",
        GRADIENTS: "a GPU that updates a shard needs the gradients of that shard, no others"
        if way != "DDP"
        else "the all-reduce in backward left all gradients on every GPU",
    }
    does = (
        "calls torch.nn.utils.clip_grad_norm_ and optimizer.step()" if clips else "calls optimizer.step(), no clipping"
    )
    return Choice(
        text=f"{name} on {ranks} GPUs with {way} and AdamW. After backward the loop {does}. Gradients are reduced by "
        "then. What is communicated until the next forward begins?",
        options=(NOTHING, NORMS, UPDATED, GRADIENTS),
        wrong={option: cause for option, cause in causes.items() if option != right},
        given={"way": way, "clips": clips},
        why={
            NOTHING: "Each GPU has the gradients of all that it updates, and needs nothing else.",
            NORMS: "Each GPU has shards, so partial norms are reduced; shards are then scaled and stepped in place.",
            UPDATED: "Parameters are kept whole and each GPU has updated its part: the parts are gathered.",
        }[right],
    )


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
    answer = _sent("all-reduce", nodes, size * parameters / 8)
    return Number(
        text=f"{name} ({billions(parameters)} parameters) with HSDP on {nodes} nodes of 8 GPUs, a copy per node; "
        f"each GPU has a network adapter of its own. Parameters are gathered in bf16, gradients reduced in {reduce}. "
        "How many bytes does each adapter send in a step, collectives as rings?",
        answer=answer,
        unit="bytes",
        given={"parameters": parameters, "nodes": nodes, "reduce_dtype": reduce},
        slips=(
            Slip(8 * answer, "that leaves the node; its 8 adapters share it"),
            Slip(answer / 2, "an all-reduce sends twice: reduce-scatter and all-gather"),
            Slip(answer * (6 - size) / size, f"gradients are reduced in {reduce}"),
            Slip(answer + 7 / 8 * 4 * parameters, "gathers stay inside the node: each node has all shards"),
            Slip((8 * nodes - 1) / (8 * nodes) * (4 + size) * parameters / 8, "that is FSDP over all GPUs"),
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
    parameters, ranks, each = model.param_count, 8 * nodes, _passes("bf16", "fp32", kept)
    answer = _sent("all-gather", ranks, each * parameters)
    return Number(
        text=f"{name} ({billions(parameters)} parameters) with FSDP over all {ranks} GPUs of {nodes} nodes of 8. "
        "Gathers are bf16, reductions fp32; parameters are "
        f"{'kept from forward to backward' if kept else 'freed after forward'}. The rings pass all GPUs of a node "
        "before they go on to the next. How many bytes leave each node in a step?",
        answer=answer,
        unit="bytes",
        given={"parameters": parameters, "nodes": nodes, "kept": kept},
        slips=(
            Slip(8 * answer, "that is what 8 GPUs send; 7 of 8 neighbours in the ring are in the same node"),
            Slip(answer / 8, "that is for each of 8 adapters; the node sends through all of them"),
            Slip(_sent("all-reduce", nodes, 4 * parameters), "that is HSDP, which all-reduces gradients between nodes"),
            Slip(
                (each + (2 if kept else -2)) * answer / each,
                "kept parameters are gathered once" if kept else "backward gathers again",
            ),
        ),
        why=f"{each} B x {billions(parameters)} = {written(each * parameters, 'bytes')}, x {ranks - 1}/{ranks}.",
    )


@template(
    level=2,
    seconds=90,
    section="02.7",
    rule="A ring takes (N-1) (alpha + message / (N B)), an all-reduce twice that: latency grows with N, bytes hardly.",
)
def seconds_of_a_ring(draw: random.Random) -> Number:
    op, fabric, ranks = draw.choice(tuple(PASSES)), link(draw.choice(FABRICS)), draw.choice((4, 8, 16, 64, 128))
    latency_us, megabytes = draw.choice((5, 10, 20, 40)), draw.choice((4, 16, 50, 100, 436))
    message, latency_s, rate = megabytes * 1e6, latency_us * 1e-6, fabric.bytes_per_s
    what = {"all-reduce": "a buffer", "all-gather": "a result", "reduce-scatter": "an input on each GPU"}[op]
    passes, bytes_s = PASSES[op], _sent(op, ranks, message) / rate
    return Number(
        text=f"{ranks} GPUs run a ring {op} with {what} of {megabytes} MB. Each link carries {rate / 1e9:g} GB/s "
        f"each way; each step from GPU to GPU costs {latency_us} us besides. How long does it take?",
        answer=_seconds(op, ranks, message, latency_s, rate),
        unit="s",
        given={"op": op, "ranks": ranks, "message_bytes": message, "latency_s": latency_s, "bytes_per_s": rate},
        slips=(
            Slip(bytes_s, "you left the latency out"),
            Slip(bytes_s + latency_s, "every step of the ring has its latency, not the collective once"),
            Slip(
                passes * (ranks - 1) * (latency_s + message / rate),
                "a step moves a chunk of 1/N, not the whole message",
            ),
            Slip(
                _seconds(op, ranks, message, latency_s, rate) * (0.5 if passes == 2 else 2),
                "an all-reduce has twice the steps of its halves",
            ),
        ),
        why=f"{passes * (ranks - 1)} steps of {latency_us} us + {message / ranks / 1e6:.3g} MB / {rate / 1e9:g} GB/s.",
    )


@template(
    level=2,
    seconds=60,
    section="02.7",
    rule="Latency and bytes cost the same at a chunk of latency x bandwidth: a message of N alpha B in a ring.",
)
def message_worth_its_latency(draw: random.Random) -> Number:
    op, fabric, ranks = draw.choice(tuple(PASSES)), link(draw.choice(FABRICS)), draw.choice((4, 8, 16, 32, 64))
    latency_us = draw.choice((5, 10, 20, 30, 50))
    chunk = latency_us * 1e-6 * fabric.bytes_per_s
    return Number(
        text=f"A ring {op} on {ranks} GPUs: links of {fabric.bytes_per_s / 1e9:g} GB/s each way, {latency_us} us of "
        "latency in each step. How large is the whole message for which the time spent on latency and on bytes is "
        "the same?",
        answer=ranks * chunk,
        unit="bytes",
        given={"op": op, "ranks": ranks, "latency_s": latency_us * 1e-6, "bytes_per_s": fabric.bytes_per_s},
        slips=(
            Slip(chunk, "that is the chunk of one step; a message is N chunks"),
            Slip((ranks - 1) * chunk, "there are N-1 steps, but N chunks"),
            Slip(2 * ranks * chunk, "an all-reduce has twice the steps and sends twice: the balance is the same"),
            Slip(8 * ranks * chunk, "the rate is in bytes, not bits"),
        ),
        why=f"In a step {latency_us} us x {fabric.bytes_per_s / 1e9:g} GB/s = {written(chunk, 'bytes')} of chunk; x "
        f"{ranks}.",
    )


FASTER = {
    "links of twice the bandwidth": (2, 1),
    "half the latency in each step": (1, 0.5),
    "the same message in two halves, one after the other": (1, 2),
}


def _faster(ranks: int, latency_us: int, megabytes: int, fabric: str) -> dict[str, float]:
    """Seconds after each change. Sending twice pays every latency twice."""
    rate = link(fabric).bytes_per_s
    return {
        change: _seconds("all-gather", ranks, megabytes * 1e6, latency_us * 1e-6 * latency, rate * more)
        for change, (more, latency) in FASTER.items()
    }


@functools.cache
def _rings() -> dict[str, list[tuple[int, int, int, str]]]:
    """For each change, the rings that it makes faster than the others do, and not by a hair."""
    found: dict[str, list[tuple[int, int, int, str]]] = {change: [] for change in FASTER}
    for ring in itertools.product((8, 16, 64, 128), (10, 20, 40), (1, 4, 16, 54, 109, 436), FABRICS):
        times = _faster(*ring)
        first, second, _ = sorted(times.values())
        if second > 1.15 * first:
            found[min(times, key=lambda change: times[change])].append(ring)
    return found


@template(
    level=2,
    seconds=90,
    section="02.7",
    rule="Below N alpha B a ring is bound by latency: fewer, larger messages or fewer ranks help; above it "
    "bandwidth helps.",
)
def what_makes_a_ring_faster(draw: random.Random) -> Choice:
    ranks, latency_us, megabytes, fabric = balanced(draw, _rings())
    rate, times = link(fabric).bytes_per_s, _faster(ranks, latency_us, megabytes, fabric)
    right, worth = min(times, key=lambda change: times[change]), ranks * latency_us * 1e-6 * rate
    return Choice(
        text=f"A ring all-gather of {megabytes:,} MB on {ranks} GPUs: links of {rate / 1e9:g} GB/s "
        f"each way, {latency_us} us of latency in each step. Which change makes it fastest?",
        options=tuple(FASTER),
        wrong={change: f"then it takes {written(took, 's')}" for change, took in times.items() if change != right},
        given={
            "ranks": ranks,
            "latency_us": latency_us,
            "megabytes": megabytes,
            "gbytes_per_s": rate / 1e9,
        },
        why=f"It takes {written(times[right], 's')} then. Latency and bytes cost the same at "
        f"{written(worth, 'bytes')}.",
    )


@template(
    level=2,
    seconds=60,
    section="02.7",
    rule="Bus bandwidth = size / time x (N-1)/N for all-gather and reduce-scatter, x 2 (N-1)/N for all-reduce.",
    source="NVIDIA/nccl-tests doc/PERFORMANCE.md",
)
def bus_bandwidth(draw: random.Random) -> Number:
    op, fabric, ranks = draw.choice(tuple(PASSES)), link(draw.choice(FABRICS)), draw.choice((4, 8, 16))
    gigabytes, reached = draw.choice((1, 2, 4, 8)), draw.choice((0.6, 0.7, 0.8, 0.9))
    time_ms = float(f"{_sent(op, ranks, gigabytes * 1e9) / (reached * fabric.bytes_per_s) * 1e3:.2g}")
    rate = gigabytes * 1e9 / (time_ms * 1e-3)
    answer = _sent(op, ranks, rate)
    other = "all-gather" if op == "all-reduce" else "all-reduce"
    return Number(
        text=f"An {op} of {gigabytes} GB".replace("An r", "A r") + f" on {ranks} GPUs takes {time_ms:g} ms. Which bus "
        "bandwidth, as in nccl-tests, is that: the rate to compare with that of a link?",
        answer=answer,
        unit="bytes/s",
        given={"op": op, "ranks": ranks, "message_bytes": gigabytes * 1e9, "time_s": time_ms * 1e-3},
        slips=(
            Slip(rate, "that is the algorithm bandwidth, size over time: it does not say what a link carries"),
            Slip(_sent(other, ranks, rate), f"that is the factor of an {other}"),
            Slip(PASSES[op] * rate, "a GPU sends (N-1)/N of the message in each pass, not all of it"),
            Slip(answer * ranks, "that is the sum over all GPUs"),
        ),
        why=f"{gigabytes} GB / {time_ms:g} ms = {written(rate, 'bytes/s')}, x "
        f"{'2 x ' * (op == 'all-reduce')}{ranks - 1}/{ranks}.",
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
        slips=(
            Slip(8 * answer, "divide by 8 twice: bits to bytes, and by the 8 GPUs that share the adapters"),
            Slip(64 * answer, "bits are not bytes, and 8 GPUs share the adapters"),
            Slip(gbits / 8 * 1e9, "that is one adapter; there is not one for each GPU"),
            Slip(answer / 2, "a network's rate is for one direction, it is not halved"),
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
    answer = _sent("all-gather", ranks, megabytes * 1e6) / rate
    return Number(
        text=f"The data sheet gives the {card.name.partition('-')[0]} {2 * rate / 1e9:,.0f} GB/s of NVLink, both "
        f"directions together. {ranks} of them in a node all-gather a unit of {megabytes:,} MB in a ring. How long "
        "does that take at least?",
        answer=answer,
        unit="s",
        given={"ranks": ranks, "megabytes": megabytes, "sheet_gbytes_per_s": 2 * rate / 1e9},
        slips=(
            Slip(answer / 2, "a GPU sends and receives at half of that each"),
            Slip(answer * ranks / (ranks - 1), "a GPU has its own shard already: (N-1)/N of the unit travels"),
            Slip(answer / ranks, "that is a shard; each GPU has to receive N-1 of them"),
            Slip(8 * answer, "the data sheet's GB/s are bytes"),
        ),
        why=f"{ranks - 1}/{ranks} x {megabytes:,} MB / {rate / 1e9:g} GB/s.",
    )
