"""``fsdp-sim teach``: plans, what to expect, and the pages in the tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_sim.learn.classroom import pages, plans
from fsdp_sim.learn.find import CHAPTERS
from tests.cli.commands import call, examples


def test_the_list_names_every_plan_with_its_length() -> None:
    for arguments in (["--list"], []):
        said = call("teach", "plan", *arguments).output
        assert all(f"{plan.name} " in said and plan.length in said for plan in plans.plans().values())


def test_a_plan_is_printed_as_its_page() -> None:
    said = call("teach", "plan", "90-minutes").output
    assert "# Memory and time of a step" in said
    assert "| 1:30 | | | end | | |" in said


def test_what_to_expect_is_printed_as_its_page() -> None:
    assert all(chapter in call("teach", "expect").output for chapter in CHAPTERS)
    said = call("teach", "expect", "memory").output
    assert "# What to expect: memory (notebook 01)" in said
    assert "## Ask the room" in said


CODE = "def all_gathers_per_step(layers, reshard_after_forward):\n    return layers + 1"
CELL = {"cell_type": "code", "metadata": {"exercise": "all_gathers_per_step"}, "source": CODE, "outputs": []}
HANDED_IN = json.dumps({"cells": [CELL], "nbformat": 4})


def test_examples_of_the_help_are_calls_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "handed_in").mkdir()
    (tmp_path / "handed_in" / "ada.json").write_text('{"exercises": {"all_gathers_per_step": {"tries": 2}}}')
    for name in ("handed_in.ipynb", "my_own.ipynb"):
        (tmp_path / name).write_text(HANDED_IN)
    for command in (["teach"], *(["teach", name] for name in ("plan", "expect", "rollup", "grade", "write"))):
        shown = examples(command[0]) if len(command) == 1 else _examples(command)
        assert shown
        for arguments in shown:
            assert arguments[0] == "teach"
            if arguments[1] != "write":
                assert call(*arguments).exit_code == 0, arguments


def test_a_class_is_summed_up_with_a_table_and_a_figure(tmp_path: Path) -> None:
    (tmp_path / "ada.json").write_text('{"exercises": {"all_gathers_per_step": {"tries": 2, "grade": 1}}}')
    (tmp_path / "bo.json").write_text("[")
    to_csv, page = tmp_path / "class.csv", tmp_path / "class.html"
    said = call("teach", "rollup", str(tmp_path), "--csv", str(to_csv), "--picture", str(page))
    assert said.exit_code == 0
    assert "1 of 1" in said.output
    assert "not read: bo.json" in said.output + said.stderr
    assert to_csv.read_text().splitlines()[1] == "ada,unit,all_gathers_per_step,passed,2,0,,"
    assert "all_gathers_per_step" in page.read_text()
    nowhere = call("teach", "rollup", str(tmp_path / "nowhere"))
    assert (nowhere.exit_code, "there is no folder" in nowhere.stderr) == (2, True)


@pytest.mark.tail
def test_a_notebook_is_graded_in_words_and_as_data(tmp_path: Path) -> None:
    (tmp_path / "ada.ipynb").write_text(HANDED_IN)
    said = call("teach", "grade", str(tmp_path / "ada.ipynb"), "--trusted")
    assert said.exit_code == 0
    assert "0 of 1  all_gathers_per_step: ✗ Not yet" in said.output
    assert said.output.splitlines()[-1] == "0 of 1 points"
    (one,) = json.loads(call("teach", "grade", "-", "--trusted", "--json", input=HANDED_IN.encode()).output)
    assert (one["exercise"], one["points"], one["out_of"]) == ("all_gathers_per_step", 0, 1)


def test_who_removes_the_hard_exercises_does_not_make_the_rest_all(tmp_path: Path) -> None:
    """Nor does it help to add one that nobody asked for."""
    cell = {"cell_type": "code", "metadata": {"exercise": "hooks_in_forward"}, "source": "return"}
    (tmp_path / "given_out.ipynb").write_text(json.dumps({"cells": [cell]}))
    (tmp_path / "ada.ipynb").write_text(HANDED_IN)
    said = call(
        "teach", "grade", str(tmp_path / "ada.ipynb"), "--trusted", "--given-out", str(tmp_path / "given_out.ipynb")
    )
    assert "hooks_in_forward: ✗ Not yet" in said.output
    assert "defines no function hooks_in_forward" in said.output
    assert "all_gathers_per_step" not in said.output
    assert said.output.splitlines()[-1] == "0 of 1 points"


def test_what_is_no_notebook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ada.ipynb").write_text("{}")
    said = call("teach", "grade", str(tmp_path / "ada.ipynb"))
    assert said.exit_code == 2
    assert "this is no notebook" in said.output


def _examples(command: list[str]) -> list[list[str]]:
    lines = call(*command, "--help").output.splitlines()
    return [line.split()[1:] for line in lines if line.strip().startswith("fsdp-sim ")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "90-minute"), "there is no plan '90-minute'; did you mean '90-minutes'?"),
        (("expect", "cooking"), "'cooking' is not one of 'memory'"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_sentence(arguments: tuple[str, str], said: str) -> None:
    done = call("teach", *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_the_pages_in_the_tree_are_those_that_are_made() -> None:
    kit = pages.instructor()
    found = {f"{path.parent.name}/{path.name}": path.read_text() for path in kit.glob("*/*.md")}
    assert found == pages.pages(), "run: fsdp-sim teach write"


def test_write_writes_what_has_changed_and_removes_what_nothing_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "instructor", lambda: tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: {"plans/a.md": "a\n", "expect/b.md": "b\n"})
    assert call("teach", "write").output.split() == ["plans/a.md", "expect/b.md"]
    (tmp_path / "plans" / "a.md").write_text("changed")
    (tmp_path / "plans" / "old.md").write_text("old")
    assert call("teach", "write").output.split() == ["plans/a.md", "plans/old.md"]
    assert [path.name for path in sorted(tmp_path.rglob("*.md"))] == ["b.md", "a.md"]
    assert call("teach", "write").output == "All pages were as they should be.\n"
