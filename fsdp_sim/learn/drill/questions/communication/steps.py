"""One step: what a rank sends with FSDP, DDP and ZeRO."""

from __future__ import annotations

import random

from fsdp_sim.learn.drill.draws import NAMES, a_model, billions
from fsdp_sim.learn.drill.question import Choice, Mistake, Number, Order
from fsdp_sim.learn.drill.questions.communication.common import passes
from fsdp_sim.learn.drill.template import template
from fsdp_sim.schedule import DTYPE_BYTES, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op, Phase


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
    mine, theirs = passes(dtype, reduce, kept), 2 * DTYPE_BYTES[ddp]
    elements = (2 if kept else 3) / 2
    return Number(
        text=f"A step on {ranks} GPUs. FSDP gathers in {dtype}, reduces gradients in {reduce} and "
        f"{'keeps parameters from forward to backward' if kept else 'frees every unit after forward, the root too'}. "
        f"DDP all-reduces gradients in {ddp}. How many times as many bytes as with DDP does a GPU send with FSDP?",
        answer=mine / theirs,
        unit="times",
        given={"param_dtype": dtype, "reduce_dtype": reduce, "ddp_dtype": ddp, "kept": kept},
        mistakes=(
            Mistake(elements, "that counts elements; bytes depend on the dtypes"),
            Mistake(mine / theirs * 2, "an all-reduce sends everything twice: reduce-scatter and all-gather"),
            Mistake(
                passes(dtype, reduce, not kept) / theirs,
                "kept parameters are not gathered again" if kept else "backward gathers again",
            ),
            Mistake(theirs / mine, "that is DDP over FSDP"),
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
    parameters, each = model.param_count, passes(dtype, reduce, kept)
    part = (ranks - 1) / ranks * parameters
    how = "SHARD_GRAD_OP" if kept else "FULL_SHARD, freeing also the root after forward"
    return Number(
        text=f"{name} ({billions(parameters)} parameters) on {ranks} GPUs, FSDP with {how}. Gathers are in {dtype}, "
        f"gradients are reduced in {reduce}, collectives are rings. How many bytes does each GPU send in a step?",
        answer=each * part,
        unit="bytes",
        given={"parameters": parameters, "ranks": ranks, "param_dtype": dtype, "reduce_dtype": reduce, "kept": kept},
        mistakes=(
            Mistake(
                passes(dtype, reduce, not kept) * part,
                "kept parameters are gathered once" if kept else "you forgot the backward all-gather",
            ),
            Mistake(each * part - DTYPE_BYTES[reduce] * part, "you forgot the gradients' reduce-scatter"),
            Mistake(
                each * part + DTYPE_BYTES[reduce] * part, "gradients are reduce-scattered, not all-reduced: one pass"
            ),
            Mistake(each * parameters / ranks, "that is 1/N of it: a GPU sends (N-1)/N"),
            Mistake(
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
        mistakes=(
            Mistake(1.5, "the root is not freed after forward by default, so backward does not gather it"),
            Mistake(1, "that is with parameters kept everywhere; blocks are gathered again"),
            Mistake(1.5 * (1 - share), "the root is gathered once and reduced once, not left out"),
            Mistake((3 * layers + 2 * root) / (layers + root), "DDP sends every element twice"),
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
        mistakes=(
            Mistake(8 * part, "that is one micro-batch: parameters are gathered anew in each"),
            Mistake(
                (gathers + 4 * (1 if each else batches)) * part,
                "gradients are reduced in every micro-batch here" if each else "only the last micro-batch reduces",
            ),
            Mistake((4 + reductions) * part, "without sync or with it, every micro-batch gathers its parameters again"),
            Mistake((gathers / 2 + reductions) * part, "forward and backward both gather"),
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
    return 2 * DTYPE_BYTES[str(reduce)] if api == "ddp" else passes(str(dtype), str(reduce), kept)


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
