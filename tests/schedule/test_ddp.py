"""DDP's programs: buckets as torch makes them, all-reduces as the mini's DDP issues them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fsdp_sim import ranks
from fsdp_sim.cost.transformer import workload
from fsdp_sim.schedule import Kind, Param, Program, Unit, build
from fsdp_sim.schedule.buckets import assign_to_buckets, buckets_of
from fsdp_sim.schedule.tree import walk_of
from fsdp_sim.spec import Model, Plan
from fsdp_sim.timeline import COLLECTIVES, Lane, Memory, Op, Phase
from tests.oracles.flat_symbols import verify_flat
from tests.oracles.verify import verify
from tests.schedule.flat_random import random_units, random_whole

SIZES = (8, 8, 8, 8)
UNITS = [
    Unit("root", (Param("embed", (4, 8)), Param("head", (8, 4))), segments=("embed", ..., "head")),
    *(Unit(f"layers.{n}", (Param("w", (8, 8)),)) for n in range(3)),
]  # the Toy of the mini's tests with those sizes
CAP_MB = 300 / 2**20


def ddp(units: list[Unit], world_size: int = 2, steps: int = 1, **settings_: object) -> Program:
    return build(units, Plan(api="ddp", **settings_), world_size, steps)


def collectives(what: Program) -> list[tuple[int, int, str, str, int]]:
    return [(i.step, i.micro_batch, str(i.op), i.unit, i.bytes) for i in what.ops if i.op in COLLECTIVES]


# Alone


def test_one_rank_has_the_gradients_of_its_parameters_and_no_buckets():
    program = ddp(UNITS, world_size=1, grad_accum=2)
    grads = [i for i in program.instructions if i.category is Memory.UNSHARDED_GRAD and i.kind is Kind.ALLOC]
    whole = sum(p.bytes for unit in UNITS for p in unit.params)

    assert not collectives(program)
    assert sum(i.bytes for i in grads) == whole, "made once, in the first of two micro-batches"
    assert {i.phase for i in grads} == {Phase.BACKWARD}
    assert [i.unit for i in program.ops if i.op is Op.ACCUMULATE], "the second adds to them"
    freed = [i for i in program.instructions if i.category is Memory.UNSHARDED_GRAD and i.kind is Kind.FREE]
    assert {i.phase for i in freed} == {Phase.OPTIMIZER}
    assert sum(i.bytes for i in freed) == whole, "zero_grad"


# Buckets


def of_torch(tensors: list[torch.Tensor], cap: int, first_cap: int | None) -> list[list[int]]:
    """torch's assignment when it rebuilds its buckets, in the order in which gradients came."""
    caps = [cap] if first_cap is None else [first_cap, cap]
    order = list(range(len(tensors)))
    return dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors), order)[0]


@given(
    numels=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    cap=st.integers(4, 600),
    first_cap=st.none() | st.integers(4, 300),
    dtypes=st.randoms(use_true_random=False),
    mixed=st.booleans(),
)
def test_buckets_are_torchs(numels, cap, first_cap, dtypes, mixed):
    types = [dtypes.choice(["fp32", "bf16"]) if mixed else "fp32" for _ in numels]
    tensors = [torch.empty(n, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[t])
               for n, t in zip(numels, types, strict=True)]  # fmt: skip
    ours = assign_to_buckets([(t.nbytes, d) for t, d in zip(tensors, types, strict=True)], cap, first_cap)
    theirs = of_torch(tensors, cap, first_cap)
    if mixed:  # torch has what is left over at the end in no order
        ours, theirs = sorted(ours), sorted(theirs)
    assert ours == theirs


def test_the_buckets_of_gpt2_124m_are_torchs():
    units = list(workload(Model.preset("gpt2-124m"), Plan(api="ddp")).units)
    plan = Plan(api="ddp")
    buckets = buckets_of(walk_of(units), plan, 8)
    assert sum(b.numel for b in buckets) == 124_439_808
    params = [p for unit, segment in walk_of(units) for p in unit.params if unit.segments_of(p)[0] == segment]
    tensors = [torch.empty(p.shape, device="meta") for p in reversed(params)]
    theirs = of_torch(tensors, 25 * 2**20, 2**20)
    assert [b.numel for b in buckets] == [sum(tensors[k].numel() for k in of) for of in theirs]
    assert buckets[0].bytes >= 2**20
    assert all(b.bytes >= 25 * 2**20 for b in buckets[1:-1])
    assert buckets[-1].parts.keys() <= {segment for _, segment in walk_of(units)[:2]}, "the embedding comes last"


def test_the_first_bucket_is_small_unless_somebody_asks_for_a_size():
    one = Unit("root", tuple(Param(f"w{n}", (2**18,)) for n in range(64)), segments=("root", ...))  # 1 MiB each
    issued = [i.bytes // 2**20 for i in ddp([one]).ops if i.op is Op.ALL_REDUCE]
    assert issued == [1, 25, 25, 13]
    asked = [i.bytes // 2**20 for i in ddp([one], bucket_cap_mb=20.0).ops if i.op is Op.ALL_REDUCE]
    assert asked == [20, 20, 20, 4]


# The program


def train(rank_settings):
    """The mini's DDP."""
    from contextlib import nullcontext

    from fsdp_sim.mini.siblings.ddp import DistributedDataParallel
    from tests.mini.models import Toy

    torch.set_num_threads(1)
    model = DistributedDataParallel(Toy(3, sizes=SIZES), bucket_cap_mb=CAP_MB)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for last in (False, True):
            with nullcontext() if last or rank_settings is True else model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("sync", [True, "last"])
def test_the_mini_issues_the_same_collectives(sync):
    events = [e for e in ranks.run(train, 2, sync).timeline.events if e.rank == 0]
    issued = [(e.step, e.micro_batch, str(e.op), e.unit, e.bytes) for e in events if e.op is Op.ALL_REDUCE]
    what = ddp(UNITS, 2, 2, bucket_cap_mb=CAP_MB, grad_accum=2, requires_gradient_sync=sync)
    assert collectives(what) == issued
    assert [u for _, _, _, u, _ in issued[:3]] == ["bucket.0", "bucket.1", "bucket.2"]


def test_a_bucket_goes_as_soon_as_its_last_gradient_is_there():
    order = [i.what for i in ddp(UNITS, bucket_cap_mb=CAP_MB).ops if i.op in (Op.BWD, Op.ALL_REDUCE)]
    assert order == [
        "BWD head", "BWD layers.2", "ALL_REDUCE(bucket.0) n=2",
        "BWD layers.1", "BWD layers.0", "ALL_REDUCE(bucket.1) n=2",
        "BWD embed", "ALL_REDUCE(bucket.2) n=2",
    ]  # fmt: skip


def test_compute_waits_for_the_buckets_at_the_end_of_backward_only():
    what = ddp(UNITS, bucket_cap_mb=CAP_MB).instructions
    waits = [k for k, i in enumerate(what) if i.kind is Kind.WAIT and i.lane is Lane.COMPUTE]
    last_backward = max(k for k, i in enumerate(what) if i.op is Op.BWD)
    optimizer = next(k for k, i in enumerate(what) if i.op is Op.OPTIM)
    assert len(waits) == 3
    assert all(last_backward < k < optimizer for k in waits)


def test_a_tied_parameter_comes_with_its_first_use():
    tied = Unit("root", (Param("w", (4, 4), used_by=("embed", "head")),), segments=("embed", ..., "head"))
    order = [i.what for i in ddp([tied, UNITS[1]]).ops if i.op in (Op.BWD, Op.ALL_REDUCE)]
    assert order == ["BWD head", "BWD layers.0", "BWD embed", "ALL_REDUCE(bucket.0) n=2"]


def test_frozen_parameters_are_in_no_bucket_and_below_them_nothing_runs_backward():
    frozen = Unit("layers.0", (Param("w", (8, 8), requires_grad=False),))
    root = Unit(
        "root", (Param("embed", (4, 8), requires_grad=False), Param("head", (8, 4))), segments=UNITS[0].segments
    )
    order = [i.what for i in ddp([root, frozen]).ops if i.op in (Op.BWD, Op.ALL_REDUCE)]
    assert order == ["BWD head", "ALL_REDUCE(bucket.0) n=2"]


def test_gradients_live_in_buckets_all_the_time():
    what = ddp(UNITS, steps=3, bucket_cap_mb=CAP_MB)
    grads = [i for i in what if i.category is Memory.UNSHARDED_GRAD]
    assert [i.kind for i in grads] == [Kind.ALLOC] * 3 + [Kind.FREE] * 3
    total = sum(math.prod(p.shape) * 4 for u in UNITS for p in u.params)
    assert sum(i.bytes for i in grads[:3]) == total
    assert what.instructions.index(grads[2]) < 3
    assert what.instructions[-1] is grads[-1]


def test_mixed_precision_halves_what_is_sent_unless_it_is_reduced_in_fp32():
    sent = {dtype: sum(i.bytes for i in ddp(UNITS, **dtype_).ops if i.op is Op.ALL_REDUCE)
            for dtype, dtype_ in (("fp32", {}), ("bf16", {"param_dtype": "bf16"}),
                                  ("both", {"param_dtype": "bf16", "reduce_dtype": "fp32"}))}  # fmt: skip
    assert sent["bf16"] * 2 == sent["fp32"] == sent["both"]


def test_without_sync_gradients_are_kept_and_segments_that_have_none_keep_nothing():
    units = [Unit("root", (Param("embed", (4, 8)), Param("head", (8, 4))), ("embed", ..., "norm", "head"))]
    kept = [i for i in ddp(units, grad_accum=2, requires_gradient_sync="last") if i.micro_batch == 0]
    made = [i.bytes for i in kept if i.category is Memory.UNSHARDED_GRAD and i.phase is Phase.BACKWARD]
    assert made == [4 * 8 * 4, 8 * 4 * 4]


@given(r=st.randoms(use_true_random=False), steps=st.integers(1, 3))
def test_every_program_is_right(r, steps):
    units = random_units(r)
    plan, world_size = random_whole(r, "ddp")
    what = build(units, plan, world_size, steps)
    verify_flat(what)
    verify(what)
    syncs = steps * (plan.grad_accum if plan.requires_gradient_sync is True else 1) * (world_size > 1)
    assert set(Counter(i.unit for i in what.ops if i.op is Op.ALL_REDUCE).values()) == ({syncs} if syncs else set())
    numel = sum(math.prod(p.shape) for u in units for p in u.params if p.requires_grad)
    assert sum(b.numel for b in buckets_of(walk_of(units), plan, world_size)) == numel


def test_gradients_that_are_never_reduced_are_refused():
    with pytest.raises(ValueError, match="'last'"):
        ddp(UNITS, requires_gradient_sync=False)


def test_torch_starts_with_the_same_caps():
    """The numbers that are written down here and in torch."""
    module = nn.parallel.distributed
    assert module._DEFAULT_BUCKET_CAP_MB == 25
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == 2**20


def test_gradients_of_a_second_micro_batch_are_added_to_the_bucket_in_place():
    program = ddp(UNITS, grad_accum=2, requires_gradient_sync=True)
    first, second = (
        [i.op for i in program.ops if i.micro_batch == n and i.op in (Op.ACCUMULATE, Op.RS_COPY_IN)] for n in (0, 1)
    )
    assert set(first) == {Op.RS_COPY_IN}
    assert set(second) == {Op.ACCUMULATE}


def test_the_parameters_of_a_unit_are_cast_before_the_first_of_its_segments():
    root = Unit("root", (Param("e", (4, 4)), Param("h", (4, 4))), ("embed", ..., "head"))
    ops = [i.what for i in ddp([root, Unit("layers.0", (Param("w", (4, 4)),))], param_dtype="bf16").ops]
    assert ops[:2] == ["ag_cast(root) to torch.bfloat16", "FWD embed"]
