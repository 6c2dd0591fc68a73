"""What is whole for a while: gathered parameters, gradients before they are reduced, padding."""

from __future__ import annotations

import functools
import random

from fsdp_sim.engine import memory
from fsdp_sim.learn.drill.draws import a_model, billions
from fsdp_sim.learn.drill.question import Mistake, Number
from fsdp_sim.learn.drill.questions.memory.common import LLAMAS
from fsdp_sim.learn.drill.template import template
from fsdp_sim.schedule import DTYPE_BYTES, Param, Unit, build
from fsdp_sim.spec import Plan, block_shapes, root_shapes
from fsdp_sim.timeline import Memory, Phase


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
        mistakes=(
            Mistake(size * parameters / ranks, "that is a shard; for its forward a unit is whole on every GPU"),
            Mistake(DTYPE_BYTES[other] * parameters, f"that is in {other}"),
            Mistake(size * 12 * d * d, "12 d^2 is GPT's block: two feed-forward matrices of 4 d"),
            Mistake(size * (parameters - d * ffn), "SwiGLU has three matrices, not two"),
            Mistake(size * parameters + 2 * size * d * (d - kv), "keys and values have fewer heads than queries"),
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
        mistakes=(
            Mistake(
                size * table * (2 if model.tied_embeddings else 1),
                f"{wrong}{'' if model.tied_embeddings else ' are two tables'}",
            ),
            Mistake((6 - size) * parameters, f"that is not {dtype}"),
            Mistake(size * model.param_count, "that is the whole model; the blocks have units of their own"),
        ),
        why=f"{'One table' if model.tied_embeddings else 'Two tables'} of {model.vocab:,} x {model.d_model:,}, and "
        f"little else: {parameters / 1e6:.4g} million x {size} B.",
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
        mistakes=(
            Mistake(size * parameters / ranks, "gradients are shards only after a reduce-scatter, which was left out"),
            Mistake((6 - size) * parameters, "kept gradients have the dtype in which they will be reduced"),
            Mistake(size * 4 * parameters, "micro-batches are added up, not kept side by side"),
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
        mistakes=(
            Mistake(1, "one layer computes, but the buffer it came in and gathers under way stand there too"),
            Mistake(2, "the flat buffers of two gathers may stand beside the parameters that were copied out"),
            Mistake(
                3 if phase == "backward" else 4, "forward holds parameters and two gathers, backward gradients as well"
            ),
            Mistake(layers, "with resharding only those in use and on their way are whole"),
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
        mistakes=(
            Mistake(2 * answer, "what is gathered is bf16, 2 bytes; the fp32 shards are not counted"),
            Mistake(2 * parameters / ranks, "that is as small as a shard: it is what True would leave"),
            Mistake(2 * parameters, f"with {keep} a slice of 1/{keep} is kept of each unit, and the rest freed")
            if n > 1
            else Mistake(6 * parameters / model.n_layer, "with False nothing is freed until backward"),
        ),
        why=f"2 B x {billions(parameters)}"
        + (f", and of each unit 1/{n} stays." if n > 1 else ", and all of it stays."),
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
        mistakes=(
            Mistake(0, "a collective moves equal pieces, and these do not divide: pieces are padded"),
            Mistake(rows % ranks, "that is the remainder; padding fills up to the next multiple"),
            Mistake(chunk * ranks, "that is all that travels, weights and padding"),
            Mistake(chunk, "that is a whole piece; padding is what is missing to N such pieces"),
        ),
        why=f"Pieces of ceil({rows:,} / {ranks}) = {chunk:,} rows; {ranks} x {chunk:,} = {chunk * ranks:,}, less "
        f"{rows:,}.",
    )
