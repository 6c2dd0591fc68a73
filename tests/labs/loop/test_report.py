"""The last word on a training: the line that was always there, what is known besides, and honest errors."""

import io
import json

import msgspec
import pytest
import torch
from rich.console import Console

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.loop.report import TrainingReport, compare, hardware, summary_line, versions
from labs.measure.prediction import StepPrediction
from labs.measure.utilization import RankMemory

CPU = torch.device("cpu")
PREDICTION = StepPrediction(0.10, 0.02, 60 * 2**20, ("Predicted from pieces.", "The step takes 100 ms."))


def report(**changes):
    fields = {
        "summary": "20 steps of teaching", "label": "fsdp2: shared by 2 ranks",
        "config": TrainConfig().by_key(),
        "versions": versions(), "hardware": "2 CPU cores", "ranks": 2, "first_step": 10, "last_step": 19,
        "loss_first": 5.5, "loss_last": 4.25, "step_s": 0.125, "tokens_per_s": 8192.0, "mfu": None,
        "exposed_comm_s": 0.025, "memory": [RankMemory(2**30, 2**29), RankMemory(3 * 2**29, 2**29)],
        "state_bytes": [2**20, 2**20], "tensor_bytes": 61 * 2**20, "restarts": 1, "resumed_from": 10, "saved": 2,
        "failed_saves": ["step 15: No space left on device"], "stopped": "", "explanation": list(PREDICTION.sentences),
        "compared": compare(
            PREDICTION, step_s=0.125, exposed_comm_s=0.025, peak_bytes=61 * 2**20, device=CPU, busy=0.5
        ),
    }  # fmt: skip
    return TrainingReport(**(fields | changes))


def printed(one, **how):
    out = io.StringIO()
    one.print(Console(file=out, width=100, highlight=False, **how))
    return out.getvalue()


class TestSummary:
    def test_is_the_line_that_a_training_ends_with(self):
        line = summary_line(TrainConfig(), RankPlace(world_size=2), CPU, 1_040_640, [5.5453, 5.0, 4.1], 8192.4)
        assert line == (
            "3 steps of teaching (1,040,640 parameters), loss 5.5453 to 4.1000; "
            f"2 ranks on cpu, gloo, torch {torch.__version__}, 8,192 tokens/s"
        )

    def test_says_why_a_training_stopped_early(self):
        line = summary_line(TrainConfig(), RankPlace(), CPU, 7, [5.5], 1.0, stopped="Ctrl-C")
        assert line.startswith(
            "stopped by Ctrl-C after 1 steps of teaching (7 parameters), loss 5.5000 to 5.5000; 1 rank"
        )

    def test_a_resumed_run_with_nothing_left_to_do_has_no_losses(self):
        assert summary_line(TrainConfig(), RankPlace(), CPU, 7, [], 0.0).startswith(
            "0 steps of teaching (7 parameters); 1"
        )


class TestCompared:
    def test_the_error_is_of_the_prediction(self):
        step, exposed, memory = compare(
            PREDICTION, step_s=0.125, exposed_comm_s=0.0, peak_bytes=None, device=CPU, busy=0.5
        )
        assert step.error == pytest.approx(-0.2)
        assert "something else used the cores during training" in step.why
        assert (exposed.error, exposed.why) == (None, "")  # no part of nothing
        assert (memory.measured, memory.error) == (None, None)

    def test_the_reason_depends_on_the_sign_and_on_how_busy_the_machine_is(self):
        step, *_ = compare(PREDICTION, step_s=0.05, exposed_comm_s=None, peak_bytes=None, device=CPU, busy=3.2)
        assert step.why == (
            "something else used the cores while the pieces were timed (the system says that 3.2 processes wanted "
            "each core)"
        )

    def test_a_small_error_needs_no_reason(self):
        step, *_ = compare(PREDICTION, step_s=0.105, exposed_comm_s=None, peak_bytes=None, device=CPU, busy=9.0)
        assert step.why == ""


class TestPrinted:
    def test_begins_with_the_summary(self):
        assert printed(report()).splitlines()[0] == "20 steps of teaching"

    def test_a_file_gets_lines(self):
        text = printed(report())
        assert "  loss                    5.5000 to 4.2500\n" in text
        assert "  memory, most per rank   1.00 GiB, 1.50 GiB\n" in text
        assert "  restarts                1, went on from step 10\n" in text
        assert "  checkpoints             2 saved, 1 failed\n" in text
        assert "  failed to save          step 15: No space left on device\n" in text
        assert "  step time               predicted 100 ms, measured 125 ms, error -20%\n" in text
        assert "step time: an error of -20%; most likely something else used the cores during training" in text
        assert text.endswith("Predicted from pieces.\nThe step takes 100 ms.\n")

    def test_a_terminal_gets_a_table(self):
        text = printed(report(), force_terminal=True)
        assert "predicted" in text
        assert "│" in text

    def test_what_is_not_known_is_left_out(self):
        text = printed(
            report(compared=[], explanation=[], exposed_comm_s=None, restarts=0, resumed_from=None, saved=0,
                   failed_saves=[])
        )  # fmt: skip
        for word in ("MFU", "exposed", "predicted", "restarts", "checkpoints"):
            assert word not in text
        assert "MFU 41.3%" in printed(report(mfu=0.413))

    def test_of_a_long_explanation_the_most_important_is_printed(self):
        text = printed(report(explanation=[f"Sentence {n}." for n in range(9)]))
        assert "Sentence 3." in text
        assert "Sentence 4." not in text

    def test_text_with_brackets_is_printed_as_it_is(self):
        assert "[Errno 28] [/x]" in printed(report(failed_saves=["[Errno 28] [/x]"]))


class TestFile:
    def test_can_be_read_back(self, tmp_path):
        one = report()
        one.write(tmp_path / "report.json")
        assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=TrainingReport) == one
        told = json.loads((tmp_path / "report.json").read_text())
        assert told["config"]["global_batch"] == 8
        assert told["compared"][0]["what"] == "step time"
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_hardware_of_a_cpu_says_how_many_threads():
    assert "CPU cores" in hardware(RankPlace(), CPU)
    assert f"{torch.get_num_threads()} thread" in hardware(RankPlace(), CPU)
