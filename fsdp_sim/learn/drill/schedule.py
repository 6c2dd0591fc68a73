"""The schedule: how many collectives a step has, in which order they are issued, and what changes that."""

from __future__ import annotations

import functools
import random
from typing import Any

from fsdp_sim.learn.drill.draws import NAMES, a_model
from fsdp_sim.learn.drill.question import Choice, Number, Order, Slip
from fsdp_sim.learn.drill.template import template
from fsdp_sim.schedule import Instruction, Kind, Program, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Memory, Op, Phase

FSDP2 = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup"
FSDP1 = "torch/distributed/fsdp/_runtime_utils.py"
RANKS = 8
BLOCKS = "each of its {} blocks is a unit of FSDP2 (fully_shard), the root unit holds embeddings and head"
RESHARD = {  # as the call says it, and what it means
    None: ("reshard_after_forward left at its default", "blocks are freed after forward, the root is not"),
    True: ("reshard_after_forward=True given to every unit and to the root", "all units are freed after forward"),
    False: ("reshard_after_forward=False given to every unit", "nothing is freed after forward"),
}
SMALL = ("gpt2-1.5b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b")


@functools.cache
def program_of(layers: int, **settings: Any) -> Program:
    """A step of blocks and a root that owns the rest."""
    return build(toy(layers), Plan(**settings), RANKS)


@functools.cache
def counted(op: Op, layers: int, phase: Phase | None = None, **settings: Any) -> int:
    """How many of one collective a step issues: that of three blocks, and what the fourth adds for each further one."""
    three, four = (sum(i.op is op and phase in (None, i.phase) for i in program_of(n, **settings).ops) for n in (3, 4))
    return three + (layers - 3) * (four - three)


def accumulated(op: Op, layers: int, micro_batches: int, **settings: Any) -> int:
    """The same where gradients are accumulated: that of two micro-batches, and what the third adds."""
    two, three = (counted(op, layers, grad_accum=n, **settings) for n in (2, 3))
    return two + (micro_batches - 2) * (three - two)


@template(
    level=1,
    seconds=60,
    section="04.3",
    rule="All-gathers per step, L blocks and a root: 2L + 1 by default, 2L + 2 if the root reshards, L + 1 if none.",
    source=f"{FSDP2}; the root's default: _fsdp_state.py, FSDPState._lazy_init",
)
def gathers_in_a_step(draw: random.Random) -> Number:
    name, model = a_model(draw, *SMALL)
    layers, reshard = model.n_layer, draw.choice((None, True, False))
    said, means = RESHARD[reshard]
    again = counted(Op.ALL_GATHER, layers, Phase.BACKWARD, reshard_after_forward=reshard)
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. It trains with {said}, without accumulation. How many all-gathers does "
        "a rank issue in one step?",
        answer=counted(Op.ALL_GATHER, layers, reshard_after_forward=reshard),
        unit="all-gathers",
        rel=0,
        given={"layers": layers, "reshard": reshard},
        slips=(
            Slip(layers + 1, "you forgot the backward all-gathers of what forward has freed"),
            Slip(
                2 * layers + 2,
                "what stays whole after forward is gathered once: here " + ("all" if means[0] == "n" else "the root"),
            ),
            Slip(2 * layers + 1, "you took the default, in which only the root stays whole after forward"),
            Slip(2 * layers, "the root is a unit as well"),
            Slip(layers, "the root is a unit as well"),
            Slip(3 * layers + 2, "that counts the reduce-scatters too"),
        ),
        why=f"Forward gathers {layers} blocks and the root; {means}, so backward gathers {again} more.",
    )


LINEARS = {"gpt2-1.5b": 4, "gpt3-175b": 4, "llama2-7b": 7, "llama2-13b": 7, "llama3-70b": 7}


@template(
    level=2,
    seconds=90,
    section="06.3",
    rule="A unit of FSDP costs 2 all-gathers and 1 reduce-scatter per step (the root 1 and 1), however small it is.",
    source=f"{FSDP2}.unshard and post_backward",
)
def collectives_of_a_wrapping(draw: random.Random) -> Number:
    key = draw.choice(tuple(LINEARS))
    _, model = a_model(draw, key)
    layers, linears, by_linear = model.n_layer, LINEARS[key], draw.choice((True, False))
    units = layers * linears if by_linear else layers
    answer = counted(Op.ALL_GATHER, units) + counted(Op.REDUCE_SCATTER, units)
    which = f"each of the {linears} linear layers of every block" if by_linear else "each block"
    return Number(
        text=f"{NAMES[key]} has {layers} blocks with {linears} linear layers each, beside norms and embeddings. "
        f"Somebody calls fully_shard on {which}, then on the model, with torch's defaults. All-gathers and "
        "reduce-scatters together: how many collectives does a rank issue per step?",
        answer=answer,
        unit="collectives",
        rel=0,
        given={"units": units},
        slips=(
            Slip(3 * units, "what no call took is the root's: one more all-gather and one more reduce-scatter"),
            Slip(3 * units + 3, "the root is not gathered again in backward"),
            Slip(2 * units + 2, "you forgot the backward all-gathers"),
            Slip(2 * units + 1, "those are the all-gathers alone"),
            Slip(3 * (layers if by_linear else layers * linears) + 2, "a unit is what one call took, no other cut"),
        ),
        why=f"{units} units: {units} + {units} all-gathers and {units} reduce-scatters; the root: one of each.",
    )


STRATEGY: dict[str, dict[str, Any]] = {
    "FSDP2 with reshard_after_forward left at its default": {},
    "FSDP2 with reshard_after_forward=True on every unit and on the root": {"reshard_after_forward": True},
    "FSDP2 with reshard_after_forward=False everywhere": {"reshard_after_forward": False},
    "FSDP1 with FULL_SHARD": {"api": "fsdp1"},
    "FSDP1 with SHARD_GRAD_OP": {"api": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP"},
}
WHICH = {
    (True, False): "all blocks, but not the root",
    (True, True): "all blocks and the root",
    (False, True): "the root alone",
    (False, False): "no unit",
}
GATHERS_WHY = {
    (True, False): "that holds where blocks are freed after forward, and the root is not",
    (True, True): "that needs a root that was freed after forward",
    (False, True): "backward begins with the root: it is the last unit one would free",
    (False, False): "that holds only where parameters stay whole after forward",
}


@template(
    level=1,
    seconds=45,
    section="04.3",
    rule="Backward gathers what forward freed: by default every block, but not the root (FSDP1 FULL_SHARD: the same).",
    source=f"_fsdp_state.py, FSDPState._lazy_init; {FSDP1}, _post_forward_reshard",
)
def gathered_again(draw: random.Random) -> Choice:
    name, _ = a_model(draw, *SMALL)
    said = draw.choice(tuple(STRATEGY))
    gathered = {
        i.unit for i in program_of(6, **STRATEGY[said]).ops if i.op is Op.ALL_GATHER and i.phase is Phase.BACKWARD
    }
    right = (bool(gathered - {"root"}), "root" in gathered)
    return Choice(
        text=f"{name} is wrapped block by block; the root unit holds the rest. It trains with {said}. For which units "
        "does a rank issue an all-gather in backward?",
        options=tuple(WHICH.values()),
        wrong={WHICH[kind]: why for kind, why in GATHERS_WHY.items() if kind != right},
        given={"said": said},
        why=f"Backward needs every unit whole, and gathers those that forward freed: {WHICH[right]}.",
    )


SAID = {
    Op.ALL_GATHER: "all-gather of",
    Op.FWD: "forward of",
    Op.BWD: "backward of",
    Op.REDUCE_SCATTER: "reduce-scatter of",
}


def thing(i: Instruction, first: int) -> str:
    """An operation as a question says it; blocks are counted from ``first``."""
    return f"{SAID[i.op]} block {first + int(i.unit.removeprefix('layers.'))}"


FORWARD: dict[str, dict[str, Any]] = {
    "FSDP2 with its default, implicit prefetch": {},
    "FSDP2, each block with set_modules_to_forward_prefetch of the next block": {"forward_prefetch": 1},
    "FSDP2, each block with set_modules_to_forward_prefetch of the next two blocks": {"forward_prefetch": 2},
}


@template(
    level=2,
    seconds=90,
    section="05.2",
    rule="Implicit prefetch issues AG(i+1) after FWD(i); an explicit list of k issues AG(i+1)..AG(i+k) before FWD(i).",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState._pre_forward",
)
def issued_in_forward(draw: random.Random) -> Order:
    said, layers = draw.choice(tuple(FORWARD)), draw.choice((12, 24, 32, 40, 80))
    first = "layers.0", "layers.1", "layers.2"
    ops = [
        i for i in program_of(6, **FORWARD[said]).ops
        if i.phase is Phase.FORWARD and i.op in (Op.ALL_GATHER, Op.FWD) and i.unit in first
    ]  # fmt: skip
    answer = tuple(thing(i, 1) for i in ops)
    return Order(
        text=f"A model of {layers} blocks under {said}. Put what the CPU issues for its first three blocks in forward "
        "in the order in which it issues it. (The GPU may run some of it side by side.)",
        options=tuple(sorted(answer)),
        answer=answer,
        because={a: "its all-gather must have been issued before it" for a in answer if a.startswith("forward")}
        | {a: "a list asks right after its block is whole, and before it computes" for a in answer if "gather" in a},
        given={"said": said, "layers": layers},
        why="A block issues its own all-gather before its forward"
        + (
            ", unless the list of an earlier block has done so." if "set_modules" in said else "; nobody asked earlier."
        ),
    )


BACKWARD: dict[str, dict[str, Any]] = {
    "FSDP2 with its default prefetch": {},
    "FSDP1 with BackwardPrefetch.BACKWARD_PRE": {"api": "fsdp1"},
    "FSDP1 with BackwardPrefetch.BACKWARD_POST": {"api": "fsdp1", "backward_prefetch": "BACKWARD_POST"},
    "FSDP1 with its backward prefetch switched off": {"api": "fsdp1", "backward_prefetch": "none"},
}


@template(
    level=2,
    seconds=120,
    section="05.4",
    rule="Backward: PRE (and FSDP2) AG(i-1) BWD(i) RS(i); POST BWD(i) AG(i-1) RS(i); None BWD(i) RS(i) AG(i-1).",
    source=f"{FSDP2}.pre_backward and post_backward; {FSDP1}, _pre_backward_hook and _post_backward_hook",
)
def issued_in_backward(draw: random.Random) -> Order:
    said, layers = draw.choice(tuple(BACKWARD)), draw.choice((12, 24, 32, 40, 80))
    wanted = {Op.ALL_GATHER: ("layers.3", "layers.2"), Op.BWD: ("layers.4", "layers.3")}
    wanted[Op.REDUCE_SCATTER] = wanted[Op.BWD]
    ops = [
        i for i in program_of(8, **BACKWARD[said]).ops
        if i.phase is Phase.BACKWARD and i.unit in wanted.get(i.op, ())
    ]  # fmt: skip
    answer = tuple(thing(i, layers // 2 - 3) for i in ops)
    return Order(
        text=f"Backward in a model of {layers} blocks under {said}, one micro-batch, parameters freed after forward. "
        "Put these in the order in which the CPU issues them.",
        options=tuple(sorted(answer)),
        answer=answer,
        because={a: "a reduce-scatter needs the gradients of its block's backward" for a in answer if "reduce" in a}
        | {a: "this setting decides when the block before is asked for" for a in answer if "gather" in a},
        given={"said": said, "layers": layers},
        why={
            "BACKWARD_POST": "POST asks for the block before after this backward, but before this reduce-scatter.",
            "off": "Without it a block is gathered when its own backward needs it, after this reduce-scatter.",
        }.get(said.split(".")[-1].split()[-1], "The block before is asked for before this block's backward."),
    )


LIFE = {
    Op.ALL_GATHER: "its all-gather for ", Op.FWD: "its forward", Op.BWD: "its backward",
    Op.REDUCE_SCATTER: "its reduce-scatter", Op.ALL_REDUCE: "the all-reduce of its gradients",
    Op.FREE: "its whole parameters are freed in backward", Op.H2D: "its shard is copied to the GPU for ",
    Op.D2H: "its gradient is copied to the CPU",
}  # fmt: skip


@template(
    level=1,
    seconds=90,
    section="04.3",
    rule="A block's step: gather, forward, free, gather, backward, free, reduce-scatter (HSDP: then all-reduce).",
    source=f"{FSDP2}.post_backward: reshard() comes before the reduce-scatter",
)
def life_of_a_block(draw: random.Random) -> Order:
    name, _ = a_model(draw, *SMALL)
    reshard, hsdp = draw.choice((True, False)), draw.choice((True, False))
    offload = draw.choice((True, False)) and not reshard and not hsdp
    program = program_of(5, reshard_after_forward=reshard, shard_size=4 if hsdp else None, cpu_offload=offload)
    answer = tuple(
        LIFE[i.op] + (i.phase if i.op in (Op.ALL_GATHER, Op.H2D) else "")
        for i in program
        if i.unit == "layers.2" and i.op in LIFE and not (i.op is Op.FREE and not _frees_in_backward(i))
    )
    settings = [f"reshard_after_forward={reshard}", "HSDP on 2 x 4 ranks" if hsdp else "one shard group of 8 ranks"]
    settings += ["parameters offloaded to the CPU"] * offload
    return Order(
        text=f"An inner block of {name} is one unit of FSDP2: {', '.join(settings)}. Put what happens to it in one "
        "step in the order in which it is issued.",
        options=tuple(sorted(answer)),
        answer=answer,
        because={LIFE[Op.FREE]: "what is sent are gradients; whole parameters go as soon as backward is done"},
        given={"reshard": reshard, "hsdp": hsdp, "offload": offload},
        why="Whole before it computes, freed as soon as its backward is done, then its gradients are reduced"
        + (": within the shard group, and then between the copies." if hsdp else "."),
    )


def _frees_in_backward(i: Instruction) -> bool:
    return i.kind is Kind.FREE and i.category is Memory.UNSHARDED and i.phase is Phase.BACKWARD


ACCUMULATE: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "set_requires_gradient_sync(False) in all micro-batches but the last": {"requires_gradient_sync": "last"},
    "reshard_after_forward=False on every unit, and no other setting": {"reshard_after_forward": False},
    "reshard_after_forward=False on every unit, and set_reshard_after_backward(False) and "
    "set_requires_gradient_sync(False) in all micro-batches but the last": {
        "reshard_after_forward": False, "reshard_after_backward": "last", "requires_gradient_sync": "last",
    },
}  # fmt: skip


@template(
    level=2,
    seconds=90,
    section="08.4",
    rule="M micro-batches, gradient sync in the last alone: reduce-scatters / M; all-gathers are not reduced by it.",
    source=f"{FSDP2}.post_backward; torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
)
def collectives_of_accumulation(draw: random.Random) -> Number:
    name, model = a_model(draw, *SMALL)
    layers, micro_batches = model.n_layer, draw.choice((2, 4, 8, 16))
    said, op = draw.choice(tuple(ACCUMULATE)), draw.choice((Op.ALL_GATHER, Op.REDUCE_SCATTER))
    one, answer = counted(op, layers, **ACCUMULATE[said]), accumulated(op, layers, micro_batches, **ACCUMULATE[said])
    what = "all-gathers" if op is Op.ALL_GATHER else "reduce-scatters"
    whole, twice = layers + 1, 2 * layers + 1
    if op is Op.ALL_GATHER:
        slips = [
            Slip(twice * micro_batches, "that gathers again in every backward, as where forward frees the blocks"),
            Slip(whole * micro_batches, "that is a gather per unit and micro-batch, without those of backward"),
            Slip(twice, "to skip reductions does not skip gathers: every micro-batch has them"),
            Slip(whole, "that takes parameters that stay whole after backward too"),
        ]
    else:
        slips = [
            Slip(whole * micro_batches, "set_requires_gradient_sync(False) leaves the reduction to the last one"),
            Slip(whole, "without set_requires_gradient_sync(False) every micro-batch reduces its gradients"),
            Slip(twice, "a unit may be gathered twice, but its gradients are reduced once per backward"),
        ]
    slips += [Slip(n * layers, "the root is a unit as well") for n in (1, micro_batches)]
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. A step accumulates {micro_batches} micro-batches with {said}. How many "
        f"{what} does a rank issue per step?",
        answer=answer,
        unit=what,
        rel=0,
        given={"layers": layers, "micro_batches": micro_batches, "said": said, "what": str(op)},
        slips=tuple(slips),
        why=f"Each micro-batch that issues them issues {one}; here "
        + (f"all {micro_batches} do." if answer == micro_batches * one else "only one does."),
    )


@template(
    level=3,
    seconds=90,
    section="10.2",
    rule="HSDP all-reduces each unit's shard every micro-batch; with set_requires_all_reduce(is_last) once a step.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_all_reduce; _fsdp_collectives.py, foreach_reduce",
)
def all_reduces_of_hsdp(draw: random.Random) -> Number:
    name, model = a_model(draw, *SMALL)
    layers, micro_batches, copies = model.n_layer, draw.choice((2, 4, 8)), draw.choice((2, 4, 16))
    last = draw.choice((True, False))
    settings: dict[str, Any] = {"shard_size": 4, "requires_all_reduce": "last" if last else True}
    answer = accumulated(Op.ALL_REDUCE, layers, micro_batches, **settings)
    said = "set_requires_all_reduce(is_last_micro_batch)" if last else "torch's defaults"
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. It runs as HSDP with {copies} copies of 8 shards, {micro_batches} "
        f"micro-batches per step and {said}. How many all-reduces does a rank issue per step?",
        answer=answer,
        unit="all-reduces",
        rel=0,
        given={"layers": layers, "micro_batches": micro_batches, "last": last},
        slips=(
            Slip(
                micro_batches * (layers + 1), "reduce-scatters run in every micro-batch, all-reduces only in the last"
            ),
            Slip(layers + 1, "without a setting every micro-batch all-reduces"),
            Slip(layers, "the root has gradients too"),
            Slip(micro_batches * layers, "the root has gradients too"),
            Slip(answer * copies, "that counts the copies; each rank takes part in one group"),
            Slip(1, "every unit's gradients are reduced by themselves, as soon as they are there"),
        ),
        why=f"One for each of the {layers + 1} units "
        + ("in the last micro-batch alone." if last else f"in each of {micro_batches} micro-batches."),
    )


@template(
    level=2,
    seconds=60,
    section="07.4",
    rule="Activation checkpointing computes blocks twice, gathers no more often: backward has the unit whole anyway.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState._pre_forward (recomputation in backward)",
)
def gathers_with_checkpointing(draw: random.Random) -> Number:
    name, model = a_model(draw, *SMALL)
    layers, reshard = model.n_layer, draw.choice((None, True, False))
    answer = counted(Op.ALL_GATHER, layers, reshard_after_forward=reshard, activation_checkpointing="full")
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. Every block is checkpointed (non-reentrant activation checkpointing), "
        f"with {RESHARD[reshard][0]}. How many all-gathers does a rank issue in one step?",
        answer=answer,
        unit="all-gathers",
        rel=0,
        given={"layers": layers, "reshard": reshard},
        slips=(
            Slip(3 * layers + 1, "the recomputation runs in backward, where the block is whole already"),
            Slip(3 * layers + 2, "the recomputation runs in backward, where the block is whole already"),
            Slip(layers + 1, "what is freed after forward must be gathered for backward, checkpointed or not"),
            Slip(2 * layers + 1, "that is the default, in which blocks are freed after forward and the root is not"),
            Slip(2 * layers, "the root is gathered as well"),
        ),
        why=f"A block is whole in its backward, and is computed again there before it is freed: {answer}, as without.",
    )


@template(
    level=1,
    seconds=75,
    section="06.1",
    rule="One call of fully_shard = one unit = one all-gather per forward; the call on the model takes the rest.",
    source="torch/distributed/fsdp/_fully_shard/_fully_shard.py, fully_shard",
)
def units_of_calls(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    layers, group = model.n_layer, draw.choice((1, 2, 4))
    own = draw.choice(((), ("embedding",), ("embedding", "head")))
    units = layers // group + len(own)
    answer = counted(Op.ALL_GATHER, units, Phase.FORWARD)
    calls = f"every {group} consecutive blocks as one list" if group > 1 else "each block"
    also = f", also on the {' and on the '.join(own)}" if own else ""
    return Number(
        text=f"{name} is an embedding, {layers} blocks, a last norm and a head of its own weight. fully_shard is "
        f"called on {calls}{also}, and at the end on the model. How many all-gathers has one forward?",
        answer=answer,
        unit="all-gathers",
        rel=0,
        given={"layers": layers, "group": group, "own": own},
        slips=(
            Slip(units, "the last call takes what is left, at least the norm: a unit with an all-gather of its own"),
            Slip(layers + len(own) + 1, "a list of modules is one unit"),
            Slip(layers // group + 1, "a call on a module takes it out of the root: one unit more"),
            Slip(layers // group + 3, "what no call has taken travels with the root, not by itself"),
            Slip(2 * answer - 1, "that is forward and backward"),
        ),
        why=f"{layers // group} calls for blocks, {len(own)} for others, and the root with the rest: {answer} units.",
    )


PLACES: dict[str, dict[str, Any]] = {
    "FSDP2 with its defaults": {},
    "FSDP2 with reshard_after_forward=True on every unit and on the root": {"reshard_after_forward": True},
    "FSDP2 with reshard_after_forward=False everywhere": {"reshard_after_forward": False},
    "HSDP in FSDP2, reshard_after_forward by default": {"shard_size": 4},
}


@template(
    level=3,
    seconds=60,
    section="05.4",
    rule="Backward begins with the gather of what was freed last and ends with the root's reduction, which is exposed.",
    source="_fsdp_state.py, FSDPState._root_post_backward_final_callback",
)
def ends_of_backward(draw: random.Random) -> Choice:
    said, end, layers = draw.choice(tuple(PLACES)), draw.choice(("first", "last")), draw.choice((12, 24, 32, 40, 80))
    ops = [i for i in program_of(4, **PLACES[said]).ops if i.phase is Phase.BACKWARD and i.communicator]
    found = ops[0 if end == "first" else -1]
    names = {"root": "the root", "layers.3": f"block {layers - 1}", "layers.0": "block 0"}
    right = f"{str(found.op).lower().replace('_', '-')} of {names[found.unit]}"
    last = f"block {layers - 1}"
    reasons = {
        f"all-gather of {last}": "that is first only where blocks, and not the root, were freed after forward",
        "all-gather of the root": "that needs a root that was freed after forward",
        f"reduce-scatter of {last}": "that comes first only if backward gathers nothing",
        "reduce-scatter of block 0": "the root's gradients are reduced after those of all blocks",
        "reduce-scatter of the root": "the root is reduced last of all, and with copies an all-reduce follows it",
        "all-reduce of the root": "there is one only with HSDP, and then it is the last",
    }
    shown = [option for option in reasons if option != ("all-gather of the root" if end == "last" else "")]
    shown = [option for option in shown if option == right or option != f"all-gather of {last}" or end == "first"]
    if end == "first":
        shown = [option for option in shown if option not in ("reduce-scatter of block 0", "all-reduce of the root")]
    return Choice(
        text=f"Blocks 0 to {layers - 1} and a root with embedding and head train with {said}, one micro-batch. Which "
        f"collective does a rank issue {end} in backward?",
        options=tuple(shown),
        wrong={option: reasons[option] for option in shown if option != right},
        given={"said": said, "end": end, "layers": layers},
        why=f"Backward runs from the root's head to its embedding, gathers only what was freed, and reduces the root "
        f"in its final callback: the {end} is the {right}.",
    )
