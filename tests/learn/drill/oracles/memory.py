"""Answers about memory, computed in another way than the templates do."""

import functools
import math

import torch

from fsdp_sim import engine
from fsdp_sim.cost.activations import block_activations
from fsdp_sim.learn.quantity import in_unit
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.schedule.states import state_bytes
from fsdp_sim.spec import Model, Plan
from fsdp_sim.timeline import Memory, Op
from tests.learn.drill.oracles.shapes import KEYS, shapes_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@functools.cache
def states_of_a_rank(model: str, ranks: int, **_: object) -> float:
    """Each tensor is cut by itself; parameter, gradient and two moments in fp32."""
    return sum(16 * math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes_of(model))


@functools.cache
def numbers_of(model: str) -> int:
    return sum(math.prod(shape) for shape in shapes_of(model))


@functools.cache
def held_by_rank_0(model: str, ranks: int, stage: int) -> int:
    """ZeRO deals the flat model out in turns; what a stage does not divide yet every rank has."""
    all_numbers = numbers_of(model)
    own = len(range(0, all_numbers, ranks))
    divided_from = {"fp16 parameter": (2, 3), "fp16 gradient": (2, 2), "copy": (4, 1), "mean": (4, 1), "square": (4, 1)}
    return sum(size * (own if stage >= since else all_numbers) for size, since in divided_from.values())


def states_of_a_zero_stage(model: str, ranks: int, stage: int, **_: object) -> float:
    return held_by_rank_0(model, ranks, stage)


def least_sharding_that_fits(model: str, ranks: int, room_gb: int) -> str:
    """Divide one thing more until it fits."""
    stage = 0
    while held_by_rank_0(model, ranks, stage) > room_gb * 10**9:
        stage += 1
    return ("DDP", "ZeRO-1", "ZeRO-2", "FSDP over all GPUs")[stage]


@functools.cache
def strategies_by_states(ranks: int, shards: int) -> tuple[str, ...]:
    """Store a thousand parameters tensor by tensor on every rank, and weigh the ranks."""
    holds = {name: 0 for name in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP over all GPUs")}
    hybrid = f"HSDP with {shards} GPUs to a copy"
    holds[hybrid] = 0
    for number in range(128 * 9):
        for size, since in ((2, 3), (2, 2), (12, 1)):
            for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "FSDP over all GPUs")):
                holds[name] += size * (stage < since or number % ranks == 0)
            holds[hybrid] += size * (number % shards == 0)
    return tuple(sorted(holds, key=holds.__getitem__))


def fewest_gpus(billions: int, gib: int, percent: int) -> int:
    """Add GPUs until the cut states go in; in whole numbers."""
    gpus = 1
    while 16 * billions * 10**9 * 100 > gpus * gib * 2**30 * percent:
        gpus += 1
    return gpus


TENSORS = {  # how many in bf16, how many in fp32
    "fp32 parameters and gradients, two fp32 moments": (0, 4),
    "bf16 parameters and gradients, an fp32 copy, two fp32 moments": (2, 3),
    "bf16 parameters, fp32 gradients, an fp32 copy, two fp32 moments": (1, 4),
    "bf16 parameters and gradients, an fp32 sum of gradients, an fp32 copy, two fp32 moments": (2, 4),
    "bf16 parameters and gradients, two fp32 moments": (2, 2),
    "everything in bf16: parameters, gradients, two moments": (4, 0),
}


def recipe_of_a_number(model: str, claimed: str, recipes: tuple[str, ...]) -> str:
    """Count tensors of each dtype, and ask torch for their bytes."""

    def off(recipe: str) -> float:
        narrow, wide = TENSORS[recipe]
        one = narrow * torch.bfloat16.itemsize + wide * torch.float32.itemsize
        return abs(one * numbers_of(model) / in_unit(claimed, "bytes") - 1)

    return min(recipes, key=off)


@functools.cache
def whole_block(d: int, ffn: int, kv: int, dtype: str) -> float:
    """The matrices as torch would make them, on the meta device."""
    shapes = [(d, d), (kv, d), (kv, d), (d, d), (ffn, d), (ffn, d), (d, ffn), (d,), (d,)]
    return sum(torch.empty(shape, dtype=DTYPES[dtype], device="meta").nbytes for shape in shapes)


@functools.cache
def tables_of_the_root(model: str, dtype: str) -> float:
    """All of the model but its blocks, which have four to nine matrices that depend on the width alone."""
    found = Model.preset(KEYS[model])
    d, kv = found.d_model, found.kv_heads * found.d_head
    gated = found.ffn_type == "swiglu"
    block = 2 * d * d + 2 * d * kv + (3 if gated else 2) * d * found.d_ffn + (2 * d if gated else 13 * d)
    return DTYPES[dtype].itemsize * (numbers_of(model) - found.n_layer * block)


@functools.cache
def logits(batch: int, tokens: int, vocab: int, dtype: str) -> float:
    hidden = torch.empty(batch, tokens, 8, dtype=DTYPES[dtype], device="meta")
    return torch.nn.Linear(8, vocab, bias=False, device="meta", dtype=DTYPES[dtype])(hidden).nbytes


def activations_of_a_layer(batch: int, tokens: int, width: int, heads: int, fused: bool) -> float:
    """The paper's list, tensor by tensor: 16-bit tensors, and masks of one byte."""
    row, square = batch * tokens * width, batch * heads * tokens * tokens
    attention = 2 * row + 2 * 2 * row + 2 * row + 2 * row + row  # input; queries and keys; values; output; mask
    scores = 2 * square + square + 2 * square  # softmax; its dropout's mask; what dropout leaves
    feed_forward = 2 * row + 2 * 4 * row + 2 * 4 * row + row  # input; before GELU; after GELU; mask
    norms = 2 * 2 * row
    return attention + feed_forward + norms + (0 if fused else scores)


@functools.cache
def checkpointed_activations(model: str, batch: int, tokens: int) -> float:
    found = Model.preset(KEYS[model])
    plan = Plan(param_dtype="bf16", micro_batch=batch, seq_len=tokens)
    return found.n_layer * block_activations(found, plan).input_bytes


@functools.cache
def states_of_hsdp(model: str, nodes: int, shards: int) -> float:
    """What the simulator keeps of each tensor on this mesh, and gradients like the parameters."""
    params = tuple(Param(f"p{i}", shape) for i, shape in enumerate(shapes_of(model)))
    kept = state_bytes([Unit("root", params)], Plan(shard_size=shards), nodes * shards)
    return sum(n_bytes * (2 if category is Memory.SHARDED else 1) for (category, _), n_bytes in kept.items())


def _layers(n_layer: int = 4) -> list[Unit]:
    layers = [Unit(f"layers.{i}", (Param("weight", (256,)),)) for i in range(n_layer)]
    return [Unit("root", (), ("embed", ..., "head")), *layers]


@functools.cache
def _between(category: Memory, plan: Plan, end_of: Op) -> float:
    """Bytes of a category per parameter, after the first micro-batch's last operation of a kind, in torch's program."""
    units = _layers()
    profile = engine.memory(build(units, plan, 32))
    ops = profile.program.instructions
    last = max(
        n
        for n, i in enumerate(ops)
        if i.micro_batch == 0 and i.phase == ("forward" if end_of is Op.FWD else "backward")
    )
    changes = [place for place, at in enumerate(profile.at) if at <= last]
    return int(profile.by_category[category][changes[-1]]) / sum(p.bytes / 4 for unit in units for p in unit.params)


def gradients_without_sync(model: str, reduce_dtype: str) -> float:
    plan = Plan(grad_accum=4, requires_gradient_sync="last", param_dtype="bf16", reduce_dtype=reduce_dtype)
    return numbers_of(model) * _between(Memory.UNSHARDED_GRAD, plan, Op.BWD)


def layers_at_the_peak(phase: str, prefetch: int, buffers: int) -> int:
    """Torch's bounds. Forward: the unit in use, and a buffer for each gather that may be under way or not let go yet.

    Backward: parameters, gradients, the next gather, and what is being reduced.
    """
    if phase == "forward":
        return 1 + (prefetch + 1 if prefetch else 2)
    return 2 + max(prefetch, 1) + buffers


def kept_until_backward(model: str, ranks: int, keep: str) -> float:
    plan = Plan(reshard_after_forward=False if keep == "False" else int(keep), param_dtype="bf16")
    assert ranks % 32 == 0
    return numbers_of(model) * _kept(plan)


@functools.cache
def _kept(plan: Plan) -> float:
    """Bytes per parameter more than with resharding, when forward ends."""
    more = 0.0
    for category in (Memory.UNSHARDED, Memory.SHARDED):
        more += _between(category, plan, Op.FWD)
    return more - 4 / 32


def largest_part(model: str, ranks: int, batch: int, tokens: int, offloaded: bool) -> str:
    found = Model.preset(KEYS[model])
    kv = found.kv_heads * found.d_head
    sizes = {
        "model states: fp32 parameters, gradients and Adam's moments": 0
        if offloaded
        else states_of_a_rank(model, ranks),
        "the inputs of all checkpointed blocks, in bf16": checkpointed_activations(model, batch, tokens),
        "one copy of the logits in fp32": logits(batch, tokens, found.vocab, "fp32"),
        "three gathered blocks in bf16": 3 * whole_block(found.d_model, found.d_ffn, kv, "bf16"),
    }
    return max(sizes, key=sizes.__getitem__)


def room_in_gib(gib: int, need_gb: int) -> float:
    return in_unit(f"{gib} GiB", "bytes") - in_unit(f"{need_gb} GB", "bytes")


@functools.cache
def states_of_lora(layers: int, width: int, kv: int, rank: int, **_: object) -> float:
    """Build a frozen block with its adapters, and add up what is reduced and what the optimizer keeps on four ranks."""
    shapes = [(rank, width), (width, rank), (rank, width), (kv, rank)]
    trained = [Param(f"adapter{i}", shape) for i, shape in enumerate(shapes)]
    frozen = [Param(f"base{i}", (width, rows), requires_grad=False) for i, rows in enumerate((width, kv))]
    blocks = [Unit(f"layers.{i}", (*frozen, *trained)) for i in range(2)]
    units = [Unit("root", (), ("embed", ..., "head")), *blocks]
    moments = 4 * sum(n for (what, _), n in state_bytes(units, Plan(), 4).items() if what is Memory.OPTIMIZER)
    gradients = sum(i.bytes for i in build(units, Plan(), 4).ops if i.op is Op.REDUCE_SCATTER)
    return (moments + gradients) / len(blocks) * layers


@functools.cache
def padding_in_the_gather(rows: int, ranks: int) -> int:
    """Cut as torch does, and fill every piece up to the first; ranks without a piece send padding alone."""
    pieces = [len(piece) for piece in torch.empty(rows, 1).chunk(ranks)]
    pieces += [0] * (ranks - len(pieces))
    return sum(pieces[0] - piece for piece in pieces)
