"""Answers about scale, by counting: tensors, ring steps, slots of a pipeline, events of a run, ranks of a mesh."""

from __future__ import annotations

import functools
import itertools
import math

from fsdp_sim import engine
from fsdp_sim.learn.drill.questions.scaling.clusters import DIMENSIONS
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Model, Plan
from fsdp_sim.timeline import Op
from tests.learn.drill.oracles.shapes import KEYS, shapes_of


@functools.cache
def numbers_of(model: str) -> int:
    """Parameters, summed over the tensors."""
    return sum(math.prod(shape) for shape in shapes_of(model))


def ring(members: int) -> float:
    """What a rank of a ring sends of a message, chunk by chunk."""
    return sum(1 / members for _step in range(members - 1))


@functools.cache
def shard_size_that_fits(model: str, gpus: int, room: int, **_: object) -> str:
    """Double the group until each tensor's rows, cut by themselves, fit with gradient and two moments."""
    ranks = 8
    while sum(16 * math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes_of(model)) > room * 1e9:
        ranks *= 2
    return f"{ranks} GPUs, {gpus // ranks} copies"


@functools.cache
def leaves_a_node(model: str, nodes: int, hsdp: bool, **_: object) -> float:
    """Over the collectives of the program that is issued, those whose ring has ranks on several nodes."""
    rows = -(-numbers_of(model) // (4 * 4096)) // 256 * 256
    units = [Unit("root", segments=(...,)), *(Unit(f"layers.{i}", (Param("weight", (rows, 4096)),)) for i in range(4))]
    plan = Plan(param_dtype="bf16", reduce_dtype="fp32", shard_size=8 if hsdp else None)
    total = 0.0
    for i in build(units, plan, 8 * nodes).ops:
        rounds = {Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 1, Op.ALL_REDUCE: 2}.get(i.op, 0)
        if not rounds or (hsdp and i.op is not Op.ALL_REDUCE):
            continue
        rings = 8 if hsdp else 1  # a rank of each node in every one of 8 rings, or one ring through all ranks
        total += rings * rounds * ring(i.group_size) * i.bytes
    return total


@functools.cache
def flops_of_a_token(model: str) -> float:
    """Forward, gradients of the inputs, gradients of the weights: a product and a sum for each weight."""
    return sum(2.0 * math.prod(shape) for _pass in range(3) for shape in shapes_of(model))


def utilisation_of_tokens(model: str, tokens: float, peak: float, **_: object) -> float:
    busy_s = tokens * flops_of_a_token(model) / peak  # of each second
    return 100 * busy_s


@functools.cache
def days_of_a_run(model: str, gpus: int, tokens: int, share: int, peak: float, **_: object) -> float:
    """Day by day, until all tokens have been seen."""
    left = tokens * 1e12
    a_day = 86400 / (flops_of_a_token(model) / (peak * share / 100)) * gpus
    days = 0
    while left > a_day:
        left -= a_day
        days += 1
    return days + left / a_day


def weak_scaling(few: int, more: int, before: int, after: int, **_: object) -> float:
    """Seconds that a GPU takes for its million tokens, before and after."""
    seconds = [1e6 / (rate / gpus) for rate, gpus in ((before, few), (after, more))]
    return 100 * seconds[0] / seconds[1]


def strong_scaling(few: int, factor: int, compute: int, exposed: int, **_: object) -> float:
    """GPU-seconds of a step, before and after."""
    before = sum(compute + exposed for _gpu in range(few))
    after = sum(compute / factor + exposed for _gpu in range(few * factor))
    return 100 * before / after


@functools.cache
def slowed(slower: int) -> float:
    """Two ranks play a step of blocks whose collectives cost nothing; one of them computes more slowly."""
    units = [Unit("root", segments=(...,)), *(Unit(f"layers.{i}", (Param("weight", (64, 4)),)) for i in range(4))]
    program = build(units, Plan(), 2)

    def seconds(i: object) -> float:
        return {Op.FWD: 1.0, Op.BWD: 2.0}.get(i.op, 0.0)  # type: ignore[attr-defined]

    even = engine.run(program, seconds).span_s
    return even / engine.run(program, engine.straggler(seconds, 2, rank=1, factor=1 + slower / 100)).span_s


def one_slow_rank(slower: int, **_: object) -> float:
    return 100 * (1 - slowed(slower))


@functools.cache
def gpus_for_a_model(model: str, memory: float, reserved: int, **_: object) -> int:
    """A node more until the tensors, each with gradient, copy and moments, fit."""
    for nodes in itertools.count(1):
        mine = sum((4 + 4 + 4 + 4) * math.prod(shape) / (8 * nodes) for shape in shapes_of(model))
        if mine <= (memory - reserved) * 2**30:
            return 8 * nodes
    raise AssertionError


@functools.cache
def steps_of_a_run(
    gpus: int, rows: int, length: int, accumulated: int, tokens: float, hsdp: bool, **_: object
) -> float:  # fmt: skip
    """Rank by rank: those of a mesh of copies and shards, each with rows of its own."""
    mesh = itertools.product(range(gpus // 8), range(8)) if hsdp else itertools.product(range(1), range(gpus))
    per_step = sum(rows * length for _rank in mesh for _micro_batch in range(accumulated))
    return tokens * 1e12 / per_step


@functools.cache
def pipeline_bubble(stages: int, micro_batches: int, **_: object) -> float:
    """When each stage ends each micro-batch; a stage waits for the one before, and for itself."""
    ends = [0] * stages
    for _micro_batch in range(micro_batches):
        for stage in range(stages):
            ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0) + 1
    return 100 * (1 - micro_batches / ends[-1])


@functools.cache
def time_between_failures(days: int, failures: int, gpus: int, wanted: int, **_: object) -> float:
    """Failures of one GPU in a second, added up over the GPUs."""
    of_one = failures / (gpus * days * 24 * 60 * 60)
    return 1 / sum(of_one for _gpu in range(wanted))


@functools.cache
def goodput(days: int, interval: int, save: int, failures: int, restart: int, **_: object) -> float:
    """One save after the other, and failures that come ever later in the interval between two saves."""
    total = days * 24 * 60
    useful = float(total) - sum(save / 60 for _save in range(total // interval))
    for failure in range(failures):
        useful -= restart + interval * (failure + 0.5) / failures
    return 100 * useful / total


@functools.cache
def latency_of_a_long_ring(few: int, more: int, hop: int, blocks: int, **_: object) -> float:
    """Collectives as they are issued for the blocks, and the steps that each chunk goes from rank to rank."""

    def steps(members: int) -> int:
        held, count = {0}, 0
        while len(held) < members:  # a chunk has come to so many ranks
            held.add(len(held))
            count += 1
        return count

    units = [Unit("root", segments=(...,)), *(Unit(f"layers.{i}", (Param("weight", (64, 4)),)) for i in range(3))]
    issued = sum(i.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) for i in build(units, Plan(), 8).ops) / 3
    return issued * blocks * (steps(more) - steps(few)) * hop * 1e-6


def ranks_of_a_group(ranks: int, shards: int, rank: int, which: str, **_: object) -> str:
    """Coordinates handed out in order, the last one fastest; a group shares the other coordinate."""
    places = dict(enumerate(itertools.product(range(ranks // shards), range(shards))))
    same = 0 if which == "shard" else 1
    group = [str(other) for other, place in places.items() if place[same] == places[rank][same]]
    return ", ".join(group if len(group) <= 8 else [*group[:3], "...", group[-1]])


@functools.cache
def busiest_dimension(model: str, tensor: int, shards: int, copies: int, tokens: int, **_: object) -> str:
    """Message by message: of every block its four activations, of every tensor its part."""
    dims = Model.preset(KEYS[model])
    activations = [tokens * dims.d_model * 2 for _block in range(dims.n_layer) for _all_reduce in range(4)]
    tensors = [math.prod(shape) / tensor for shape in shapes_of(model)]
    sent = (
        sum(2 * ring(tensor) * n_bytes for n_bytes in activations),
        sum(ring(shards) * n * n_bytes for n in tensors for n_bytes in (2, 2, 4)),
        sum(2 * ring(copies) * 4 * n / shards for n in tensors),
    )
    assert sorted(sent)[-1] > 1.1 * sorted(sent)[-2]
    return DIMENSIONS[sent.index(max(sent))]
