"""The interface: which call does what, in which order, on which ranks, and what each rank then holds."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

from fsdp_sim.learn.drill.draws import a_model, billions
from fsdp_sim.learn.drill.question import Choice, Number, Order, Slip
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import DTYPE_BYTES, build, toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES, Memory, Op, Phase

API = "torch/distributed/fsdp/_fully_shard/_fully_shard.py"
MODELS = ("gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")


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
        slips=(
            Slip(max(0, ranks - rows), "that spreads rows evenly; the first ranks take ceil(rows / W) each instead"),
            Slip(ranks - rows // each, "a rank with fewer rows than the others is not without any"),
            Slip(ranks - rows % ranks, "that is rows modulo ranks: no rank takes one row more than another"),
            Slip(0, "as ceil(rows / W) is rounded up, the first ranks can take all there is"),
            Slip(1, "ceil(rows / W) is rounded up: count how many ranks it takes until no row is left"),
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
        slips=(
            Slip(whole, "that is the whole model: earlier calls have taken their parameters out of this unit"),
            Slip(block, "that is a block: which of its parameters, and which others, are left for this call?"),
            Slip(whole - layers * block, "that is all that is in no block: some of it, or of the blocks, is elsewhere"),
            Slip(block * layers, "all blocks together are no unit here"),
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


CHANGES: dict[str, dict[str, Any]] = {
    "reshard_after_forward=False in every call": {"reshard_after_forward": False},
    "set_requires_gradient_sync(False) but for the last micro-batch": {"requires_gradient_sync": "last"},
    "param_dtype=bf16 with reduce_dtype=fp32": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    "reduce_dtype=bf16 alone": {"reduce_dtype": "bf16"},
    "one call on the whole model, none on its blocks": {"wrap": "root"},
}


@functools.cache
def _sent(blocks: int, micro_batches: int, change: str) -> tuple[int, int, int, int]:
    """All-gathers and reduce-scatters of a step: how many, and their bytes."""
    plan = Plan(grad_accum=micro_batches, **CHANGES.get(change, {}))
    ops = toy_program(blocks, 8, plan=plan).ops
    gathers, reduces = ([i.bytes for i in ops if i.op is op] for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER))
    return len(gathers), len(reduces), sum(gathers), sum(reduces)


@template(
    level=2,
    seconds=90,
    section="11.5",
    rule="reshard False: fewer gathers. Sync in the last only: fewer reduces. Dtypes: fewer bytes, same counts.",
)
def change_behind_the_counts(draw: random.Random) -> Choice:
    blocks, micro_batches = draw.choice((4, 8, 12)), draw.choice((2, 4))
    right = draw.choice(tuple(CHANGES))
    before, after = _sent(blocks, micro_batches, ""), _sent(blocks, micro_batches, right)
    gather, reduce = (100 * after[i] / before[i] for i in (2, 3))
    options = (right, *draw.sample([change for change in CHANGES if change != right], 3))
    profile = (after[0], after[1], round(gather), round(reduce))

    def differs(change: str) -> str:
        would = _sent(blocks, micro_batches, change)
        shares = [round(100 * would[i] / before[i]) for i in (2, 3)]
        return (
            f"with that there would be {would[0]} all-gathers ({shares[0]} % of the bytes) and {would[1]} "
            f"reduce-scatters ({shares[1]} %)"
        )

    return Choice(
        text=f"A step of {micro_batches} micro-batches, {blocks} equal blocks and a root that is twice as large; fp32, "
        f"fully_shard's defaults, a call for each block and the model: {before[0]} all-gathers and {before[1]} "
        f"reduce-scatters. After one change: {after[0]} all-gathers with {gather:.0f} % of their former bytes, "
        f"{after[1]} reduce-scatters with {reduce:.0f} %. Which change?",
        options=options,
        wrong={change: differs(change) for change in options if change != right},
        given={"blocks": blocks, "micro_batches": micro_batches, "profile": profile, "options": tuple(sorted(options))},
        why=f"All-gathers went from {before[0]} to {after[0]}, their bytes to {gather:.0f} %; reduce-scatters from "
        f"{before[1]} to {after[1]}, bytes to {reduce:.0f} %: {right}.",
    )


LOOPS: dict[str, dict[str, Any]] = {  # what is called before each of several micro-batches, and the plan that it is
    "no setter; reshard_after_forward=True": {"reshard_after_forward": True},
    "no setter; reshard_after_forward=False": {"reshard_after_forward": False},
    "set_requires_gradient_sync(is_last); reshard_after_forward=True": {
        "reshard_after_forward": True,
        "requires_gradient_sync": "last",
    },
    "set_requires_gradient_sync(is_last); reshard_after_forward=False": {
        "reshard_after_forward": False,
        "requires_gradient_sync": "last",
    },
    "set_requires_gradient_sync(is_last) and set_reshard_after_backward(is_last); reshard_after_forward=False": {
        "reshard_after_forward": False,
        "requires_gradient_sync": "last",
        "reshard_after_backward": "last",
    },
}
LIMITS = {
    "whole gradients are kept from one micro-batch to the next": (Memory.UNSHARDED_GRAD, Phase.BACKWARD),
    "whole parameters are kept from one micro-batch to the next": (Memory.UNSHARDED, Phase.BACKWARD),
    "whole parameters of a block are kept from its forward to its backward": (Memory.UNSHARDED, Phase.FORWARD),
}


@functools.cache
def _loop(blocks: int, micro_batches: int, name: str) -> tuple[int, frozenset[str]]:
    """Collectives of a step, and which limits it breaks: what of a block is alive at the end of the first phases."""
    program = toy_program(blocks, 8, plan=Plan(grad_accum=micro_batches, **LOOPS[name]))
    broken = set()
    for limit, (category, until) in LIMITS.items():
        alive = 0
        for i in program:
            early = i.micro_batch == 0 and (until is Phase.BACKWARD or i.phase is Phase.FORWARD)
            if early and i.unit == "layers.0" and i.category is category:
                alive += i.bytes * ((str(i.kind) == "alloc") - (str(i.kind) == "free"))
        broken |= {limit} if alive else set()
    return sum(i.op in COLLECTIVES for i in program.ops), frozenset(broken)


@template(
    level=2,
    seconds=90,
    section="08.4",
    rule="set_requires_gradient_sync(False) skips reduce-scatters and keeps whole gradients; all-gathers go on.",
    source=f"FSDPModule.set_requires_gradient_sync, set_reshard_after_backward ({API})",
)
def setters_of_accumulation(draw: random.Random) -> Choice:
    blocks, micro_batches = draw.choice((4, 6, 8)), draw.choice((2, 4, 8))
    limits = draw.sample(tuple(LIMITS), draw.choice((0, 1, 1, 1, 2)))
    loops = {name: _loop(blocks, micro_batches, name) for name in LOOPS}
    fits = {name: count for name, (count, broken) in loops.items() if not broken & set(limits)}
    right = min(fits, key=lambda name: fits[name])
    unless = f"It must be that no {', and no '.join(limits)}" if limits else "Memory does not matter"
    return Choice(
        text=f"{blocks} blocks and the root are units of FSDP2, all with the same reshard_after_forward. A step has "
        f"{micro_batches} micro-batches, and the setters are called on the model before each. {unless}. "
        "Which loop issues fewest collectives in a step?",
        options=tuple(LOOPS),
        wrong={
            name: f"it issues {count} collectives, {fits[right]} are enough"
            if name in fits
            else f"there {min(broken & set(limits))}"
            for name, (count, broken) in loops.items()
            if name != right
        },
        given={"blocks": blocks, "micro_batches": micro_batches, "limits": tuple(sorted(limits))},
        why=f"Collectives of the loops that are allowed: {', '.join(str(n) for n in sorted(fits.values()))}.",
    )


PREPARE = (
    ("build the model, the same on every rank", "there must be a model before it is changed"),
    ("wrap each block for activation checkpointing", "the compiler must see what is computed again"),
    ("compile each block", "FSDP's hooks must stay outside of what is compiled"),
    ("fully_shard each block", "inner modules take their parameters first"),
    ("fully_shard the model", "the root takes what is left"),
    ("create the optimizer", "it must hold shards: after sharding, and before a forward leaves the root whole"),
    ("the first forward and backward", "the optimizer must hold shards, and the root is whole after a forward"),
    ("clip_grad_norm_", "there must be reduced gradients, of all micro-batches"),
    ("optimizer.step()", "it comes last: it reads the clipped gradients"),
)
FROM_META = (
    ("build the model on the meta device", "a model on meta has shapes and no memory"),
    ("fully_shard each block", "cut before there is memory, and blocks before the root"),
    ("fully_shard the model", "the root takes what is left, still without memory"),
    ("to_empty on the device", "only the shards get memory"),
    ("load the weights from the checkpoint", "there must be memory to load into"),
    ("create the optimizer for the model that is ready", "it is made for parameters that have their values"),
    ("load the optimizer's state", "there must be an optimizer that takes it"),
    ("the first forward", "everything must be in place before a step"),
)


def _chain(draw: random.Random, steps: tuple[tuple[str, str], ...], text: str) -> Order:
    some = sorted(draw.sample(range(len(steps)), 5))
    answer = tuple(steps[i][0] for i in some)
    return Order(
        text=text,
        options=answer,
        answer=answer,
        because={steps[i][0]: steps[i][1] for i in some},
        given={"things": tuple(sorted(answer))},
        why=f"{'; '.join(f'{steps[i][0]} ({steps[i][1]})' for i in some)}.",
    )


@template(
    level=2,
    seconds=60,
    section="12.8",
    rule="Checkpoint, compile the block, fully_shard blocks, then the root, then the optimizer, then the first step.",
    source="torchtitan, models/llama3 parallelize (AC, compile, fully_shard); pytorch issue 149205",
)
def order_around_sharding(draw: random.Random) -> Order:
    name, _ = a_model(draw, *MODELS)
    return _chain(draw, PREPARE, f"You prepare {name} for training with FSDP2. In which order do these come?")


@template(
    level=2,
    seconds=60,
    section="03.6",
    rule="Meta device: build, fully_shard, to_empty, load or initialise the weights (and buffers), then the optimizer.",
    source="torch/distributed/fsdp/_fully_shard/_fully_shard.py; torch.nn.Module.to_empty",
)
def order_from_meta(draw: random.Random) -> Order:
    name, model = a_model(draw, "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b")
    text = (
        f"{name} takes {written(4 * model.param_count, 'bytes')} in fp32: too much for each rank's host memory. You go "
        "on from a checkpoint with FSDP2, starting on the meta device. In which order do these come?"
    )
    return _chain(draw, FROM_META, text)


WAITS = "rank 0 waits for ranks that never come"
PART = "nobody waits, and only rank 0's own rows are in it"
WHOLE = "nobody waits, and it is right for the whole model"
ALONE = {  # what a line of FSDP2 code does if rank 0 alone runs it
    "model.layers[0].weight.full_tensor()": WAITS,
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))": WAITS,
    "model(validation_batch)": WAITS,
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": WAITS,
    "torch.save(model.state_dict(), path)": PART,
    "torch.save(get_model_state_dict(model), path)": PART,
    "sum(p.to_local().square().sum() for p in model.parameters())": PART,
    "sum(p.numel() for p in model.parameters())": WHOLE,
    "print(list(model.state_dict()))": WHOLE,
    "optimizer.param_groups[0]['lr']": WHOLE,
}
OF_ALONE = {
    WAITS: "what is sharded is put together by a collective, and all ranks must call it",
    PART: "it issues no collective and looks at local shards",
    WHOLE: "it issues no collective and needs no values of other ranks",
}


@template(
    level=2,
    seconds=45,
    section="09.2",
    rule="What makes sharded things whole is a collective that all ranks must call; 'if rank == 0' is for the write.",
    source="DTensor.full_tensor; torch.distributed.checkpoint.state_dict.get_model_state_dict; FSDPModule hooks",
)
def called_on_rank_0(draw: random.Random) -> Choice:
    call, ranks = draw.choice(tuple(ALONE)), draw.choice((8, 16, 64))
    right = ALONE[call]
    causes = {
        WAITS: "nothing in this line communicates: DTensors keep local shards and know the whole shape",
        PART: f"look again at what the line needs: {OF_ALONE[right]}",
        WHOLE: f"the parameters are sharded: {OF_ALONE[right]}",
    }
    return Choice(
        text=f"FSDP2 on {ranks} ranks, between two steps. A script has, under `if rank == 0:`, the line `{call}`. "
        "What happens?",
        options=(WAITS, PART, WHOLE),
        wrong={option: cause for option, cause in causes.items() if option != right},
        given={"call": call, "ranks": ranks},
        why=f"Rank 0 alone of {ranks}: {OF_ALONE[right]}.",
    )


@functools.cache
def _issued(nodes: int, per_node: int, **plan: Any) -> tuple[tuple[str, int, int], ...]:
    ops = [(str(i.op), i.group_size) for i in toy_program(3, nodes * per_node, plan=Plan(**plan)).ops if i.communicator]
    return tuple(sorted((*kind, ops.count(kind)) for kind in set(ops)))


@template(
    level=2,
    seconds=60,
    section="11.3",
    rule="FULL_SHARD: default; SHARD_GRAD_OP: reshard_after_forward=False; HYBRID_*: a 2-D mesh (replicas, shards).",
    source="ShardingStrategy (torch/distributed/fsdp/api.py); fully_shard(mesh, reshard_after_forward)",
)
def strategy_in_fsdp2(draw: random.Random) -> Choice:
    nodes, per_node = draw.choice((2, 4, 16, 32)), draw.choice((4, 8))
    strategy = draw.choice(("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"))
    ranks, own = nodes * per_node, {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}
    old = _issued(
        nodes, per_node, api="fsdp1", sharding_strategy=strategy, shard_size=per_node if strategy in own else None
    )
    flat, square = f"mesh of ({ranks},)", f"mesh of ({nodes}, {per_node})"
    settings: dict[str, dict[str, Any]] = {
        f"{flat}, reshard_after_forward left at its default": {"reshard_after_forward": None},
        f"{flat}, reshard_after_forward=False": {"reshard_after_forward": False},
        f"{square}, reshard_after_forward left at its default": {"shard_size": per_node},
        f"{square}, reshard_after_forward=False": {"shard_size": per_node, "reshard_after_forward": False},
        f"{flat}, reshard_after_forward={per_node}": {"reshard_after_forward": per_node},
    }
    right = next(name for name, plan in settings.items() if _issued(nodes, per_node, **plan) == old)
    causes = dict.fromkeys(settings, "")
    for name, plan in settings.items():
        hybrid, keeps = "shard_size" in plan, plan.get("reshard_after_forward") is False
        causes[name] = (
            "a 2-D mesh shards inside a node and copies across nodes, which this strategy does not"
            if hybrid and strategy not in own
            else "shards over all ranks: a hybrid strategy has a copy in each node, so the mesh has two dimensions"
            if not hybrid and strategy in own
            else "a number keeps a slice of each unit and gathers it in a node in backward, which FSDP1 does not have"
            if plan.get("reshard_after_forward") == per_node
            else "keeps parameters until backward: that is ZeRO-2's way"
            if keeps
            else "frees parameters after forward, and this strategy keeps them"
        )
    return Choice(
        text=f"{nodes} nodes of {per_node} GPUs train with FSDP1's {strategy} (hybrid: sharded within a node). Which "
        "arguments of fully_shard give the same collectives?",
        options=tuple(settings),
        wrong={name: cause for name, cause in causes.items() if name != right},
        given={"strategy": strategy, "nodes": nodes, "gpus_per_node": per_node},
        why=f"{strategy}: sharded {'in a node, copied across' if strategy in own else 'over all the'} {nodes} nodes; "
        f"parameters {'stay until backward' if right.endswith('False') else 'are freed after forward'}.",
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
    said = f"set_gradient_divide_factor({factor}) was called" if factor else "no divide factor was set"
    each = f"each of {micro_batches} micro-batches" if micro_batches > 1 else "the only micro-batch"
    return Number(
        text=f"Four ranks, FSDP2 in fp32; {said}. In {each} "
        f"backward computes, for one weight, the gradient {gradients[0]} on rank 0, {gradients[1]} on rank 1, "
        f"{gradients[2]} on rank 2 and {gradients[3]} on rank 3; the loop divides no loss, and clears gradients before "
        "the first. What does the optimizer read in .grad?",
        answer=answer,
        unit="",
        rel=0.005,
        given={"gradients": gradients, "micro_batches": micro_batches, "factor": factor},
        slips=(
            Slip(total, "that is the sum: FSDP divides it"),
            Slip(total / 4, "that is the mean over the ranks, which the divide factor takes the place of"),
            Slip(total / 4 / (factor or 1), "the factor takes the place of the number of ranks, it does not add to it"),
            Slip(answer / 4, "it is divided once: by the number of ranks, or by the factor"),
            Slip(answer / micro_batches, "micro-batches add up: only the loop can divide by their number"),
        ),
        why=f"{micro_batches} x ({' + '.join(map(str, gradients))}) / {factor or 4} = {answer:g}.",
    )


FSDP1_TO_FSDP2 = {  # the argument of FullyShardedDataParallel, and what is done today
    "auto_wrap_policy": "a loop that calls fully_shard on each block",
    "mixed_precision": "the argument mp_policy",
    "cpu_offload": "the argument offload_policy",
    "ignored_modules": "the argument ignored_params",
    "process_group": "the argument mesh",
    "forward_prefetch": "a method of the modules",
    "backward_prefetch": "a method of the modules",
    "use_orig_params": "nothing: parameters are never flattened",
    "limit_all_gathers": "nothing: events bound the memory without blocking the CPU",
    "sync_module_states": "set_model_state_dict with broadcast_from_rank0=True",
    "param_init_fn": "to_empty after sharding, then your initialisation",
}


@template(
    level=1,
    seconds=30,
    section="11.3",
    rule="FSDP1 to FSDP2: policy = a loop; strategy = reshard_after_forward + mesh; no_sync, prefetch = methods.",
    source="signatures of FullyShardedDataParallel and fully_shard, torch 2.13",
)
def argument_in_fsdp2(draw: random.Random) -> Choice:
    argument = draw.choice(tuple(FSDP1_TO_FSDP2))
    right = FSDP1_TO_FSDP2[argument]
    options = (right, *draw.sample(sorted(set(FSDP1_TO_FSDP2.values()) - {right}), 3))
    before = {now: [old for old, new in FSDP1_TO_FSDP2.items() if new == now] for now in options}
    return Choice(
        text=f"A script passes `{argument}` to FullyShardedDataParallel. What takes its place with fully_shard?",
        options=options,
        wrong={now: f"that takes the place of {' and '.join(before[now])}" for now in options[1:]},
        given={"argument": argument, "options": tuple(sorted(options))},
        why=f"{argument} becomes {right}.",
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
        slips=(
            Slip(whole / ranks, "full means whole tensors: with cpu_offload rank 0 has all of them"),
            Slip(whole, "without options it is sharded: each rank has its rows"),
            Slip(
                answer / 3 if adam else answer * 3, "count weights and Adam's two moments, or weights alone, as asked"
            ),
            Slip(answer * 16 / each, "gradients are in no state dict, and FSDP keeps no second copy of the weights"),
            Slip(answer / 2, "shards are fp32, 4 bytes each, whatever dtype is computed with"),
        ),
        why=f"{each} B x {billions(model.param_count)} = {written(whole, 'bytes')}"
        + ("; rank 0 has the whole." if full else f", divided by {ranks}."),
    )
