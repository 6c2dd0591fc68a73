"""A class's results, from progress files and saved notebooks."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fsdp_sim.learn.classroom.rollup import as_csv, gather, summaries
from fsdp_sim.learn.classroom.rollup_pages import picture
from fsdp_sim.learn.find import load
from fsdp_sim.learn.progress import ExerciseState

NAME = "all_gathers_per_step"
MISTAKE = load(NAME).wrong[0].message


def notebook(*said: str, name: str = NAME) -> str:
    """A notebook with one exercise, whose check has printed this."""
    outputs = [{"output_type": "execute_result", "data": {"text/plain": [text]}} for text in said]
    cells = [
        {"cell_type": "code", "metadata": {"exercise": name}, "source": "", "outputs": []},
        {"cell_type": "code", "metadata": {}, "source": "", "outputs": outputs},
    ]
    return json.dumps({"cells": cells, "nbformat": 4})


def progress(**entry: object) -> str:
    return json.dumps({"version": 1, "exercises": {NAME: entry, "of_another_course": {"tries": 1}}})


@pytest.fixture
def handed_in(tmp_path: Path) -> Path:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "progress.json").write_text(progress(tries=3, hints=1, grade=1))
    (tmp_path / "ada" / "04.ipynb").write_text(notebook(f"✗ Not yet: {MISTAKE}."))
    (tmp_path / "bo.json").write_text(progress(tries=2))
    (tmp_path / "cy.ipynb").write_text(notebook(f"✗ Not yet: for 4 blocks: 9, not 8. The cause: {MISTAKE}."))
    (tmp_path / "di.ipynb").write_text(notebook(f"✗ Not yet: {load(NAME).stub_says}"))
    (tmp_path / "ed.ipynb").write_text(notebook())
    (tmp_path / "fay.ipynb").write_text(notebook("★ Right, optimal: it agrees."))
    return tmp_path


def test_each_learner_is_in_the_state_that_their_files_show(handed_in: Path) -> None:
    results, refused = gather(handed_in)
    assert not refused
    assert {r.learner: r.state for r in results} == {
        "ada": ExerciseState.PASSED,
        "bo": ExerciseState.TRIED,
        "cy": ExerciseState.TRIED,
        "di": ExerciseState.OPEN,
        "ed": ExerciseState.OPEN,
        "fay": ExerciseState.OPTIMAL,
    }
    ada = next(r for r in results if r.learner == "ada")
    assert (ada.tries, ada.hints, ada.mistake) == (3, 1, MISTAKE)


def test_an_exercise_is_summed_up_over_all_with_the_mistake_most_met(handed_in: Path) -> None:
    (summary,) = summaries(gather(handed_in)[0])
    assert (summary.solved, summary.states[ExerciseState.TRIED], summary.states[ExerciseState.OPEN]) == (2, 2, 2)
    assert summary.tries == 2.5
    assert summary.mistakes == ((MISTAKE, 2),)


def test_the_table_has_a_line_for_each_and_no_formula(handed_in: Path) -> None:
    (handed_in / "=cmd").mkdir()
    (handed_in / "=cmd" / "progress.json").write_text(progress(tries=1))
    rows = list(csv.DictReader(io.StringIO(as_csv(gather(handed_in)[0]))))
    assert len(rows) == 7
    assert {row["exercise"] for row in rows} == {NAME}
    assert all(not row["learner"].startswith("=") for row in rows)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"cells": 3}',
        '{"cells": ' + "[" * 100_000,
        "{}",
        '{"cells": [{"cell_type": "code", "metadata": 3}, {"cell_type": "code"}]}',
    ],
)
def test_what_is_no_such_file_is_named_and_the_others_count(handed_in: Path, text: str) -> None:
    (handed_in / "zoe.ipynb").write_text(text)
    results, refused = gather(handed_in)
    assert len(refused) == 1
    assert refused[0].startswith("zoe.ipynb: ")
    assert len(results) == 6


def test_nothing_in_a_notebook_is_run(tmp_path: Path) -> None:
    bad = json.loads(notebook("✓ Right: yes"))
    bad["cells"][0]["source"] = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (tmp_path / "eve.ipynb").write_text(json.dumps(bad))
    gather(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_picture_has_a_bar_for_each_exercise(handed_in: Path) -> None:
    found = summaries(gather(handed_in)[0])
    assert NAME in picture(found).finding
    with pytest.raises(ValueError, match="nobody"):
        picture([])


def test_what_a_learner_wrote_drives_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "eve\x1b[2J").mkdir()
    (tmp_path / "eve\x1b[2J" / "04.ipynb").write_text(notebook("✗ Not yet: \x1b]0;title\x07 \u202e"))
    (tmp_path / "mal\x1b[2J.json").write_text("{")
    ((result,), (sentence,)) = gather(tmp_path)
    assert (result.learner, result.message) == (r"eve\x1b[2J", r"\x1b]0;title\x07 \u202e")
    assert sentence.startswith(r"mal\x1b[2J.json: ")
