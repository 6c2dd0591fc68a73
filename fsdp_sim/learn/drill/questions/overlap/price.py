"""What hiding costs: memory for what came early, latency for what is small."""

from __future__ import annotations

import functools
import random
from typing import Any

from fsdp_sim import engine
from fsdp_sim.learn.drill.draws import NAMES
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.overlap.common import GROUP, blocks
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import Kind
from fsdp_sim.spec import Model, block_shapes
from fsdp_sim.timeline import Lane, Memory, Op, Phase

MODELS = ("gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b")


@functools.cache
def block_parameters(model: Model) -> int:
    return sum(rows * columns for _, rows, columns in block_shapes(model))


@template(
    level=3,
    seconds=90,
    section="05.2",
    rule="FSDP2's forward holds 3 blocks by default (whole, its flat buffer, the next one's); lists of k: k + 2.",
    source=f"{GROUP}.wait_for_unshard: an all-gather's output lives one group longer in forward",
)
def held_by_prefetch(draw: random.Random) -> Number:
    key, depth = draw.choice(MODELS[1:]), draw.choice((0, 1, 2, 3, 4))
    parameters = block_parameters(Model.preset(key))
    settings = {"forward_prefetch": depth} if depth else {}
    profile = engine.memory(blocks(8, **settings))
    held = profile.peak_of((Memory.UNSHARDED, Memory.AG_OUTPUT), Phase.FORWARD) // (64 * 4 * 4)
    lists = {0: "the default prefetch and no lists", 1: "prefetch lists of the next block"}
    block = 2 * parameters
    return Number(
        text=f"A block of {NAMES[key]} has {parameters / 1e6:.0f} million parameters, gathered in bf16 by FSDP2 with "
        f"{lists.get(depth, f'prefetch lists of the next {depth} blocks')}. The CPU runs ahead. How many bytes of "
        "whole blocks does a rank hold at the peak of forward, as parameters and as flat all-gather buffers?",
        answer=held * block,
        unit="bytes",
        given={"model": key, "parameters": parameters, "depth": depth},
        mistakes=(
            Mistake(block, "that is the block that computes; the next one is already on its way"),
            Mistake(2 * block, "while it is copied out a block is there twice: flat and as parameters"),
            Mistake((held - 1) * block, "while it is copied out a block is there twice: flat and as parameters"),
            Mistake((held + 1) * block, "that is one too many: all-gathers wait for the copy-out two blocks earlier"),
            Mistake(2 * held * block, "bf16 takes 2 bytes, not 4"),
            Mistake(max(depth, 1) * block, "the block that computes and its flat buffer are there besides"),
        ),
        why=f"{held} blocks of {written(block, 'bytes')}: the one at work, and {held - 1} flat buffers.",
    )


BOUNDS = {
    "cpu": "the CPU stops until an earlier block has been freed on the GPU",
    "event": "all-gathers wait on the GPU for an earlier block's copy-out; the CPU goes on",
    "nothing": "nothing does: gathers are issued for as many blocks as the CPU is ahead",
}
BECAUSE = {
    "cpu": "Before a gather the limiter blocks the CPU until an earlier free has passed on the GPU: two are in flight.",
    "event": "FSDP2 never blocks the CPU; the all-gather stream waits for the event behind an earlier copy-out.",
    "nothing": "Neither the CPU nor a stream waits: a gather's memory is allocated when the CPU issues it.",
}


@template(
    level=2,
    seconds=45,
    section="05.8",
    rule="FSDP1's limit_all_gathers blocks the CPU; FSDP2 waits for events on the GPU; FSDP1 without: no bound.",
    source="torch/distributed/fsdp/_runtime_utils.py, _unshard (limit_all_gathers, _FreeEventQueue); " + GROUP,
)
def what_bounds_the_gathers(draw: random.Random) -> Choice:
    key = draw.choice(MODELS)
    mode = draw.choice(("FSDP1 with limit_all_gathers=True", "FSDP1 with limit_all_gathers=False", "FSDP2"))
    settings: dict[str, Any] = {} if mode == "FSDP2" else {"api": "fsdp1", "limit_all_gathers": mode.endswith("True")}
    forward = [i for i in blocks(6, **settings) if i.phase is Phase.FORWARD]
    stops = any(i.kind is Kind.CPU_BLOCK for i in forward)
    waits = any(
        i.kind is Kind.WAIT and i.lane is Lane.ALL_GATHER and i.event_lane is Lane.COMPUTE for i in forward
    )  # fmt: skip
    right = "cpu" if stops else "event" if waits else "nothing"
    reasons = {
        "cpu": "only FSDP1's rate limiter blocks the CPU, and only where it is on",
        "event": "FSDP2 alone lets its all-gather stream wait for copies of earlier blocks",
        "nothing": "here something bounds the blocks under way",
    }
    never = "gloo or NCCL does: a communicator takes at most two collectives at a time"
    wrong = {BOUNDS[kind]: why for kind, why in reasons.items() if kind != right}
    return Choice(
        text=f"{NAMES[key]} in blocks under {mode}. The CPU is far ahead of the GPU in forward. What bounds the number "
        "of gathered blocks in memory?",
        options=(*BOUNDS.values(), never),
        wrong=wrong | {never: "a communicator queues whatever is issued, and their buffers are there from then on"},
        given={"mode": mode},
        why=BECAUSE[right],
    )


@template(
    level=2,
    seconds=90,
    section="06.3",
    rule="Smaller units: the same bytes, more latencies: about 3 collectives per unit and step, each with its latency.",
)
def latency_of_small_units(draw: random.Random) -> Number:
    key = draw.choice(("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b"))
    layers, micros = Model.preset(key).n_layer, draw.choice((20, 25, 30, 40, 50))
    per_unit = sum(i.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) for i in blocks(4).ops if i.unit == "layers.1")
    more = (7 - 1) * layers * per_unit
    answer = more * micros * 1e-6
    return Number(
        text=f"{NAMES[key]}: {layers} blocks of 7 linear layers. Somebody makes every linear layer a unit of FSDP2 in "
        f"place of every block; units are freed after forward. A collective has {micros} us of latency beside its "
        "bytes, the network is the bottleneck, the root stays out of account. How much longer is a step?",
        answer=answer,
        unit="s",
        given={"layers": layers, "micros": micros},
        mistakes=(
            Mistake(answer * 7 / 6, "the blocks paid latencies as well: count the difference"),
            Mistake(answer / 3, "each unit has three collectives in a step: two all-gathers and a reduce-scatter"),
            Mistake(answer * 2 / 3, "you forgot the backward all-gathers"),
            Mistake(7 * answer, "the bytes stay the same, and six of seven latencies are new"),
            Mistake(0.0, "the bytes are the same, but not the number of collectives"),
        ),
        why=f"{per_unit} collectives per unit: {7 * layers * per_unit} in place of {layers * per_unit}, so {more} more "
        f"of {micros} us.",
    )


@template(
    level=2,
    seconds=90,
    section="02.7",
    rule="Time = latency + bytes / bandwidth: latency is a share p at latency x bandwidth x (1 - p) / p bytes.",
)
def bytes_worth_their_latency(draw: random.Random) -> Number:
    micros, gbytes = draw.choice((20, 30, 50, 100)), draw.choice((10, 20, 40, 200, 300))
    share = draw.choice((5, 10, 20, 25))
    answer = micros * 1e-6 * gbytes * 1e9 * (100 - share) / share
    return Number(
        text=f"An all-gather has a latency of {micros} us, and then brings a rank {gbytes} GB/s. How many bytes must "
        f"it bring for latency to be no more than {share}% of its time?",
        answer=answer,
        unit="bytes",
        given={"micros": micros, "gbytes": gbytes, "share": share},
        mistakes=(
            Mistake(micros * gbytes * 1e3, "that is where latency is half of the time"),
            Mistake(micros * gbytes * 1e3 * 100 / share, "that is a share of the transfer, not of the whole time"),
            Mistake(answer / 8, "the rate is in bytes already"),
            Mistake(answer * 8, "the rate is in bytes already"),
            Mistake(micros * gbytes * 1e3 * share / (100 - share), "that makes the transfer the small part"),
        ),
        why=f"Latency is {share}% if the transfer takes {(100 - share) / share:.3g} x {micros} us, at {gbytes} GB/s.",
    )
