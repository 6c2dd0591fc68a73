"""Numbers of a stack from traces of it: known ones come back, and other sizes are predicted with them."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from fsdp_sim.cli.calibrate import command
from fsdp_sim.cli.schema import schema_of
from fsdp_sim.cost import Costs, fitted, kernel_s, numbers_of_file
from fsdp_sim.measure.from_trace import calibrate_from
from fsdp_sim.requests import request_of_texts, resolve
from fsdp_sim.schedule import build
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Op, Timeline
from tests.timeline.kineto import gpu_trace
from tests.timeline.kineto.gpu_trace import kineto_trace

MODEL = Model.preset("gpt2-1.5b")
PLAN = Plan(micro_batch=4, seq_len=1024, param_dtype="bf16", reduce_dtype="fp32")
CLUSTER = Cluster("H100-SXM-80GB", gpus=16)
NAMES = {
    "matmul": "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
    "attention": "flash_fwd_kernel<Flash_fwd_kernel_traits>",
}
POINTWISE = "void at::native::vectorized_elementwise_kernel"
TRUTH = {  # a stack that no default is near
    "matmul_fraction": 0.61, "copy_fraction": 0.7, "eager_bytes": 3.1, "kernel_gap_s": 9e-6,
    "link_fraction": 0.62, "step_s": 0.021, "contention": 0.0, "attention_fraction_hopper": 0.2,
    "attention_backward": 1.9,
}  # fmt: skip


def truth_of(cluster, plan=PLAN, model=MODEL, **changed):
    """What the stack takes on a cluster."""
    return simulate(model, cluster, plan, calibration=replace(fitted(), **TRUTH | changed))


def trace_of(sim, path, steps=2):
    """A trace of some steps of a simulation, its blocks cut into the kernels that its costs are of."""
    sim.__dict__["program"] = build(sim.workload.units, sim.plan, sim.cluster.gpus, steps)
    calibration = sim.costs.calibration

    def parts(event):
        work = sim.workload.work.get(event.unit)
        if work is None:
            return [(NAMES["matmul"], 0.0, 1.0)]
        backward = event.op is Op.BWD
        kernels = work.backward if backward else work.forward
        how = {"backward": backward, "compiled": sim.plan.compile, "attention": sim.plan.attention_impl}
        took = [(k, kernel_s(k, sim.cluster.gpu, calibration, **how)) for k in kernels]
        without = Costs(sim.workload, sim.plan, sim.cluster, replace(calibration, kernel_gap_s=0.0))
        i = next(i for i in sim.program.ops if (i.op, i.unit) == (event.op, event.unit))
        whole_s = sim.costs.seconds(i)
        gap = (whole_s - without.seconds(i)) / whole_s / len(took)
        busy = without.seconds(i) / whole_s / sum(s for _, s in took)
        at, found = 0.0, []
        for kernel, seconds in took:
            found.append((NAMES.get(kernel.kind, POINTWISE), at, at + seconds * busy))
            at += seconds * busy + gap
        return found

    gaps = sim.between_steps_s
    events = [
        msgspec.structs.replace(
            e, issue_s=e.issue_s + e.step * gaps, start_s=e.start_s + e.step * gaps, end_s=e.end_s + e.step * gaps
        )
        for e in sim.timeline.events
    ]
    trace = kineto_trace(Timeline(sim.timeline.header, events), api=sim.plan.api, parts=parts)
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = trace_of(truth_of(CLUSTER), tmp_path_factory.mktemp("trace") / "rank0.json.gz")
    return calibrate_from([path], MODEL, CLUSTER, PLAN)


def test_the_numbers_of_a_known_stack_come_back(found):
    sought = set(TRUTH) - {"attention_fraction_hopper", "contention"}
    assert sought <= set(found.numbers)
    for name in sought:
        assert found.numbers[name] == pytest.approx(TRUTH[name], rel=0.05), name
    attention = found.cluster.gpu.attention_flops
    assert attention == pytest.approx(TRUTH["attention_fraction_hopper"] * CLUSTER.gpu.matmul_flops("bf16"), rel=0.05)
    assert found.fitted_step_s == pytest.approx(found.measured_step_s, rel=0.05)


@pytest.mark.parametrize(
    ("gpus", "plan"),
    [
        (128, PLAN),
        (16, replace(PLAN, micro_batch=1)),
        (64, replace(PLAN, shard_size=8, activation_checkpointing="full")),
    ],
    ids=["128 GPUs", "a smaller batch", "HSDP and checkpointing"],
)
def test_other_sizes_are_predicted_from_the_file_that_it_writes(found, gpus, plan, tmp_path):
    path = tmp_path / "node.toml"
    found.to_file(path)
    fields = {f: getattr(plan, f) for f in ("micro_batch", "seq_len", "param_dtype", "reduce_dtype", "shard_size",
                                            "activation_checkpointing")}  # fmt: skip
    texts = {"model": MODEL.name, "cluster": str(path), "gpus": str(gpus)}
    texts |= {name: str(value) for name, value in fields.items() if value is not None}
    predicted = resolve(request_of_texts(texts)).simulate()
    expected = truth_of(Cluster("H100-SXM-80GB", gpus=gpus), plan)
    assert predicted.step_time_s == pytest.approx(expected.step_time_s, rel=0.1)
    default = simulate(MODEL, Cluster("H100-SXM-80GB", gpus=gpus), plan)
    assert abs(predicted.step_time_s - expected.step_time_s) < 0.5 * abs(default.step_time_s - expected.step_time_s)


def test_what_the_trace_does_not_show_keeps_its_default_and_is_named(tmp_path):
    path = trace_of(truth_of(CLUSTER), tmp_path / "rank0.json.gz", steps=1)
    found = calibrate_from([path], MODEL, CLUSTER, PLAN)
    assert "record two or more" in found.kept["step_s"]
    assert not set(found.kept) & set(found.numbers)


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "words"),
    [
        (MODEL, replace(CLUSTER, gpus=32), PLAN, "the trace is of 16 ranks, and the request has gpus=32; give gpus=16"),
        (MODEL, CLUSTER, replace(PLAN, api="fsdp1"), "the trace is of fsdp2, and the plan of fsdp1"),
        (Model.preset("gpt2-124m"), CLUSTER, PLAN, "the trace has 48 units beside the root, and gpt2-124m"),
        (replace(MODEL, d_model=800), CLUSTER, PLAN, "bytes in the trace, and"),
        (MODEL, CLUSTER, replace(PLAN, param_dtype=None), "name the model, the dtype"),
    ],
)
def test_a_trace_of_another_run_is_refused(model, cluster, plan, words, tmp_path):
    path = trace_of(truth_of(CLUSTER), tmp_path / "rank0.json.gz", steps=1)
    with pytest.raises(ValueError, match=words):
        calibrate_from([path], model, cluster, plan)


def test_a_file_with_a_number_that_there_is_not_is_refused(tmp_path, found):
    path = tmp_path / "node.toml"
    found.to_file(path)
    path.write_text(path.read_text().replace("kernel_gap_s", "kernel_gaps_s"))
    with pytest.raises(ValueError, match="a calibration has no number kernel_gaps_s; did you mean kernel_gap_s"):
        numbers_of_file(path)


def test_the_command_writes_the_file_and_says_what_it_found(tmp_path):
    trace, path = trace_of(truth_of(CLUSTER), tmp_path / "rank0.json.gz"), tmp_path / "node.toml"
    run = ["--model", MODEL.name, "--gpu", "H100-SXM-80GB", "--gpus", "16", "--micro-batch", "4"]
    dtypes = ["--plan", "param_dtype=bf16", "--plan", "reduce_dtype=fp32"]
    done = CliRunner().invoke(command, ["--trace", str(trace), *run, *dtypes, "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "matmul_fraction" in done.output
    assert "(+0.0%)" in done.output or "(-0.0%)" in done.output
    assert numbers_of_file(path)["step_s"] == pytest.approx(TRUTH["step_s"])
    asked = ["--trace", str(trace), *run, *dtypes, "--json", "-o", str(tmp_path / "json.toml")]
    result = json.loads(CliRunner().invoke(command, asked).stdout)
    jsonschema.validate({"result": result}, schema_of("calibrate"))
    without = CliRunner().invoke(command, [*run, "-o", str(tmp_path / "other.toml")])
    assert (without.exit_code, "give --trace too" in without.output) == (2, True)


def test_a_step_of_one_gpu_that_gathers_from_nobody_gives_the_numbers_of_its_kernels():
    """Recorded on an H200: see `tests.timeline.kineto.test_gpu`."""
    path = Path(gpu_trace.__file__).parent / "recorded/h200.fsdp2.rank0.json.gz"
    plan = Plan(stack="plain", micro_batch=8, seq_len=1024, param_dtype="bf16", reduce_dtype="fp32")

    found = calibrate_from([path], "gpt2-124m", Cluster("H200", gpus=1), plan)

    assert found.measured_step_s == pytest.approx(0.105, rel=0.01)
    assert {"matmul_fraction", "attention_backward", "kernel_gap_s"} <= set(found.numbers)
    with pytest.raises(ValueError, match="the trace has 12 units beside the root"):
        calibrate_from([path], "gpt2-1.5b", Cluster("H200", gpus=1), plan)
