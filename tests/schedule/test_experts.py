"""Expert parallelism beside FSDP: the program is what torch issues where it is sharded as torchtitan does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdp_sim import ranks
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.engine import run
from fsdp_sim.schedule import Exchange, Param, Program, Unit, build, state_bytes, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Memory, Op
from tests.schedule.experts_in_torch import recorded, units_of
from tests.schedule.test_fsdp2 import INSTALLED, needs_known_torch

SENT = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL)
MESHES = {  # by ranks
    2: [Plan(expert_parallel=2)],
    4: [Plan(expert_parallel=2), Plan(expert_parallel=4), Plan(expert_parallel=2, shard_size=2)],
}


def lines(plan: Plan, world_size: int, layers: int = 4) -> list[str]:
    return build(units_of(layers), replace(plan, torch=INSTALLED), world_size, steps=2).lines(every_op=True)


def program(plan: Plan, world_size: int, layers: int = 4) -> Program:
    return build(units_of(layers), replace(plan, torch=INSTALLED), world_size, steps=2)


def without_frees(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("free")]


@needs_known_torch
@pytest.mark.parametrize("world_size", MESHES)
def test_on_gloo_torch_issues_this_program_and_sends_these_bytes(world_size):
    """With gradients in fp16, because gloo has no operation that multiplies and sums. Its threads let go of what it has
    sent when they come to it, so what is freed when is compared below."""
    plans = [replace(plan, reduce_dtype="fp16") for plan in MESHES[world_size]]

    def on_rank():
        torch.set_num_threads(1)
        found = []
        for plan in plans:
            found.append(recorded(2, plan, dist.get_world_size(), gloo=True))
            dist.barrier()
        return found

    result = ranks.run(on_rank, world_size, progress=False)
    sent = [[]]
    for event in sorted((e for e in result.timeline.events if e.rank == 0), key=lambda e: e.seq):
        if event.op is Op.BARRIER:
            sent.append([])
        elif event.op in SENT and event.group_size > 1:
            sent[-1].append((event.op, event.bytes, event.group_size))
    for plan, theirs, of_torch in zip(plans, result[0], sent, strict=False):
        ours = program(plan, world_size, 2)
        assert without_frees(theirs) == without_frees(ours.lines(every_op=True)), plan
        assert of_torch == [(i.op, i.bytes, i.group_size) for i in ours.ops if i.op in SENT], plan


SETTINGS = [
    {},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"forward_prefetch": 2, "backward_prefetch": 2},
    {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"reduce_dtype": "fp16", "gradient_divide_factor": 1.0},
    {"grad_accum": 2, "requires_gradient_sync": "last"},
    {"cpu_offload": True},
    {"activation_checkpointing": 2, "reshard_after_forward": False},
    {"activation_checkpointing": "full", "grad_accum": 2, "backward_prefetch": 1},
]


@needs_known_torch
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_whatever_the_setting_the_program_is_that_of_torch(fields):
    meshes = [(n, mesh) for n, meshes in MESHES.items() for mesh in meshes]
    for world_size, mesh in meshes[1::2] if fields else meshes:  # 2 shards of experts; 1 in each of 2 replicas
        plan = replace(mesh, **fields)
        assert recorded(4, plan, world_size, gloo=False) == program(plan, world_size).lines(every_op=True), plan


def test_without_expert_parallelism_experts_are_parameters_like_others():
    plain = [replace(unit, exchange=None) for unit in units_of(4)]
    assert build(plain, Plan(), 4).instructions == build(units_of(4), Plan(), 4).instructions


@pytest.mark.parametrize(("shape", "of_rank"), [((8, 6), 2 * 6), ((2, 12), 6), ((4, 6), 6)])
def test_a_rank_keeps_its_part_of_its_experts(shape, of_rank):
    """Of 4 ranks 2 share out the experts, and FSDP cuts what both of the others have: along dimension 1 where a rank
    has fewer experts than there are ranks to cut them for."""
    experts = Unit("layers.0.experts", (Param("up", shape),), exchange=Exchange(bytes=64, needed_by="layers.0.sum"))
    block = Unit("layers.0", (Param("w", (4, 4)),), ("layers.0", ..., "layers.0.sum"))
    made = build((*toy(0), block, experts), Plan(expert_parallel=2), 4)
    kept = state_bytes(made.units, made.plan, 4)
    assert kept[Memory.SHARDED, "layers.0.experts"] == 4 * of_rank
    assert kept[Memory.OPTIMIZER, "layers.0.experts"] == 2 * 4 * of_rank
    gathered = {i.bytes for i in made.ops if i.op is Op.ALL_GATHER and i.unit == "layers.0.experts"}
    assert gathered == {2 * 4 * of_rank}


@pytest.mark.parametrize(
    ("ranks", "shape", "expert_parallel", "remedy"),
    [(24, (8, 4, 4), 8, {"shard_size": 8}), (24, (8, 4, 4), 2, {"shard_size": 8}),
     (48, (16, 6, 4), 4, {"expert_parallel": 8})],
)  # fmt: skip
def test_what_is_advised_where_ranks_cannot_cut_the_experts_can_be_built(ranks, shape, expert_parallel, remedy):
    experts = Unit("layers.0.experts", (Param("up", shape),), exchange=Exchange(bytes=64, needed_by="layers.0.sum"))
    block = Unit("layers.0", (Param("w", (4, 4)),), ("layers.0", ..., "layers.0.sum"))
    units = (*toy(0), block, experts)
    plan = Plan(expert_parallel=expert_parallel)
    ((name, value),) = remedy.items()

    with pytest.raises(ValueError, match=f"cuts it along dimension 1 .* {name}, such as {value}$"):
        build(units, plan, ranks)
    build(units, replace(plan, **remedy), ranks)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(expert_parallel=8), "expert_parallel is 8, which does not divide the 4 ranks of a shard group"),
        (Plan(expert_parallel=3, shard_size=3), "expert_parallel is 3, which does not divide the 4 experts of 'up'"),
    ],
)
def test_ranks_that_cannot_share_out_the_experts_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        build(units_of(2), plan, plan.shard_size or 4)
    with pytest.raises(ValueError, match="expert_parallel is 2, and a shard group has one rank; leave it 1"):
        build(units_of(2), Plan(expert_parallel=2), 1)
    with pytest.raises(ValueError, match="no unit has experts"):
        build(toy(2), plan, plan.shard_size or 4)


def test_a_record_says_which_ranks_gather_experts_together():
    """Of 4 ranks 0 and 2 have the same experts, and neighbours exchange tokens."""
    program = build(units_of(2), Plan(expert_parallel=2), 4)
    peers = Peers(run(program, lambda i: np.arange(1.0, 5.0)).timeline())
    together = {
        (e.op, e.unit, tuple(other.rank for other in peers.group(e)))
        for e in peers.timeline.ops
        if e.op in (Op.ALL_GATHER, Op.ALL_TO_ALL)
    }
    assert {ranks for op, unit, ranks in together if unit == "layers.1"} == {(0, 1, 2, 3)}
    assert {ranks for op, _, ranks in together if op is Op.ALL_TO_ALL} == {(0, 1), (2, 3)}
    of_experts = {ranks for op, unit, ranks in together if op is Op.ALL_GATHER and unit.endswith("experts")}
    assert of_experts == {(0, 2), (1, 3)}
