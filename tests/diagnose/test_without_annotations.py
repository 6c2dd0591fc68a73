"""Traces that nobody annotated (DDP, Megatron-LM, ZeRO-3, compiled graphs, pipelines) get their culprits."""

import json
from pathlib import Path

import pytest

from fsdp_sim.diagnose import Culprit, Diagnosis, diagnose
from fsdp_sim.timeline import read_timeline
from tests.timeline.kineto import plain_trace as plain

RECORDED = Path("tests/timeline/kineto/recorded")
WAYS = ({}, {"arguments": False}, {"amd": True})
CASES = [  # a training, what keeps compute waiting most, and for how long in a step
    ("ddp, last bucket", lambda run: plain.ddp(run, bucket_us=300), Culprit.LAST_REDUCTIONS, 0.30e-3),
    ("ddp, slow network", lambda run: plain.ddp(run, bucket_us=900), Culprit.LAST_REDUCTIONS, 4.40e-3),
    ("tensor parallel", plain.megatron, Culprit.IN_LINE, 32 * 0.15e-3),
    ("zero3, slow network", lambda run: plain.sharded(run, gather_us=700), Culprit.NETWORK, 4.55e-3),
    ("compiled, no prefetch", lambda run: plain.sharded(run, ahead=0), Culprit.IN_LINE, 14 * 0.5e-3),
    ("pipeline", plain.pipeline, Culprit.PIPELINE, 7 * 0.1e-3),
    ("late CPU", plain.late, Culprit.LAUNCHES, 4.7e-3),
]


def diagnosed(train, path: Path, **way: bool) -> Diagnosis:
    run = plain.PlainRank(**way)
    train(run)
    path.write_text(json.dumps(run.trace()))
    return diagnose(read_timeline(path))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("train", "culprit", "seconds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_culprit_is_found_from_streams_and_launches(train, culprit, seconds, way, tmp_path: Path) -> None:
    found = diagnosed(train, tmp_path / "rank0.json", **way)
    worst = found.culprits[0]
    assert worst.culprit is culprit, found.headline
    assert worst.idle_s == pytest.approx(seconds, rel=0.1)
    unknown = [blame.idle_s for blame in found.culprits if blame.culprit is Culprit.UNKNOWN]
    assert sum(unknown) < 0.01 * found.step_s


def test_what_is_hidden_is_no_culprit(tmp_path: Path) -> None:
    found = diagnosed(lambda run: plain.sharded(run, gather_us=100), tmp_path / "rank0.json")
    assert {blame.culprit for blame in found.culprits if blame.idle_s > 0.02 * found.step_s} <= {
        Culprit.LAST_REDUCTIONS, Culprit.FIRST_ALL_GATHER
    }  # fmt: skip


def test_steps_are_told_apart_by_the_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    found = diagnosed(lambda run: plain.sharded(run, steps=4), path)
    assert len(read_timeline(path).steps) == 4
    assert found.api == ""  # so advice names no function of FSDP
    assert "fully_shard" not in found.culprits[0].advice[0]


SYMMETRIC = {
    "AllGather": "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)",
    "ReduceScatter": "void c10d::(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(unsigned int**)",
}


def test_kernels_that_communicate_without_nccl_are_no_compute(tmp_path: Path) -> None:
    run = plain.PlainRank(arguments=False)
    plain.sharded(run, ahead=0)
    trace = run.trace()
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            event["name"] = next((new for old, new in SYMMETRIC.items() if old in event["name"]), event["name"])
    (tmp_path / "rank0.json").write_text(json.dumps(trace))

    found = diagnose(read_timeline(tmp_path / "rank0.json"))
    assert found.culprits[0].culprit is Culprit.IN_LINE
    assert found.culprits[0].idle_s == pytest.approx(14 * 0.5e-3, rel=0.1)
    assert {cost.op for cost in found.collectives} == {"ALL_TO_ALL", "ALL_REDUCE"}


def test_steps_are_told_apart_by_the_optimizer_where_autograd_left_no_trace(tmp_path: Path) -> None:
    run = plain.PlainRank()
    plain.megatron(run, steps=3)
    trace = run.trace()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if not e["name"].startswith("autograd::")]
    (tmp_path / "rank0.json").write_text(json.dumps(trace))

    assert read_timeline(tmp_path / "rank0.json").steps == (0, 1, 2)


def test_of_a_run_of_many_ranks_nothing_says_that_it_ran_on_one_device(tmp_path: Path) -> None:
    run = plain.PlainRank()
    plain.late(run)
    trace = run.trace()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if "nccl" not in e["name"] and "c10d" not in e["name"]]
    (tmp_path / "rank0.json").write_text(json.dumps(trace))

    with pytest.raises(ValueError, match="it says that there were 8 ranks, so nothing was exchanged"):
        read_timeline(tmp_path / "rank0.json")


def of_earlier_torch(trace: dict) -> None:
    """As torch-tb-profiler 0.4.3 knows it: other categories, none for annotations, absolute times, no rank."""
    categories = {"kernel": "Kernel", "cuda_runtime": "Runtime", "cpu_op": "Operator", "user_annotation": "Operator"}
    for event in trace["traceEvents"]:
        event |= {"cat": categories[event["cat"]], "ts": 1.66e15 + event["ts"]}
    for key in ("distributedInfo", "baseTimeNanoseconds", "host_name"):
        del trace[key]


def without_some_launches(trace: dict) -> None:
    """The CPU is steps ahead of the device, so that when a kernel ran says nothing of the step that it is of."""
    calls = [event for event in trace["traceEvents"] if event["cat"] == "cuda_runtime"]
    dropped = [id(event) for event in calls[::7]]
    trace["traceEvents"] = [event for event in trace["traceEvents"] if id(event) not in dropped]


def of_several_devices(trace: dict) -> None:
    """One process that drives two, whose streams have the same numbers, the second later."""
    kernels = [event for event in trace["traceEvents"] if event["cat"] == "kernel"]
    for event in kernels:
        event["args"]["device"] = 0
    others = [event | {"ts": event["ts"] + 250.0, "args": event["args"] | {"device": 1}} for event in kernels[:-1]]
    trace["traceEvents"] += others


@pytest.mark.parametrize("bent", [of_earlier_torch, without_some_launches, of_several_devices])
def test_what_is_found_is_the_same_in_traces_of_other_shapes(bent, tmp_path: Path) -> None:
    run = plain.PlainRank()
    plain.ddp(run)
    trace = run.trace()
    bent(trace)
    (tmp_path / "rank0.json").write_text(json.dumps(trace))

    found, as_usual = diagnose(read_timeline(tmp_path / "rank0.json")), diagnosed(plain.ddp, tmp_path / "usual.json")

    assert found.step_s == pytest.approx(as_usual.step_s, rel=0.01)
    assert [one.culprit for one in found.culprits] == [one.culprit for one in as_usual.culprits]
    assert found.compute_s == pytest.approx(as_usual.compute_s, rel=0.01)
    assert any("numbers 1 are left out" in note for note in found.notes) == (bent is of_several_devices)


def test_on_cores_a_thread_that_stands_by_a_collective_waits_for_it_and_is_not_busy() -> None:
    """As torch's DDP on gloo at the end of backward."""
    found = diagnose(read_timeline(RECORDED / "ddp.rank0.json.gz"))
    assert found.culprits[0].culprit is Culprit.REDUCTION
    assert found.culprits[0].idle_s > found.exposed_s


def test_kernels_of_graphs_are_said_to_be_launched_at_once(tmp_path: Path) -> None:
    run = plain.PlainRank()
    plain.sharded(run)
    trace = run.trace()
    for event in trace["traceEvents"]:
        if event["cat"] == "cuda_runtime":
            event["name"] = "cudaGraphLaunch"
        if "correlation" in event["args"] and event["cat"] in ("cuda_runtime", "kernel"):
            event["args"]["correlation"] = 7
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace))
    kernels = sum(event["cat"] == "kernel" for event in trace["traceEvents"])
    notes = diagnose(read_timeline(path)).notes
    assert any(note.startswith(f"{kernels} kernels were launched by CUDA graphs") for note in notes)
