"""Which call does what, in which order, on which ranks."""

from __future__ import annotations

import functools
import random
from typing import Any

from fsdp_sim.learn.drill.draws import a_model
from fsdp_sim.learn.drill.question import Choice, Order
from fsdp_sim.learn.drill.questions.api.common import API, MODELS
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES, Memory, Op, Phase

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
    section="15.1",
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
            f"with that there would be {would[0]} all-gathers ({shares[0]}% of the bytes) and {would[1]} "
            f"reduce-scatters ({shares[1]}%)"
        )

    return Choice(
        text=f"A step of {micro_batches} micro-batches, {blocks} equal blocks and a root that is twice as large; fp32, "
        f"fully_shard's defaults, a call for each block and the model: {before[0]} all-gathers and {before[1]} "
        f"reduce-scatters. After one change: {after[0]} all-gathers with {gather:.0f}% of their former bytes, "
        f"{after[1]} reduce-scatters with {reduce:.0f}%. Which change?",
        options=options,
        wrong={change: differs(change) for change in options if change != right},
        given={"blocks": blocks, "micro_batches": micro_batches, "profile": profile, "options": tuple(sorted(options))},
        why=f"All-gathers went from {before[0]} to {after[0]}, their bytes to {gather:.0f}%; reduce-scatters from "
        f"{before[1]} to {after[1]}, bytes to {reduce:.0f}%: {right}.",
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
        why=f"That is: {'; '.join(f'{steps[i][0]} ({steps[i][1]})' for i in some)}.",
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
