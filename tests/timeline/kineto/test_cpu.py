"""Traces that torch's profiler recorded of torch's FSDP on two gloo ranks, read back.

Those in ``recorded/`` are of torch 2.13; two more are recorded while testing, with the torch that is installed.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_sim.timeline import Lane, Memory, Op, Phase, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step, step_time_s
from fsdp_sim.timeline.kineto import read_kineto

HERE = Path(__file__).parent
BLOCK_BYTES, ROOT_BYTES = 4 * (64 * 2 + 2 * 64 * 256 + 256 + 64), 4 * (2 * 256 * 64 + 256)
LAYERS = ["layers.0", "layers.1", "layers.2"]


def recorded(name: str) -> Timeline:
    return read_kineto(HERE / "recorded" / name)


def order(timeline: Timeline, *ops: Op, step: int | None = None) -> list[str]:
    """Labels of some operations of one step in the order in which they were issued."""
    step = timeline.steps[-1] if step is None else step
    return [e.label for e in timeline.ops if e.op in ops and e.step == step]


def test_fsdp2_gathers_and_reduces_each_unit_in_torchs_order() -> None:
    timeline = recorded("fsdp2.rank0.json.gz")
    forward = [f"ALL_GATHER({u})" for u in ["root", *LAYERS]]
    backward = ["ALL_GATHER(layers.2)", "ALL_GATHER(layers.1)", "REDUCE_SCATTER(layers.2)", "ALL_GATHER(layers.0)"]
    rest = ["REDUCE_SCATTER(layers.1)", "REDUCE_SCATTER(layers.0)", "REDUCE_SCATTER(root)"]
    assert timeline.steps == (2, 3)  # schedule(wait=1, warmup=1)
    for step in timeline.steps:
        assert order(timeline, Op.ALL_GATHER, Op.REDUCE_SCATTER, step=step) == forward + backward + rest


def test_fsdp2_computes_each_unit_between_its_hooks() -> None:
    compute = order(recorded("fsdp2.rank0.json.gz"), Op.FWD, Op.BWD, Op.OPTIM)
    want = ["FWD root", *(f"FWD {u}" for u in LAYERS), "FWD root", "FWD loss", "BWD loss", "BWD root"]
    assert compute == [*want, *(f"BWD {u}" for u in reversed(LAYERS)), "BWD root", "OPTIM"]


def test_messages_are_measured_in_whole_units() -> None:
    timeline = recorded("fsdp2.rank0.json.gz")
    for e in timeline.ops:
        if e.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
            assert e.bytes == (ROOT_BYTES if e.unit == "root" else BLOCK_BYTES)
            assert (e.group_size, e.dtype) == (2, "fp32")
        if e.op is Op.AG_COPY_IN:
            assert e.bytes == (ROOT_BYTES if e.unit == "root" else BLOCK_BYTES) // 2


def test_on_a_cpu_copies_run_where_the_computing_does_and_collectives_on_wires() -> None:
    lanes = {(e.op, e.lane) for e in recorded("fsdp2.rank0.json.gz").ops}
    for op in (Op.AG_COPY_IN, Op.AG_COPY_OUT, Op.RS_COPY_IN, Op.FWD, Op.BWD, Op.OPTIM):
        assert [lane for o, lane in lanes if o is op] == [Lane.COMPUTE]
    assert (Op.ALL_GATHER, Lane.ALL_GATHER) in lanes
    assert (Op.REDUCE_SCATTER, Lane.REDUCE_SCATTER) in lanes  # gloo does it by an all-reduce


def test_what_is_read_is_in_order_and_within_its_step() -> None:
    timeline = recorded("fsdp2.rank0.json.gz")
    compute = sorted((e for e in timeline.ops if e.lane is Lane.COMPUTE), key=lambda e: e.start_s)
    assert all(a.end_s <= b.start_s for a, b in pairwise(compute))
    assert all(e.issue_s <= e.start_s <= e.end_s for e in timeline)
    assert [e.issue_s for e in timeline] == sorted(e.issue_s for e in timeline)
    by_seq = {e.seq: e for e in timeline}
    assert all(by_seq[w].end_s <= e.start_s for e in timeline.ops for w in e.waits_on if e.op is Op.AG_COPY_OUT)
    phases = {e.op: e.phase for e in timeline.ops if e.op in (Op.FWD, Op.BWD, Op.OPTIM)}
    assert phases == {Op.FWD: Phase.FORWARD, Op.BWD: Phase.BACKWARD, Op.OPTIM: Phase.OPTIMIZER}
    assert 0 < exposed_comm_s(timeline, 0) < timeline.span_s
    assert 0 < step_time_s(timeline, median_step(timeline, skip=0)) < timeline.span_s


def test_several_ranks_become_one_timeline_on_one_clock() -> None:
    files = [HERE / "recorded" / f"fsdp2.rank{rank}.json.gz" for rank in (1, 0)]
    timeline = read_kineto(files)
    assert timeline.ranks == (0, 1)
    assert timeline.header.world_size == 2
    gathers = [[e for e in timeline.ops if e.rank == rank and e.op is Op.ALL_GATHER] for rank in (0, 1)]
    for a, b in zip(*gathers, strict=True):  # a collective is a rendezvous: on one clock its parts overlap
        assert a.label == b.label
        assert a.start_s < b.end_s
        assert b.start_s < a.end_s
    with pytest.raises(ValueError, match="are all of rank 0; give one file per rank"):
        read_kineto([files[1], files[1]])
    with pytest.raises(ValueError, match="empty list of files"):
        read_kineto([])
    with pytest.raises(ValueError, match="rank=3 names one rank, and 2 files were given"):
        read_kineto(files, rank=3)
    assert read_kineto(files[0], rank=5).ranks == (5,)


def test_fsdp1_units_are_numbered_in_the_order_of_forward() -> None:
    timeline = recorded("fsdp1.rank0.json.gz")
    units = ["unit.0", "unit.1", "unit.2"]
    assert order(timeline, Op.FWD) == ["FWD root", *(f"FWD {u}" for u in units), "FWD root", "FWD loss"]
    assert order(timeline, Op.BWD) == ["BWD loss", "BWD root", *(f"BWD {u}" for u in reversed(units)), "BWD root"]
    gathers = [f"ALL_GATHER({u})" for u in ["root", *units, *reversed(units)]]
    assert order(timeline, Op.ALL_GATHER) == gathers
    assert order(timeline, Op.REDUCE_SCATTER) == [f"REDUCE_SCATTER({u})" for u in [*reversed(units), "root"]]
    lanes = {e.lane for e in timeline.ops}
    assert lanes == {Lane.COMPUTE, Lane.UNSHARD, Lane.POST_BACKWARD}


def test_ddp_has_buckets_and_one_unit() -> None:
    timeline = recorded("ddp.rank0.json.gz")
    assert order(timeline, Op.ALL_REDUCE) == ["ALL_REDUCE(bucket.0)"]
    compute = order(timeline, Op.FWD, Op.BWD, Op.OPTIM)
    assert [label.strip() for label in compute] == ["FWD", "FWD loss", "BWD", "BWD", "OPTIM"]


def test_ddps_backward_is_apart_where_it_waits_for_a_bucket() -> None:
    timeline = recorded("ddp.rank0.json.gz").select(step=3)
    before, after = (e for e in timeline.ops if e.op is Op.BWD)
    (bucket,) = (e for e in timeline.ops if e.op is Op.ALL_REDUCE)
    assert before.end_s <= bucket.start_s < bucket.end_s <= after.start_s
    assert exposed_comm_s(timeline, 0) == pytest.approx(bucket.duration_s)
    (reduced,) = {e.bytes for e in timeline.ops if e.op is Op.ALL_REDUCE}
    assert reduced == 3 * BLOCK_BYTES + ROOT_BYTES


def test_the_header_says_who_and_where() -> None:
    header = recorded("fsdp2.rank0.json.gz").header
    assert (header.producer, header.clock, header.world_size) == ("torch.profiler", "measured", 2)
    assert header.hardware == "2 x CPU"


def record(folder: Path, *words: str) -> list[Path]:
    script = str(HERE / "record_trace.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, str(folder)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted(folder.glob("rank*.json"))


@pytest.mark.tail
def test_everything_that_the_profiler_can_add_is_read(tmp_path: Path) -> None:
    words = [
        "bf16",
        "prefetch",
        "accumulate",
        "checkpointing",
        "schedule",
        "with_stack",
        "profile_memory",
        "record_shapes",
    ]
    timeline = read_kineto(record(tmp_path, "fsdp2", *words))
    step = timeline.select(step=timeline.steps[-1], rank=0)
    assert step.ranks == (0,)
    assert {e.micro_batch for e in step.ops} == {0, 1}
    counts = Counter((e.op, e.micro_batch) for e in step.ops)
    assert (counts[Op.ALL_GATHER, 0], counts[Op.ALL_GATHER, 1]) == (7, 7)
    assert (counts[Op.REDUCE_SCATTER, 0], counts[Op.REDUCE_SCATTER, 1]) == (0, 4)
    assert {e.unit for e in step.ops if e.op is Op.RECOMPUTE} == set(LAYERS)
    assert {e.dtype for e in step.ops if e.op is Op.ALL_GATHER} == {"bf16"}
    assert {e.dtype for e in step.ops if e.op is Op.REDUCE_SCATTER} == {"fp32"}
    prefetched = order(step.select(micro_batch=0, phase=Phase.FORWARD), Op.ALL_GATHER, Op.FWD)
    assert prefetched.index("ALL_GATHER(layers.1)") < prefetched.index("FWD layers.0")
    forward = next(e for e in step.ops if e.label == "FWD layers.0")
    assert forward.source.startswith("record_trace.py:")
    assert forward.stack[-1] == forward.source
    assert len(forward.stack) > 2
    assert {e.category for e in step if e.is_memory} >= {
        Memory.AG_OUTPUT,
        Memory.UNSHARDED,
        Memory.RS_INPUT,
        Memory.ACTIVATION,
    }
    assert min(v.min() for v in timeline.live_bytes(0)[1].values()) >= 0


@pytest.mark.tail
def test_fsdp1_units_are_named_after_modules_where_the_trace_has_them(tmp_path: Path) -> None:
    timeline = read_kineto(record(tmp_path, "fsdp1", "with_stack")[0])
    units = ["Block_0", "Block_1", "Block_2"]
    assert timeline.steps == (0, 1)  # no schedule: a step ends with the optimizer
    assert order(timeline, Op.FWD, step=1) == ["FWD root", *(f"FWD {u}" for u in units), "FWD root", "FWD loss"]
    assert order(timeline, Op.REDUCE_SCATTER) == [f"REDUCE_SCATTER({u})" for u in [*reversed(units), "root"]]
    assert {e.bytes for e in timeline.ops} == {0}  # without record_shapes nothing says them
