"""``fsdp-sim drill``: questions, a mock interview, the list, the sheet, and what comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fsdp_sim.cli.drill import drill
from fsdp_sim.learn import kept
from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.sheet import HARDEST
from fsdp_sim.learn.drill.spoken import spoken
from fsdp_sim.learn.drill.template import TOPICS, templates

INTERVIEWS = Path(__file__).parents[2] / "docs/interviews"


@pytest.fixture(autouse=True)
def own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "progress.json"))


def call(*arguments: str, types: str = "") -> Result:
    result = CliRunner().invoke(drill, arguments, input=types)
    assert result.exit_code == 0, result.output
    return result


def test_a_question_a_wrong_unit_a_wrong_answer_and_the_report() -> None:
    said = call("--topic", "memory", "--questions", "1", "--seed", "3", types="~\nz\n?\n").output
    assert said.count("I hear no number in that; answer with one, such as 1.5 GB.") == 2
    assert "\n1. memory, level 1" in said
    assert "It is " in said
    assert "0 of 1 right. Strengths: none yet. Gaps: memory." in said
    assert sum(asked.times for asked in record.read().values()) == 1


@pytest.mark.parametrize("types", ["q\n", ""])
def test_one_may_stop_at_any_time(types: str) -> None:
    """By q, and by the end of input, as Ctrl-D and Ctrl-C end it."""
    assert "No question was answered." in call("--seed", "1", types=types).output


def test_the_same_seed_asks_the_same() -> None:
    def asked() -> str:
        said = call("--seed", "11", "--questions", "3", types="?\n?\n?\n").output
        record.file().unlink()
        return said

    first = asked()
    assert first.count("It is ") == 3
    assert asked() == first


def test_a_mock_interview_listens_asks_on_and_reports(tmp_path: Path) -> None:
    said = "before each block we all-gather its weights, everybody runs every layer on its own data"
    types = f"?\n?\n?\n{said}\n?\n?\n?\nz why not then\nc I said that it is dropped\n\nq\n"
    types += (
        "Full sharding over all 256, micro-batch 2 of 8192 tokens, bf16, full recomputation; 99 GB at the peak\n"
        + "?\n" * 9
    )
    page = tmp_path / "report.html"
    shown = call(
        "mock", "--minutes", "5", "--seed", "2", "--page", str(page), "--design", "dense_70b", types=types
    ).output
    assert "minutes left" in shown
    assert "[all-gather its weights" in shown or "[before each block" in shown
    assert "What is missing: What becomes of the whole parameters after forward?" in shown
    assert "A strong answer says:" in shown
    assert "'z' is not the letter of a point" in shown
    assert "Kept, with your reason." in shown
    assert "of 4 right" in shown
    assert "\nLevel\n" in shown
    assert "\nThis week\n" in shown
    assert "Open design, dense_70b: That would not convince yet." in shown
    assert "Design: peak memory per GPU: you say 99 GB, the simulator" in shown
    assert page.read_text().startswith("<!doctype html>")


def test_the_list_counts() -> None:
    counted = json.loads(call("list", "--json").output)
    assert counted["templates"] == len(templates()) >= 60
    assert counted["spoken"] == len(spoken()) >= 25
    table = call("list").output
    assert all(topic in table for topic in TOPICS)


def test_the_sheet_has_every_rule() -> None:
    sheet, page = call("sheet").output, call("sheet", "--html").output
    assert all(template.rule in sheet for template in templates().values() if template.level <= HARDEST)
    assert page.startswith("<!doctype html>")


def test_due_says_what_comes_when() -> None:
    assert "Nothing was asked yet" in call("due").output
    call("--questions", "1", types="?\n")
    name = next(iter(record.read()))
    assert name[:10] in call("due").output


def test_a_topic_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(drill, ["--topic", "nccl"])
    assert result.exit_code == 2
    assert "'memory'" in result.output


@pytest.mark.parametrize("held", sorted(INTERVIEWS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_interviews_that_are_written_down_are_those_of_today(held: Path) -> None:
    """But for the time that they took: of the command, what was typed and what was said."""
    command, *lines = held.read_text(encoding="utf-8").splitlines()
    typed = [line[2:] for line in lines if line.startswith("> ")]
    said = call(*command.split()[3:], types="\n".join([*typed, ""])).output
    assert without_times(said) == without_times("\n".join(lines))


def without_times(said: str) -> list[str]:
    said = re.sub(r"(?m)\d+ minutes left| +$|^(\w+ +\d+ of \d+ +\S+ +)\d+%", r"\1", said)
    return said.replace("\n> \n", "\n>\n").splitlines()
