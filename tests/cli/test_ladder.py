"""`fsdp-sim ladder`: the table, the JSON and the exit status, on real ranks."""

import json
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from fsdp_sim.cli.main import main


@pytest.mark.tail
def test_rungs_that_agree_are_a_table_and_exit_status_0() -> None:
    done = CliRunner().invoke(main, ["ladder", "--rungs", "torch-ddp,mini-ddp", "--steps", "1"])

    assert done.exit_code == 0, done.output
    assert "All 3 rungs agree (on 2 ranks, 1 step)." in done.output
    (row,) = [line for line in done.output.splitlines() if line.startswith("mini DDP") and "=" in line]
    assert row.split()[-3:-1] == ["=", "≈"]  # as above every bit; as one process within the tolerance
    assert "layers.1.attn.qkv.bias[32:64]" in done.output
    assert "Traceback" not in done.output


def test_a_rung_that_diverges_is_named_and_the_exit_status_is_1() -> None:
    arguments = ["--rungs", "torch-ddp,mini-ddp", "--steps", "1", "--break", "same-rows@mini-ddp", "--json"]
    done = CliRunner().invoke(main, ["ladder", *arguments])

    assert done.exit_code == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["agree"] is False
    assert found["divergences"][0].startswith("mini DDP, against torch DDP: first diverges at step 1, loss, on rank 1")
    mini = found["rungs"][-1]
    assert (mini["rung"], mini["fault"]) == ("mini-ddp", "same-rows")
    assert mini["against_above"]["beyond_tolerance"]["what"] == "loss"
    assert mini["collectives"]["backward"]["ALL_REDUCE"]["count"] == 1
    assert mini["peak_bytes"] > 0


def test_help_has_examples_faults_and_the_exit_status() -> None:
    done = CliRunner().invoke(main, ["ladder", "--help"])

    assert done.exit_code == 0
    assert "fsdp-sim ladder --ranks 4 --steps 5" in done.output
    assert "Exit status: 0 if all rungs agree, 1 if one diverges" in done.output
    for name in ("mini-fsdp", "torch-hsdp", "stale-shard"):
        assert name in done.output


def test_rungs_that_cannot_cut_the_batch_are_left_out() -> None:
    with patch("labs.experiments.ladder._run", side_effect=ValueError("ranks were started")):
        done = CliRunner().invoke(main, ["ladder", "--batch", "8"])

    assert "ranks were started" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "5"], "--ranks"),
        (["--ranks", "4", "--batch", "6"], "does not divide into 4 ranks"),
        (["--rungs", "mini-fdsp"], "did you mean 'mini-fsdp'"),
        (["--break", "typo"], "no fault 'typo'"),
        (["--break", "stale-shard@mini-ddp"], "cannot be done to 'mini-ddp'"),
        (["--data", "nothing-here"], "nothing-here"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(arguments: list[str], words: str) -> None:
    with patch("labs.experiments.ladder._run", side_effect=AssertionError("ranks were started")):
        done = CliRunner().invoke(main, ["ladder", *arguments])

    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output
