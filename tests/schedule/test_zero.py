"""The programs of ZeRO-1 and ZeRO-2: what the mini's `ZeroOptimizer` issues, with the memory of each stage."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import ranks
from fsdp_sim.schedule import Kind, Param, Program, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES, Memory, Op, Phase
from tests.oracles.flat_symbols import verify_flat
from tests.oracles.verify import verify
from tests.schedule.flat_random import random_units, random_whole
from tests.schedule.test_ddp import CAP_MB, SIZES, UNITS, collectives


def zero(stage: int, units: list[Unit] = UNITS, world_size: int = 2, steps: int = 1, **settings_: object) -> Program:
    return build(units, Plan(api=f"zero{stage}", **settings_), world_size, steps)


def train(stage):
    """The mini's ZeRO."""
    from fsdp_sim.mini.siblings.watch import watch
    from fsdp_sim.mini.siblings.zero import ZeroOptimizer
    from tests.mini.models import Toy

    torch.set_num_threads(1)
    model = Toy(3, sizes=SIZES)
    watch(model)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=stage, bucket_cap_mb=CAP_MB)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2])
def test_the_mini_issues_the_same_collectives_and_buffers(stage):
    events = [e for e in ranks.run(train, 2, stage).timeline.events if e.rank == 0 and e.phase]
    issued = [(e.step, e.micro_batch, str(e.op), e.unit, e.bytes) for e in events if e.op in COLLECTIVES]
    what = zero(stage, steps=2, bucket_cap_mb=CAP_MB, grad_accum=2)
    assert collectives(what) == issued
    if stage == 2:
        theirs = [(str(e.op), e.unit, e.bytes) for e in events if e.category is Memory.UNSHARDED_GRAD]
        ours = [(str(i.op), i.unit, i.bytes) for i in what if i.category is Memory.UNSHARDED_GRAD]
        assert ours == theirs


def test_stage_1_all_reduces_and_stage_2_reduce_scatters():
    first, second = (Counter(i.op for i in zero(s, bucket_cap_mb=CAP_MB).ops if i.op in COLLECTIVES) for s in (1, 2))
    assert first == {Op.ALL_REDUCE: 3, Op.ALL_GATHER: 3}
    assert second == {Op.REDUCE_SCATTER: 3, Op.ALL_GATHER: 3}


def test_parameters_are_gathered_after_the_optimizer_and_before_the_next_forward():
    what = [i.what for i in zero(2, steps=2).ops if i.op in (Op.OPTIM, Op.ALL_GATHER, Op.FWD)]
    assert what[5:8] == ["OPTIM", "ALL_GATHER(bucket.0) n=2", "FWD embed"]


def test_buckets_are_cut_into_equal_parts():
    issued = {i.bytes for i in zero(2, [Unit("root", (Param("w", (5, 5)),), segments=("root", ...))], 8).ops
              if i.op in COLLECTIVES}  # fmt: skip
    assert issued == {32 * 4}


def test_all_collectives_share_a_communicator():
    for stage in (1, 2):
        assert {i.communicator for i in zero(stage).ops if i.op in COLLECTIVES} == {"shard"}


def live(what: Program, category: Memory) -> list[int]:
    found, total = [], 0
    for i in what:
        if i.category is category:
            total += i.bytes if i.kind is Kind.ALLOC else -i.bytes
            found.append(total)
    return found


def test_stage_2_has_two_buckets_of_whole_gradients_at_most_and_then_shards():
    units = [Unit("root", (Param("embed", (8, 8)),), segments=("embed", ...)), *UNITS[1:]]
    what = zero(2, units, 4, bucket_cap_mb=256 / 2**20)  # one parameter per bucket
    assert max(live(what, Memory.UNSHARDED_GRAD)) == 2 * 256
    assert max(live(what, Memory.RS_OUTPUT)) == 4 * 256 // 4
    assert live(what, Memory.UNSHARDED_GRAD)[-1] == live(what, Memory.RS_OUTPUT)[-1] == 0
    assert max(live(zero(1, units, 4, bucket_cap_mb=256 / 2**20), Memory.UNSHARDED_GRAD)) == 4 * 256


@pytest.mark.parametrize("stage", [1, 2])
def test_with_one_micro_batch_in_sync_the_others_keep_whole_gradients(stage):
    what = zero(stage, grad_accum=3, requires_gradient_sync="last")
    assert {i.micro_batch for i in what.ops if i.op in COLLECTIVES and i.phase is Phase.BACKWARD} == {2}
    kept = [i.unit for i in what if i.category is Memory.UNSHARDED_GRAD and i.kind is Kind.ALLOC and i.micro_batch == 0]
    assert [u for u in kept if not u.startswith("bucket")] == ["root", "layers.2", "layers.1", "layers.0", "root"]


@pytest.mark.parametrize("stage", [1, 2])
@given(r=st.randoms(use_true_random=False), steps=st.integers(1, 3))
def test_every_program_is_right(stage, r, steps):
    units = random_units(r)
    plan, world_size = random_whole(r, f"zero{stage}")
    what = build(units, plan, world_size, steps)
    verify_flat(what)
    verify(what)
    counts = Counter((i.op, i.unit) for i in what.ops if i.op in COLLECTIVES)
    assert {n for (op, _), n in counts.items() if op is Op.ALL_GATHER} == ({steps} if world_size > 1 else set())
