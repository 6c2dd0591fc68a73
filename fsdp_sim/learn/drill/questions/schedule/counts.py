"""How many collectives a step has, by units and by what is freed."""

from __future__ import annotations

import random
from typing import Any

from fsdp_sim.learn.drill.draws import NAMES, a_model
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.schedule.common import BLOCKS, FSDP1, FSDP2, SMALL, counted, program_of
from fsdp_sim.learn.drill.template import template
from fsdp_sim.timeline import Op, Phase

RESHARD = {  # as the call says it, and what it means
    None: ("reshard_after_forward left at its default", "blocks are freed after forward, the root is not"),
    True: ("reshard_after_forward=True given to every unit and to the root", "all units are freed after forward"),
    False: ("reshard_after_forward=False given to every unit", "nothing is freed after forward"),
}


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
    mode, means = RESHARD[reshard]
    again = counted(Op.ALL_GATHER, layers, Phase.BACKWARD, reshard_after_forward=reshard)
    return Number(
        text=f"{name}: {BLOCKS.format(layers)}. It trains with {mode}, without accumulation. How many all-gathers does "
        "a rank issue in one step?",
        answer=counted(Op.ALL_GATHER, layers, reshard_after_forward=reshard),
        unit="all-gathers",
        rel=0,
        given={"layers": layers, "reshard": reshard},
        mistakes=(
            Mistake(layers + 1, "you forgot the backward all-gathers of what forward has freed"),
            Mistake(
                2 * layers + 2,
                "what stays whole after forward is gathered once: here " + ("all" if means[0] == "n" else "the root"),
            ),
            Mistake(2 * layers + 1, "you took the default, in which only the root stays whole after forward"),
            Mistake(2 * layers, "the root is a unit as well"),
            Mistake(layers, "the root is a unit as well"),
            Mistake(3 * layers + 2, "that counts the reduce-scatters too"),
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
        mistakes=(
            Mistake(3 * units, "what no call took is the root's: one more all-gather and one more reduce-scatter"),
            Mistake(3 * units + 3, "the root is not gathered again in backward"),
            Mistake(2 * units + 2, "you forgot the backward all-gathers"),
            Mistake(2 * units + 1, "those are the all-gathers alone"),
            Mistake(3 * (layers if by_linear else layers * linears) + 2, "a unit is what one call took, no other cut"),
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
    mode = draw.choice(tuple(STRATEGY))
    gathered = {
        i.unit for i in program_of(6, **STRATEGY[mode]).ops if i.op is Op.ALL_GATHER and i.phase is Phase.BACKWARD
    }
    right = (bool(gathered - {"root"}), "root" in gathered)
    return Choice(
        text=f"{name} is wrapped block by block; the root unit holds the rest. It trains with {mode}. For which units "
        "does a rank issue an all-gather in backward?",
        options=tuple(WHICH.values()),
        wrong={WHICH[kind]: why for kind, why in GATHERS_WHY.items() if kind != right},
        given={"mode": mode},
        why=f"Backward needs every unit whole, and gathers those that forward freed: {WHICH[right]}.",
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
        mistakes=(
            Mistake(3 * layers + 1, "the recomputation runs in backward, where the block is whole already"),
            Mistake(3 * layers + 2, "the recomputation runs in backward, where the block is whole already"),
            Mistake(layers + 1, "what is freed after forward must be gathered for backward, checkpointed or not"),
            Mistake(2 * layers + 1, "that is the default, in which blocks are freed after forward and the root is not"),
            Mistake(2 * layers, "the root is gathered as well"),
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
        mistakes=(
            Mistake(units, "the last call takes what is left, at least the norm: a unit with an all-gather of its own"),
            Mistake(layers + len(own) + 1, "a list of modules is one unit"),
            Mistake(layers // group + 1, "a call on a module takes it out of the root: one unit more"),
            Mistake(layers // group + 3, "what no call has taken travels with the root, not by itself"),
            Mistake(2 * answer - 1, "that is forward and backward"),
        ),
        why=f"{layers // group} calls for blocks, {len(own)} for others, and the root with the rest: {answer} units.",
    )
