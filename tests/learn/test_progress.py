"""Hints, solutions and the board: kept in one local file that survives what happens to it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from msgspec import structs

from fsdp_sim.learn import board, check, hint, progress, reset, solution
from fsdp_sim.learn.find import CORE, load, names
from fsdp_sim.learn.progress import ExerciseEntry, ExerciseState

NAME = "all_gathers_per_step"


def right(layers: int, keep: bool | None) -> int:
    return layers + 1 + {True: layers + 1, None: layers, False: 0}[keep]


def state() -> ExerciseState:
    return next(row.entry.state for row in board().rows if row.name == NAME)


def test_hints_come_one_after_the_other_and_the_third_stays() -> None:
    headings = [hint(NAME).heading for _ in range(4)]

    assert headings == [
        "Hint 1 of 3, the concept",
        "Hint 2 of 3, the principle",
        "Hint 3 of 3, almost the code",
        "Hint 3 of 3, almost the code",
    ]
    assert load(NAME).hints[2] in str(hint(NAME))


def test_from_open_to_passed() -> None:
    assert state() is ExerciseState.OPEN
    hint(NAME)
    assert state() is ExerciseState.OPEN
    check(NAME, lambda layers, keep: 0)
    assert state() is ExerciseState.TRIED
    check(NAME, right)
    assert state() is ExerciseState.PASSED
    check(NAME, lambda layers, keep: 0)
    assert state() is ExerciseState.PASSED  # once solved it stays solved
    reset(NAME)
    assert state() is ExerciseState.OPEN


def test_to_run_all_cells_of_a_chapter_is_no_try() -> None:
    def all_gathers_per_step(layers, reshard_after_forward):  # type: ignore[no-untyped-def]
        return ...

    check(NAME, all_gathers_per_step)
    assert state() is ExerciseState.OPEN
    assert progress.entry(NAME).tries == 0


def test_a_solution_looked_at_before_it_was_solved_is_on_the_board_and_afterwards_is_not() -> None:
    shown = solution(NAME)
    assert "def all_gathers_per_step(layers, reshard_after_forward):" in str(shown)
    assert load(NAME).why in str(shown)
    assert state() is ExerciseState.SEEN
    check(NAME, right)
    assert state() is ExerciseState.SEEN

    reset(NAME)
    check(NAME, right)
    solution(NAME)
    assert state() is ExerciseState.PASSED


def test_the_best_grade_counts() -> None:
    progress.change(NAME, lambda entry: structs.replace(entry, tries=2, grade=3))
    assert state() is ExerciseState.OPTIMAL


def test_the_board_has_every_exercise_with_its_minutes_and_says_what_is_left() -> None:
    check(NAME, right)
    shown = board()
    text, html = str(shown), shown._repr_html_()

    assert all(name in text and name in html for name in names())
    assert f"1 of {len(names())} exercises solved" in text
    left = sum(load(name).minutes for name in names()) - load(NAME).minutes
    assert f"about {left} minutes left" in text
    assert "✓ passed" in text
    assert 'scope="row"' in html


def test_the_board_has_the_core_of_a_chapter_first_as_it_comes_in_the_notebook() -> None:
    rows = board("overlap").rows

    assert [(row.name, row.core) for row in rows[:3]] == [(name, True) for name in CORE["overlap"]]
    assert not any(row.core for row in rows[3:])


@pytest.mark.parametrize(
    "damaged",
    ['{"exercises": {"all_gath', '{"exercises": {"x": {"tries": 1e400}}}', '{"x": ' + "[" * 100_000, " " * 30_000_001],
    ids=["cut short", "infinite", "nested deep", "huge"],
)
def test_a_damaged_file_is_put_aside_and_said(record: Path, damaged: str) -> None:
    record.parent.mkdir()
    record.write_text(damaged)
    assert state() is ExerciseState.OPEN

    verdict = check(NAME, right)

    assert verdict.passed
    assert "was damaged" in verdict.message
    assert record.with_name("progress.json.damaged").read_text() == damaged
    assert state() is ExerciseState.PASSED


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_never_ends_is_not_read(record: Path, what: str) -> None:
    record.parent.mkdir()
    os.mkfifo(record) if what == "pipe" else record.symlink_to("/dev/zero")
    assert state() is ExerciseState.OPEN
    assert "is no file" in progress.change(NAME, lambda entry: entry)


def test_a_place_that_cannot_be_written_costs_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "file" / "progress.json"))

    verdict = check(NAME, right)

    assert verdict.passed
    assert "could not be written" in verdict.message
    assert progress.VARIABLE in verdict.message


def test_writers_at_the_same_time_lose_nothing(record: Path) -> None:
    def write(number: int) -> None:
        for _ in range(5):
            assert progress.change(f"exercise{number}", lambda e: structs.replace(e, tries=e.tries + 1)) == ""

    threads = [threading.Thread(target=write, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert progress.read() == {"exercise0": ExerciseEntry(tries=10), "exercise1": ExerciseEntry(tries=10)}
    assert {path.name for path in record.parent.iterdir()} <= {"progress.json", "progress.json.lock"}
    assert record.stat().st_mode & 0o077 == 0  # nobody else's to read


def test_without_the_variable_it_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress.VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")

    assert progress.path().name == "progress.json"
    assert "fsdp_sim" in progress.path().parts
