"""`run`, and the command with torchrun and without."""

import sys

import pytest

from labs.cluster.torchrun import launch
from labs.experiments.hugging_face import __main__ as command
from labs.experiments.hugging_face import run_hugging_face
from labs.experiments.result import LabResult


@pytest.fixture(scope="module")
def result():
    return run_hugging_face.run(("bert",), ("fully_shard",), steps=2)


@pytest.mark.tail  # the lab's notebook runs it too
def test_every_number_is_predicted_and_measured(result):
    assert isinstance(result, LabResult)
    quantities = [row.quantity for row in result.rows]
    assert quantities[:3] == ["loss of step 0", "loss of step 1", "units"]
    assert {"numbers in root", "gathered in a step", "peak memory", "lines to start"} <= set(quantities)
    assert all(abs(error) < 0.05 for error in result.errors().values())
    assert result.timelines["bert fully_shard"].select(rank=0).ops


def test_lines_leave_out_docstrings_comments_and_blanks():
    def counted():
        """Not this."""

        # nor this
        return 1

    assert run_hugging_face.lines_of([counted]) == 2


@pytest.mark.tail
def test_under_torchrun_it_trains_one_model(warm_torchrun):
    said = launch(
        "-m", "labs.experiments.hugging_face", "--family", "bert", "--steps", "1", "--device", "cpu", progress=False
    )  # fmt: skip
    assert "bert fully_shard" in said
    assert "fully_shard: loss 0.6" in said
    assert "peak memory" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--csv", "a.csv"], "--csv is for ranks of your own"),
        (["--pretrained", "a"], "--pretrained is for ranks of your own"),
        (["--through", "fabric"], "--through is for ranks of your own"),
    ],
)
def test_what_only_torchrun_takes(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["labs.experiments.hugging_face", *arguments])
    assert command.main() == 2
    assert message in capsys.readouterr().err
