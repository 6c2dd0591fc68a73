"""`fsdp-sim validate`: what it prints, and what it says when a file is wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fsdp_sim.cli.validate import validate
from fsdp_sim.validate.published import MEASURED

LINES = MEASURED.read_text().splitlines()


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Three runs of llm-foundry, one of torchtitan with its memory, and one that is quantised."""
    path = tmp_path / "few.csv"
    ids = ("c100,", "c101,", "c144,", "c213,", "c231,")
    path.write_text("\n".join([LINES[0], *(line for line in LINES if line.startswith(ids))]) + "\n")
    return path


def test_json_has_a_row_for_each_row_and_the_summary(few: Path) -> None:
    result = CliRunner().invoke(validate, [str(few), "--json"])

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["id"] for row in found["rows"]] == ["c100", "c101", "c144", "c213", "c231"]
    assert found["rows"][3]["peak_memory_GiB"] == 77.0
    assert found["rows"][3]["predicted_peak_memory_GiB"] == pytest.approx(77.0, rel=0.1)
    assert found["rows"][0]["predicted_step_time_s"] == pytest.approx(found["rows"][0]["step_time_s"], rel=0.05)
    assert set(found["summary"]) == {"time", "memory"}
    assert set(found["summary"]["time"]) == {"n", "mape", "median_abs_error", "p90_abs_error"}
    assert found["summary"]["time"]["n"] == 3  # the rows that the numbers are fitted to
    assert found["summary"]["memory"]["n"] == 1  # of plain FSDP; the other one is quantised
    assert "AnswerDotAI/fsdp_qlora (LoRA, quantised base model)" in found["by_source"]


def test_a_table_for_people(few: Path) -> None:
    result = CliRunner().invoke(validate, [str(few)])

    assert result.exit_code == 0, result.output
    assert "pytorch/torchtitan" in result.stdout
    assert "quantised" in result.stdout
    assert "Peak memory" in result.stdout


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("A100-SXM-40GB", "A1000", 1), "no GPU is called 'A1000'; the nearest names are"),
        (
            lambda text: text.replace(",2048,", ",two,", 1),
            "line 2 (id c100): Plan.seq_len is 'two'; it must be a whole number >= 1",
        ),
        (lambda text: text.replace("seq_len", "length", 1), "has no column 'seq_len'"),
    ],
)
def test_a_wrong_file_is_an_error_and_no_traceback(few: Path, edit, message: str) -> None:
    few.write_text(edit(few.read_text()))

    result = CliRunner().invoke(validate, [str(few)])

    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_too_few_rows_cannot_be_fitted(few: Path) -> None:
    result = CliRunner().invoke(validate, [str(few), "--leave-out", "model"])

    assert result.exit_code == 2
    assert "fitting 6 numbers needs at least 12" in result.stderr
