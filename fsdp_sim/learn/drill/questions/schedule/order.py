"""In which order a step is issued."""

from __future__ import annotations

import random
from typing import Any

from fsdp_sim.learn.drill.draws import a_model
from fsdp_sim.learn.drill.question import Choice, Order
from fsdp_sim.learn.drill.questions.schedule.common import FSDP1, FSDP2, SMALL, program_of
from fsdp_sim.learn.drill.template import template
from fsdp_sim.schedule import Instruction, Kind
from fsdp_sim.timeline import Memory, Op, Phase

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
    mode, layers = draw.choice(tuple(FORWARD)), draw.choice((12, 24, 32, 40, 80))
    first = "layers.0", "layers.1", "layers.2"
    ops = [
        i for i in program_of(6, **FORWARD[mode]).ops
        if i.phase is Phase.FORWARD and i.op in (Op.ALL_GATHER, Op.FWD) and i.unit in first
    ]  # fmt: skip
    answer = tuple(thing(i, 1) for i in ops)
    return Order(
        text=f"A model of {layers} blocks under {mode}. Put what the CPU issues for its first three blocks in forward "
        "in the order in which it issues it. (The GPU may run some of it side by side.)",
        options=tuple(sorted(answer)),
        answer=answer,
        because={a: "its all-gather must have been issued before it" for a in answer if a.startswith("forward")}
        | {a: "a list asks right after its block is whole, and before it computes" for a in answer if "gather" in a},
        given={"mode": mode, "layers": layers},
        why="A block issues its own all-gather before its forward"
        + (
            ", unless the list of an earlier block has done so." if "set_modules" in mode else "; nobody asked earlier."
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
    mode, layers = draw.choice(tuple(BACKWARD)), draw.choice((12, 24, 32, 40, 80))
    wanted = {Op.ALL_GATHER: ("layers.3", "layers.2"), Op.BWD: ("layers.4", "layers.3")}
    wanted[Op.REDUCE_SCATTER] = wanted[Op.BWD]
    ops = [
        i for i in program_of(8, **BACKWARD[mode]).ops
        if i.phase is Phase.BACKWARD and i.unit in wanted.get(i.op, ())
    ]  # fmt: skip
    answer = tuple(thing(i, layers // 2 - 3) for i in ops)
    return Order(
        text=f"Backward in a model of {layers} blocks under {mode}, one micro-batch, parameters freed after forward. "
        "Put these in the order in which the CPU issues them.",
        options=tuple(sorted(answer)),
        answer=answer,
        because={a: "a reduce-scatter needs the gradients of its block's backward" for a in answer if "reduce" in a}
        | {a: "this setting decides when the block before is asked for" for a in answer if "gather" in a},
        given={"mode": mode, "layers": layers},
        why={
            "BACKWARD_POST": "POST asks for the block before after this backward, but before this reduce-scatter.",
            "off": "Without it a block is gathered when its own backward needs it, after this reduce-scatter.",
        }.get(mode.split(".")[-1].split()[-1], "The block before is asked for before this block's backward."),
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
    mode, end, layers = draw.choice(tuple(PLACES)), draw.choice(("first", "last")), draw.choice((12, 24, 32, 40, 80))
    ops = [i for i in program_of(4, **PLACES[mode]).ops if i.phase is Phase.BACKWARD and i.communicator]
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
        text=f"Blocks 0 to {layers - 1} and a root with embedding and head train with {mode}, one micro-batch. Which "
        f"collective does a rank issue {end} in backward?",
        options=tuple(shown),
        wrong={option: reasons[option] for option in shown if option != right},
        given={"mode": mode, "end": end, "layers": layers},
        why=f"Backward runs from the root's head to its embedding, gathers only what was freed, and reduces the root "
        f"in its final callback: the {end} is the {right}.",
    )
