"""What a run says of itself when it ends, read from its report.json."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fsdp_sim.timeline import Op, read_timeline
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.loop import end_of_run
from labs.model import empty
from tests.faults.agents import agents, starting
from tests.faults.runs import checkpoints, losses, tensors_of
from tests.measure.allocator import Allocator

SHORT = ("--steps=4", "--global_batch=4", "--seq_len=32", "--n_layer=1", "--dropout=0.1", "--timeout_s=60")
PARAMS = sum(p.numel() for p in empty(TrainConfig(n_layer=1).model_config).parameters())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        with agents() as server:
            yield server


@pytest.fixture
def start(server, tmp_path):
    with starting(server, tmp_path, SHORT) as start:
        yield start


@pytest.fixture(scope="module")
def plain(server, tmp_path_factory):
    """A run of two ranks to its end, asked for nothing."""
    job = server.start(tmp_path_factory.mktemp("plain"), *SHORT)
    assert job.wait() == 0, job.printed
    return job


@pytest.fixture(scope="module")
def predicted(server, tmp_path_factory):
    """The same run, asked for a sample and a prediction."""
    job = server.start(tmp_path_factory.mktemp("predicted"), *SHORT, "--predict=true", "--sample=8")
    assert job.wait(120) == 0, job.printed
    return job


@pytest.fixture(scope="module")
def profiled(server, tmp_path_factory):
    """The same run, with three steps more that are recorded."""
    job = server.start(tmp_path_factory.mktemp("profiled"), *SHORT, "--profile=3")
    assert job.wait(120) == 0, job.printed
    return job


def report(job):
    return json.loads((job.out / "report.json").read_text())


def events(job, kind):
    lines = [json.loads(line) for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == kind]


class TestReport:
    def test_of_a_run_to_its_end(self, plain):
        found = report(plain)
        assert (found["ranks"], found["first_step"], found["last_step"]) == (2, 0, 3)
        assert (found["stopped"], found["resumed_from"], found["restarts"]) == ("", None, 0)
        assert (found["saved"], found["failed_saves"]) == (1, [])
        assert [found["loss_first"], found["loss_last"]] == [losses(plain)[0], losses(plain)[3]]
        assert found["step_s"] > 0
        assert found["tokens_per_s"] == pytest.approx(4 * 32 / found["step_s"])
        assert found["config"]["n_layer"] == 1
        assert (found["compared"], found["explanation"], found["exposed_comm_s"]) == ([], [], None)
        assert found["summary"].startswith(f"4 steps of teaching ({PARAMS:,} parameters), loss ")
        assert found["summary"] in plain.printed

    def test_each_rank_keeps_its_share_of_the_state(self, start, plain):
        """Parameters and AdamW's two moments in fp32, and a scalar per parameter."""
        alone = start("--api=single", ranks=1)
        assert alone.wait() == 0, alone.printed
        (whole,), each = report(alone)["state_bytes"], report(plain)["state_bytes"]
        scalars = 4 * len(list(empty(TrainConfig(n_layer=1).model_config).parameters()))
        assert whole == 3 * 4 * PARAMS + scalars
        assert each == [(whole - scalars) / 2 + scalars] * 2  # all sizes are even here

    def test_memory_is_of_every_rank(self, plain):
        found = report(plain)["memory"]
        assert len(found) == 2
        assert all(2**27 < peak < 2**34 and 0 < now <= peak for peak, now, _ in found)  # bytes: torch alone takes more
        assert [workspace for _, _, workspace in found] == [0, 0]  # cuBLAS's, on GPUs

    def test_of_a_run_that_went_on(self, start, plain):
        job = start("--steps=2")
        assert job.wait() == 0, job.printed
        again = start()
        assert again.wait() == 0, again.printed
        found = report(again)
        assert (found["first_step"], found["last_step"], found["resumed_from"]) == (2, 3, 2)
        assert found["loss_last"] == losses(plain)[3]


class TestStopped:
    """Told to leave, a run does not begin what takes long, and says why it left."""

    def test_all_ranks_leave_without_a_sample(self, start):
        job = start("--steps=100000", "--sample=8", "--predict=true", "--timeout_s=20")
        job.until("step   2")
        job.ranks()[0].terminate()
        assert job.wait(40) == 1
        assert (job.out / "PREEMPTED").exists()
        found = report(job)
        assert "SIGTERM" in found["stopped"]
        assert f"stopped by {found['stopped']} after " in found["summary"]
        assert found["compared"] == []
        assert not events(job, "sampled")
        assert "another rank is gone" not in job.printed


class TestProfile:
    def test_all_ranks_are_in_the_timeline_that_it_leaves(self, profiled):
        timeline = read_timeline(profiled.out / "timeline.jsonl.gz")
        assert (timeline.ranks, len(timeline.steps), timeline.header.clock) == ((0, 1), 3, "measured")
        for rank in (0, 1):
            gathers = [
                e.unit for e in timeline.ops if (e.op, e.rank, e.step) == (Op.ALL_GATHER, rank, timeline.steps[1])
            ]
            assert gathers == ["root", "layers.0", "layers.0"]

    def test_the_line_says_that_torch_issued_what_was_predicted(self, profiled):
        found = report(profiled)
        assert found["compared"] == []  # nobody asked for it
        assert 0 < found["exposed_comm_s"] < 60
        (line,) = found["explanation"]
        assert line.startswith("Recorded: step ")
        assert line.endswith("; issued as predicted.")
        assert line in profiled.printed

    def test_what_is_trained_to_be_recorded_is_kept_nowhere(self, profiled, plain):
        assert tensors_of(checkpoints(profiled)[-1]) == tensors_of(checkpoints(plain)[-1])
        assert not (plain.out / "timeline.jsonl.gz").exists()

    @pytest.mark.parametrize("where", ["profile-start", "profile-read"])
    def test_a_rank_that_cannot_record_leaves_the_others_in_no_collective(self, start, where):
        job = start("--profile=2", faults=f"raise:{where}@*@1")
        assert job.wait(120) == 0, job.printed
        (said,) = [line for line in report(job)["explanation"] if "was not measured" in line]
        assert said.startswith(
            "Exposed communication was not measured: rank 1: torch.profiler: RuntimeError: the fault"
        )


class TestPrediction:
    def test_stands_beside_the_measurement(self, predicted):
        found = report(predicted)
        rows = {row["what"]: row for row in found["compared"]}
        assert set(rows) == {"step time", "exposed communication", "peak memory of tensors"}
        for row in rows.values():
            assert math.isfinite(row["predicted"])
            assert math.isfinite(row["measured"])
            assert row["predicted"] > 0
            assert row["measured"] > 0
        assert rows["step time"]["measured"] == found["step_s"]
        assert rows["exposed communication"]["measured"] == found["exposed_comm_s"]
        assert rows["peak memory of tensors"]["measured"] == found["tensor_bytes"] > max(found["state_bytes"])
        assert found["explanation"]
        assert found["explanation"][0] in predicted.printed

    def test_what_is_trained_to_be_recorded_is_kept_nowhere(self, predicted, plain):
        assert [path.name for path in checkpoints(predicted)] == ["step-4"]
        assert tensors_of(checkpoints(predicted)[-1]) == tensors_of(checkpoints(plain)[-1])
        assert losses(predicted) == losses(plain)
        assert report(predicted)["last_step"] == 3

    def test_a_sample_is_printed_and_written_down(self, predicted):
        (event,) = events(predicted, "sampled")
        assert event["text"].startswith("def ")
        assert event["text"] in predicted.printed

    @pytest.mark.tail
    def test_one_that_fails_is_told_in_a_sentence_and_the_run_was_good(self, start):
        """Step 7 is one of those that time the pieces; the training has 4, and repeats the last to be recorded."""
        job = start("--predict=true", faults="raise:loss@7")
        assert job.wait(120) == 0, job.printed
        found = report(job)
        assert found["compared"] == []
        assert any(sentence.startswith("No prediction: ") for sentence in found["explanation"]), found["explanation"]
        assert "No prediction: " in job.printed
        assert "Traceback" not in job.printed


def test_with_no_steps_to_do_it_ends_cleanly(start, plain, tmp_path):
    shutil.copytree(plain.out, tmp_path / "run")
    before = (tmp_path / "run" / "report.json").read_bytes()
    job = start("--sample=8", "--predict=true")
    assert job.wait() == 0, job.printed
    assert "all 4 steps are done; more are asked for with --steps" in job.printed
    assert (job.out / "report.json").read_bytes() == before  # that of the run that did the steps
    assert events(job, "sampled")  # of the model that is there
    assert [path.name for path in checkpoints(job)] == ["step-4"]


class MadeOnCpu(TorchFunctionMode):
    """What is asked for on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}) | ({"device": "cpu"} if kwargs and "device" in kwargs else {}))


def test_on_a_gpu_what_cublas_keeps_is_memory_and_no_tensor(monkeypatch, tmp_path):
    """As seen from what torch.cuda answers; not run on a GPU."""
    name, gib = "NVIDIA H100 80GB HBM3", 2**30
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name, total_memory=80 * gib)
    )
    monkeypatch.setattr(end_of_run.EndOfRun, "_recorded", lambda self, step, steps: None)  # no GPU, no profile
    config = TrainConfig(n_layer=1, out=str(tmp_path), device="cuda")
    run = SimpleNamespace(
        config=config,
        model=config.model_config,
        place=RankPlace(),
        device=torch.device("cuda", 0),
        loader=lambda _: None,
    )
    training = SimpleNamespace(
        run=run, wrapped=SimpleNamespace(n_params=PARAMS, label="fsdp2"), state_bytes=0, position=0, step=1,
        resumed_from=None, saved=0, failed_saves=[],
    )  # fmt: skip
    ending, gpu = end_of_run.EndOfRun(training), Allocator(monkeypatch)
    ending.step(0.1, 5.5)
    gpu.matmul()
    workspace, tensors = gpu.now, 3 * gib
    gpu.alloc(tensors)
    gpu.alloc(-gib)
    with MadeOnCpu():
        ending.measure(SimpleNamespace(), stopped="")
        ending.report()

    found = json.loads((tmp_path / "report.json").read_text())
    assert found["memory"] == [[tensors + workspace, tensors + workspace, workspace]]
    (peak,) = [row for row in found["compared"] if row["what"] == "peak memory of tensors"]
    assert peak["measured"] == found["tensor_bytes"] == tensors
