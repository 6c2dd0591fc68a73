"""What a unit holds, in which dtype, and what each rank keeps of it."""

from __future__ import annotations

import dataclasses
import functools
import random

from fsdp_sim.learn.drill.draws import a_model, billions
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.api.common import API, MODELS
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import DTYPE_BYTES, build, toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES, Op


@template(
    level=2,
    seconds=60,
    section="03.2",
    rule="Shard(0) cuts ceil(rows / W) rows per rank, as torch.chunk: the last ranks keep fewer rows, or none.",
    source="torch.chunk; FSDPParam._init_sharded_param (_fsdp_param.py)",
)
def ranks_without_rows(draw: random.Random) -> Number:
    ranks = draw.choice((8, 16, 32, 64))
    rows = draw.choice([n for n in (5, 9, 10, 17, 18, 33, 50, 65, 100, 129, 257, 1000) if n % ranks])
    each = -(-rows // ranks)
    empty = ranks - -(-rows // each)
    return Number(
        text=f"fully_shard cuts a weight of {rows:,} rows over {ranks} ranks, along dimension 0. How many of the ranks "
        "keep no row of it?",
        answer=empty,
        unit="ranks",
        rel=0,
        given={"rows": rows, "ranks": ranks},
        mistakes=(
            Mistake(max(0, ranks - rows), "that spreads rows evenly; the first ranks take ceil(rows / W) each instead"),
            Mistake(ranks - rows // each, "a rank with fewer rows than the others is not without any"),
            Mistake(ranks - rows % ranks, "that is rows modulo ranks: no rank takes one row more than another"),
            Mistake(0, "as ceil(rows / W) is rounded up, the first ranks can take all there is"),
            Mistake(1, "ceil(rows / W) is rounded up: count how many ranks it takes until no row is left"),
        ),
        why=f"ceil({rows:,} / {ranks}) = {each} rows each, so {ranks - empty} of {ranks} ranks have taken all.",
    )


@template(
    level=1,
    seconds=60,
    section="06.1",
    rule="A fully_shard call takes all parameters inside its module that no earlier call took: inner ones first.",
    source=f"fully_shard ({API})",
)
def parameters_of_a_unit(draw: random.Random) -> Number:
    width, layers = draw.choice((2048, 4096, 5120)), draw.choice((24, 32, 40))
    million = {"embedding": 32_000 * width, "attention": 4 * width**2, "feed-forward": 8 * width**2}
    million["head"] = million["embedding"]
    sizes = {name: round(n / 1e6, 1) for name, n in million.items()}
    calls = draw.choice(
        (
            ("every block", "the model"),
            ("every feed-forward", "every block", "the model"),
            ("every attention", "the model"),
            ("[embedding, head]", "every block", "the model"),
            ("the head", "every block", "the model"),
        )
    )
    asked = draw.choice([call for call in calls if call in ("every block", "the model")])
    asked = "every block" if calls[0].startswith("[") else asked  # nothing is left for the model
    free = {"embedding": 1, "attention": layers, "feed-forward": layers, "head": 1}
    inside = {"every block": ("attention", "feed-forward"), "the model": tuple(free)}
    inside |= {"[embedding, head]": ("embedding", "head"), "the head": ("head",)}
    inside |= {f"every {part}": (part,) for part in ("attention", "feed-forward")}
    for call in calls[: calls.index(asked)]:
        free |= dict.fromkeys(inside[call], 0)
    counts = {name: min(free[name], 1) if asked == "every block" else free[name] for name in inside[asked]}
    answer = sum(counts[name] * sizes[name] for name in counts) * 1e6
    whole = (sizes["embedding"] + sizes["head"] + layers * (sizes["attention"] + sizes["feed-forward"])) * 1e6
    block = (sizes["attention"] + sizes["feed-forward"]) * 1e6
    parts = " + ".join(f"{n} x {sizes[name]}" if n > 1 else f"{sizes[name]}" for name, n in counts.items() if n)
    return Number(
        text=f"A transformer has an embedding and a head of {sizes['embedding']} million parameters each, not tied, "
        f"and {layers} blocks; a block is attention ({sizes['attention']} million) and feed-forward "
        f"({sizes['feed-forward']} million). fully_shard is called on: {', then '.join(calls)}. How many parameters "
        f"are in one all-gather of the unit made by {'one call on a block' if asked == 'every block' else 'the last'}?",
        answer=answer,
        unit="parameters",
        given={"calls": calls, "asked": asked, "layers": layers, "sizes": tuple(sizes.items())},
        mistakes=(
            Mistake(whole, "that is the whole model: earlier calls have taken their parameters out of this unit"),
            Mistake(block, "that is a block: which of its parameters, and which others, are left for this call?"),
            Mistake(
                whole - layers * block, "that is all that is in no block: some of it, or of the blocks, is elsewhere"
            ),
            Mistake(block * layers, "all blocks together are no unit here"),
        ),
        why=f"What no earlier call has taken: {parts} million.",
    )


@functools.cache
def _travels(stored: str, param_dtype: str | None, reduce_dtype: str | None) -> dict[str, str]:
    program = toy_program(1, 2, plan=Plan(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    dtypes = {i.op: i.dtype for i in program.ops if i.op in COLLECTIVES}
    if stored != "fp32":  # the toy's shards are fp32
        root, layer = program.units
        low = [
            dataclasses.replace(u, params=tuple(dataclasses.replace(p, dtype=stored) for p in u.params))
            for u in (root, layer)
        ]
        dtypes = {i.op: i.dtype for i in build(low, program.plan, 2).ops if i.op in COLLECTIVES}
    gathered, reduced = dtypes[Op.ALL_GATHER], dtypes[Op.REDUCE_SCATTER]
    return {
        "the shard that a rank keeps": stored,
        "what the all-gathers move": gathered,
        "an activation inside a block": gathered,
        "what the reduce-scatters move": reduced,
        "the gradient that the optimizer reads": stored,
        "Adam's first moment": stored,
    }


@template(
    level=1,
    seconds=45,
    section="08.1",
    rule="param_dtype: gathers and compute; reduce_dtype: reduce-scatter, default the gradients'; kept: stored dtype.",
    source="MixedPrecisionPolicy (torch/distributed/fsdp/_fully_shard/_fsdp_api.py)",
)
def dtype_of_what(draw: random.Random) -> Choice:
    stored, param_dtype = draw.choice(("fp32", "fp32", "bf16")), draw.choice(("bf16", "bf16", "fp16"))
    reduce_dtype = draw.choice(("fp32", None))
    found = _travels(stored, param_dtype, reduce_dtype)
    asked = draw.choice(tuple(found))
    right = found[asked]
    reduces = f"reduce_dtype={reduce_dtype}" if reduce_dtype else "reduce_dtype left out"
    causes = {dtype: f"nothing here casts this to {dtype}" for dtype in ("fp32", "bf16", "fp16")}
    causes |= {stored: "that is what is stored, and this is cast", param_dtype: "param_dtype is not what decides this"}
    if right == param_dtype and stored != param_dtype:
        causes[stored] = "what is stored is cast to param_dtype before it is gathered and computed with"
    return Choice(
        text=f"A model whose parameters were loaded in {stored} is given to fully_shard with param_dtype={param_dtype} "
        f"and {reduces}; float inputs, no autocast. What is the dtype of {asked}?",
        options=("fp32", "bf16", "fp16"),
        wrong={dtype: causes[dtype] for dtype in ("fp32", "bf16", "fp16") if dtype != right},
        given={"stored": stored, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "asked": asked},
        why=f"Kept in {stored}: shards, their gradients, the optimizer. Gathered and computed in {param_dtype}. "
        f"Reduced in {found['what the reduce-scatters move']}{'' if reduce_dtype else ', as the gradients are'}.",
    )


@template(
    level=3,
    seconds=60,
    section="08.1",
    rule="FSDP's gradient is the sum over ranks, divided by W; set_gradient_divide_factor(f) divides by f instead.",
    source="_get_gradient_divide_factors (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)",
)
def gradient_after_division(draw: random.Random) -> Number:
    gradients = tuple(draw.sample(range(1, 13), 4))
    micro_batches, factor = draw.choice((1, 2, 4)), draw.choice((None, 1, 2, 8, 16))
    total = micro_batches * sum(gradients)
    answer = total / (factor or 4)
    setting = f"set_gradient_divide_factor({factor}) was called" if factor else "no divide factor was set"
    each = f"each of {micro_batches} micro-batches" if micro_batches > 1 else "the only micro-batch"
    return Number(
        text=f"Four ranks, FSDP2 in fp32; {setting}. In {each} "
        f"backward computes, for one weight, the gradient {gradients[0]} on rank 0, {gradients[1]} on rank 1, "
        f"{gradients[2]} on rank 2 and {gradients[3]} on rank 3; the loop divides no loss, and clears gradients before "
        "the first. What does the optimizer read in .grad?",
        answer=answer,
        unit="",
        rel=0.005,
        given={"gradients": gradients, "micro_batches": micro_batches, "factor": factor},
        mistakes=(
            Mistake(total, "that is the sum: FSDP divides it"),
            Mistake(total / 4, "that is the mean over the ranks, which the divide factor takes the place of"),
            Mistake(
                total / 4 / (factor or 1), "the factor takes the place of the number of ranks, it does not add to it"
            ),
            Mistake(answer / 4, "it is divided once: by the number of ranks, or by the factor"),
            Mistake(answer / micro_batches, "micro-batches add up: only the loop can divide by their number"),
        ),
        why=f"{micro_batches} x ({' + '.join(map(str, gradients))}) / {factor or 4} = {answer:g}.",
    )


@template(
    level=1,
    seconds=60,
    section="09.1",
    rule="A sharded state dict is 1/W on each rank, without communication; a full one is everything in one place.",
    source="get_model_state_dict, StateDictOptions (torch/distributed/checkpoint/state_dict.py)",
)
def state_dict_on_a_rank(draw: random.Random) -> Number:
    name, model = a_model(draw, *MODELS)
    ranks, full = draw.choice((8, 16, 32, 64)), draw.choice((True, False))
    adam = draw.choice((True, False))
    each = DTYPE_BYTES["fp32"] * (3 if adam else 1)
    whole = each * model.param_count
    answer = whole if full else whole / ranks
    what = "get_model_state_dict" + (" and get_optimizer_state_dict return" if adam else " returns")
    how = "full_state_dict=True and cpu_offload=True" if full else "no options"
    return Number(
        text=f"{name}, {billions(model.param_count)} fp32 parameters, trained with Adam by FSDP2 on {ranks} ranks. "
        f"All ranks call. How many bytes of tensors does what {what} with {how} take on rank 0?",
        answer=answer,
        unit="bytes",
        given={"model": name, "ranks": ranks, "full": full, "adam": adam},
        mistakes=(
            Mistake(whole / ranks, "full means whole tensors: with cpu_offload rank 0 has all of them"),
            Mistake(whole, "without options it is sharded: each rank has its rows"),
            Mistake(
                answer / 3 if adam else answer * 3, "count weights and Adam's two moments, or weights alone, as asked"
            ),
            Mistake(answer * 16 / each, "gradients are in no state dict, and FSDP keeps no second copy of the weights"),
            Mistake(answer / 2, "shards are fp32, 4 bytes each, whatever dtype is computed with"),
        ),
        why=f"{each} B x {billions(model.param_count)} = {written(whole, 'bytes')}"
        + ("; rank 0 has the whole." if full else f", divided by {ranks}."),
    )
