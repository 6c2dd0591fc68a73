"""A generated GPU trace read back is the timeline it was generated from."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.diagnose import Culprit, diagnose
from fsdp_sim.timeline import COLLECTIVES, Event, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from fsdp_sim.timeline.kineto import read_kineto
from tests.timeline.kineto.gpu_trace import kineto_trace, unit_names

MODEL = Model.preset("gpt2-124m")
RECORDED = Path(__file__).with_name("recorded")
PLANS = {
    "fsdp2": Plan(micro_batch=4, seq_len=1024, param_dtype="bf16"),
    "explicit prefetch": Plan(micro_batch=4, seq_len=1024, param_dtype="bf16", forward_prefetch=1),
    "fp32, nothing resharded": Plan(micro_batch=4, seq_len=1024, reshard_after_forward=False),
    "hsdp, two micro-batches": Plan(micro_batch=4, seq_len=1024, param_dtype="bf16", shard_size=4, grad_accum=2),
    "checkpointing": Plan(micro_batch=4, seq_len=1024, param_dtype="bf16", activation_checkpointing="full"),
    "offload": Plan(micro_batch=4, seq_len=1024, param_dtype="bf16", cpu_offload=True),
    "fp16": Plan(micro_batch=4, seq_len=1024, param_dtype="fp16", reduce_dtype="fp16"),
    "no sync": Plan(micro_batch=4, seq_len=1024, grad_accum=2, requires_gradient_sync="last", reduce_dtype="bf16"),
    "backward prefetch 2": Plan(micro_batch=4, seq_len=1024, backward_prefetch=2, forward_prefetch=2),
    "fsdp1": Plan(api="fsdp1", micro_batch=4, seq_len=1024, param_dtype="bf16"),
    "fsdp1, prefetch after": Plan(api="fsdp1", micro_batch=4, seq_len=1024, backward_prefetch="BACKWARD_POST"),
    "fsdp1, no prefetch": Plan(api="fsdp1", micro_batch=4, seq_len=1024, backward_prefetch=None, grad_accum=2),
    "fsdp1, SHARD_GRAD_OP": Plan(api="fsdp1", micro_batch=4, seq_len=1024, sharding_strategy="SHARD_GRAD_OP"),
    "fsdp1, hybrid": Plan(api="fsdp1", micro_batch=4, seq_len=1024, sharding_strategy="HYBRID_SHARD", shard_size=4),
}


def read(trace: Any, tmp_path: Path) -> Timeline:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    return read_kineto(path)


def simulated(name: str) -> Timeline:
    """What has kernels: an offloaded optimizer has none."""
    timeline = simulate(MODEL, Cluster("H100-SXM-80GB", gpus=8), PLANS[name]).timeline
    return Timeline(timeline.header, [e for e in timeline.events if e.lane is not Lane.CPU])


def unit(event: Event, units: set[str]) -> str:
    return event.unit if event.unit in units or event.op is Op.OPTIM else "root"


PER_PARAMETER = {Op.ACCUMULATE, Op.UPCAST, Op.D2H}  # events of the simulator; the reader makes one of a unit's


def expected(timeline: Timeline) -> list[Event]:
    """The operations, those of a unit that were issued one after the other (an accumulate per parameter) as one."""
    units = unit_names(timeline)
    key = lambda e: (e.op, e.lane, unit(e, units), e.micro_batch)  # noqa: E731
    groups = [list(group) for _, group in itertools.groupby(timeline.ops, key)]
    return [msgspec.structs.replace(group[0], unit=unit(group[0], units), end_s=group[-1].end_s) for group in groups]


def waits(timeline: Timeline, units: set[str], of: frozenset[Op]) -> list[tuple[str, frozenset[str]]]:
    """For each operation of some kinds the collectives and copies that it waited for on other lanes."""
    by_seq = {e.seq: e for e in timeline}
    name = lambda e: f"{e.op} {unit(e, units)}"  # noqa: E731
    return [
        (name(e), frozenset(name(by_seq[w]) for w in e.waits_on if w in by_seq and by_seq[w].lane != e.lane))
        for e in timeline.ops
        if e.op in of
    ]


@pytest.mark.parametrize("name", PLANS)
def test_what_is_read_is_what_was_simulated(name: str, tmp_path: Path) -> None:
    timeline = simulated(name)
    want = expected(timeline)
    got = read(kineto_trace(timeline, api=PLANS[name].api), tmp_path)
    zero = min(e.issue_s for e in want)
    for have, made in zip(got, want, strict=False):
        said, simulated_as = ((e.op, e.lane, e.unit, e.phase, e.micro_batch) for e in (have, made))
        assert said == simulated_as
        times = (made.issue_s - zero, made.start_s - zero, made.end_s - zero)
        assert (have.issue_s, have.start_s, have.end_s) == pytest.approx(times, abs=2e-9), have.label
        if made.op in COLLECTIVES:
            assert (have.bytes, have.group_size, have.dtype) == (made.bytes, made.group_size, made.dtype)
    assert len(got) == len(want)
    assert exposed_comm_s(got, 0) == pytest.approx(exposed_comm_s(timeline, 0), abs=1e-7)
    if PLANS[name].api == "fsdp2":  # by its rules
        units, kinds = unit_names(timeline), frozenset(Op) - {Op.FWD, Op.BWD, *PER_PARAMETER}
        assert waits(got, units, kinds) == waits(timeline, units, kinds)


def test_prefetched_gathers_of_fsdp1_are_of_the_unit_that_comes_next(tmp_path: Path) -> None:
    plan = Plan(api="fsdp1", micro_batch=4, seq_len=1024, forward_prefetch=True)
    timeline = simulate(MODEL, Cluster("H100-SXM-80GB", gpus=8), plan).timeline
    got = read(kineto_trace(timeline, api="fsdp1"), tmp_path)
    assert got.steps == timeline.steps == (0, 1)  # from the second forward on
    for step in got.steps:
        order = [[e.label for e in t.ops if e.step == step and e.op in COLLECTIVES] for t in (got, timeline)]
        assert order[0] == order[1]


def test_waits_follow_the_rules_of_fsdp1(tmp_path: Path) -> None:
    timeline = simulated("fsdp1")
    units = unit_names(timeline)
    got = read(kineto_trace(timeline, api="fsdp1"), tmp_path)
    for (have, for_), (made, wanted) in zip(
        waits(got, units, frozenset(Op)), waits(timeline, units, frozenset(Op)), strict=True
    ):
        assert have == made
        assert for_ <= wanted, have  # what the CPU waited for once the simulator repeats on other lanes
    forward = timeline.select(phase=Phase.FORWARD), got.select(phase=Phase.FORWARD)
    gathers = [waits(t, units, frozenset({Op.ALL_GATHER})) for t in forward]
    assert gathers[0] == gathers[1]
    assert any("FWD layers.3" in waited for _, waited in gathers[1])  # the rate limiter, which holds back the CPU


@pytest.mark.parametrize("name", PLANS)
def test_waits_that_the_trace_recorded_are_those_that_were_simulated(name: str, tmp_path: Path) -> None:
    timeline = simulated(name)
    units = unit_names(timeline)
    got = read(kineto_trace(timeline, api=PLANS[name].api, recorded_waits=True, pieces=1), tmp_path)
    kinds = frozenset(Op) - PER_PARAMETER
    have: dict[object, set[str]] = defaultdict(set)  # the root computes before and after all others
    for e, (_, found) in zip(got.ops, waits(got, units, frozenset(Op)), strict=True):
        have[e.op, e.unit, e.phase, e.micro_batch] |= found
    for made, (_, wanted) in zip(timeline.ops, waits(timeline, units, frozenset(Op)), strict=True):
        if made.op in kinds and wanted:
            assert wanted <= have[made.op, unit(made, units), made.phase, made.micro_batch], made.label


def events(trace: dict[str, Any], cat: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == cat]


def test_streams_are_known_by_what_runs_on_them(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    want = read(trace, tmp_path)
    for kernel in events(trace, "kernel"):
        kernel["args"]["stream"] = kernel["tid"] = {7: 40, 29: 7, 33: 20, 37: 33, 41: 29}[kernel["args"]["stream"]]
    assert read(trace, tmp_path).events == want.events


def test_one_nccl_stream_for_all_is_a_lane_of_its_own(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    for kernel in events(trace, "kernel"):
        if kernel["name"].startswith("nccl"):
            kernel["args"]["stream"] = kernel["tid"] = 20
    assert {e.lane for e in read(trace, tmp_path).ops if e.op in COLLECTIVES} == {Lane.OTHER_COMM}


def test_sizes_may_be_at_the_cpu_operation_alone(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    want = [(e.bytes, e.group_size, e.dtype) for e in read(trace, tmp_path).ops]
    for kernel in events(trace, "kernel"):
        for name in ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype"):
            kernel["args"].pop(name, None)
    assert [(e.bytes, e.group_size, e.dtype) for e in read(trace, tmp_path).ops] == want


def test_kernels_are_found_by_their_operation_where_no_launch_was_recorded(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"), pieces=1)
    want = read(trace, tmp_path)
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "cuda_runtime"]
    assert [(e.op, e.unit, e.lane) for e in read(trace, tmp_path)] == [(e.op, e.unit, e.lane) for e in want]


@pytest.mark.parametrize(("gap_us", "busy", "pieces"), [(500.0, True, 2), (500.0, False, 1), (5.0, True, 1)])
def test_a_unit_is_split_where_compute_waits_for_communication(
    gap_us: float, busy: bool, pieces: int, tmp_path: Path
) -> None:
    """The last matmul of a forward starts later; a long collective runs meanwhile, or none does."""
    trace = kineto_trace(simulated("fsdp2"), pieces=2)
    kernels = sorted(events(trace, "kernel"), key=lambda k: k["ts"])
    last = [k for k in kernels if k["name"].startswith("nvjet")][-1]
    for later in kernels:
        if later["ts"] >= last["ts"]:
            later["ts"] += gap_us
    last["ts"] += 10.0  # so that no collective that began before reaches into the gap
    if busy:
        gather = [k for k in kernels if "AllGather" in k["name"] and k["ts"] < last["ts"]][-1]
        gather["ts"], gather["dur"] = last["ts"] - gap_us, gap_us
    forward = [e for e in read(trace, tmp_path).ops if e.op is Op.FWD and e.unit == "root"]
    assert len(forward) == 1 + pieces  # embedding, head
    if pieces == 2:
        assert forward[-1].start_s - forward[-2].end_s >= gap_us * 1e-6


def test_compute_beside_annotations_and_collectives_without_fsdp_are_read(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if "FSDP::" not in e["name"]]
    got = read(trace, tmp_path)
    assert {e.unit for e in got.ops} == {""}
    assert {Op.ALL_GATHER, Op.REDUCE_SCATTER} <= {e.op for e in got.ops}


def test_one_side_of_a_gpu_run_is_not_enough(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    device = {"kernel", "gpu_memcpy"}
    cpu_only = trace | {"traceEvents": [e for e in trace["traceEvents"] if e.get("cat") not in device]}
    with pytest.raises(ValueError, match="CPU side of a run on GPUs and no kernels"):
        read(cpu_only, tmp_path)
    gpu_only = trace | {"traceEvents": [e for e in trace["traceEvents"] if e.get("cat") in device]}
    with pytest.raises(ValueError, match="kernels and no CPU operations"):
        read(gpu_only, tmp_path)


def test_the_header_describes_the_machine(tmp_path: Path) -> None:
    header = read(kineto_trace(simulated("fsdp2")), tmp_path).header
    assert header.hardware == "8 x NVIDIA H100 80GB HBM3"
    assert header.memory_limit_bytes == 85021163520
    assert header.versions == {"nccl": "2.27.3", "cuda_runtime": "12080", "cuda_driver": "12080"}


def test_memory_is_counted_on_the_device_by_purpose(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    launches = {e["args"]["correlation"]: e for e in events(trace, "cuda_runtime")}
    by_name = {e["name"]: launches[e["args"]["correlation"]] for e in reversed(events(trace, "kernel"))}
    gather = next(e for name, e in by_name.items() if "AllGather" in name)
    forward = next(e for name, e in by_name.items() if "nvjet" in name)
    changes = [  # moment, thread, bytes, address
        (gather["ts"] - 1e-3, gather["tid"], 1000, 1), (forward["ts"], forward["tid"], 300, 2),
        (forward["ts"] + 1e-3, forward["tid"], -1000, 1), (forward["ts"] + 2e-3, forward["tid"], -50, 77),
    ]  # fmt: skip
    total = 5000
    for at, tid, n_bytes, address in changes:
        total += n_bytes
        args = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": n_bytes, "Total Allocated": total}
        trace["traceEvents"] += [
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "ts": at, "tid": tid, "args": args},
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "ts": at, "tid": tid,
             "args": args | {"Device Type": 0, "Bytes": 7}},
        ]  # fmt: skip
    got = read(trace, tmp_path)
    times, live = got.live_bytes(0)
    assert {category: list(curve) for category, curve in live.items()} == {
        Memory.AG_OUTPUT: [0, 1000, 1000, 0, 0],
        Memory.ACTIVATION: [0, 0, 300, 300, 300],
        Memory.NONE: [5000, 5000, 5000, 5000, 4950],
    }
    assert list(times) == sorted(times)
    assert got.peak_bytes(0) == 6300


def test_threads_may_have_other_numbers_in_the_runtime(tmp_path: Path) -> None:
    trace = kineto_trace(simulated("fsdp2"))
    want = read(trace, tmp_path)
    for call in events(trace, "cuda_runtime"):
        call["tid"] += 1_000_000
    assert read(trace, tmp_path).events == want.events


def test_collectives_of_others_do_not_take_the_lanes_of_fsdp(tmp_path: Path) -> None:
    """Tensor parallelism gathers within a unit's forward, on a stream of its own, for longer than FSDP."""
    trace = kineto_trace(simulated("fsdp2"))
    want = read(trace, tmp_path)
    launches = {e["args"]["correlation"]: e for e in events(trace, "cuda_runtime")}
    gather = next(k for k in events(trace, "kernel") if "AllGather" in k["name"])
    matmul = next(k for k in events(trace, "kernel") if k["name"].startswith("nvjet"))
    launch = launches[matmul["args"]["correlation"]]
    added = json.loads(json.dumps(gather)) | {"ts": matmul["ts"], "dur": 1e6}
    added["args"] |= {"stream": 99, "correlation": 1, "External id": 1, "Process Group Name": "tp"}
    trace["traceEvents"] += [added, launch | {"args": {"correlation": 1}}]
    got = read(trace, tmp_path)
    (extra,) = [e for e in got.ops if e.lane is Lane.OTHER_COMM]
    assert (extra.op, extra.unit) == (Op.ALL_GATHER, "")
    ours = [e for e in got.ops if e.op is Op.ALL_GATHER and e is not extra]
    assert [(e.unit, e.lane) for e in ours] == [(e.unit, e.lane) for e in want.ops if e.op is Op.ALL_GATHER]


def test_a_step_of_an_h200_is_read_with_its_units_and_the_cpu_is_found_to_be_late() -> None:
    """Recorded: GPT-2 124M, 8 rows of 1,024 tokens, torch 2.11.0+cu130's FSDP2 alone on one H200, on 2026-11-27."""
    step = read_kineto(RECORDED / "h200.fsdp2.rank0.json.gz")

    found = diagnose(step)

    blocks = [f"layers.{n}" for n in range(12)]
    assert step.header.hardware.endswith("NVIDIA H200")
    assert (step.header.api, found.api) == ("fsdp2", "fsdp2")  # one rank gathers nothing: its annotations say it
    assert [e.unit for e in step.ops if e.op is Op.FWD] == ["root", *blocks, "root", "loss"]
    assert [e.unit for e in step.ops if e.op is Op.BWD] == ["root", *reversed(blocks), "root"]
    assert (found.device, found.comm_s) == ("gpu", 0.0)
    # Without a profiler the CPU needed all of the step's 59 ms
    assert [blame.culprit for blame in found.culprits[:2]] == [Culprit.LAUNCHES, Culprit.CPU_LATE]
    assert found.compute_s == pytest.approx(busy_s(RECORDED / "h200.fsdp2.rank0.json.gz"), rel=0.02)
    assert found.compute_s + sum(blame.idle_s for blame in found.culprits) == pytest.approx(found.step_s)
    assert found.idle_s == pytest.approx(found.step_s - found.compute_s)


def busy_s(trace: Path) -> float:
    """Seconds in which any kernel or copy runs, from the file alone."""
    rows = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((r["ts"], r["ts"] + r["dur"]) for r in rows if r.get("cat") in on_device)
    busy_us = reached = 0.0
    for start, end in spans:
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy_us * 1e-6
