"""The plans: minutes add up, nobody sits too long, all that is named exists, and a plan that is wrong is refused."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdp_sim.cli.main import COMMANDS
from fsdp_sim.learn.classroom import plan_pages
from fsdp_sim.learn.classroom.plans import LONGEST_WITHOUT_BREAK, LessonPlan, LessonSlot, minutes_of, plan_named, plans
from fsdp_sim.learn.classroom.sections import instructor, section_of_exercises, sections
from fsdp_sim.learn.coverage import masters
from fsdp_sim.learn.find import load, names

ROOT = Path(__file__).parents[3]
ALL = list(plans().values())
ROWS = [(plan, row) for plan in ALL for row in plan.row]
each = pytest.mark.parametrize("plan", ALL, ids=lambda plan: plan.name)


def sessions(plan: LessonPlan) -> list[list[LessonSlot]]:
    return [plan.session(week) for week in range(1, plan.sessions + 1)]


def test_there_are_plans_for_45_90_and_180_minutes_a_day_and_six_weeks() -> None:
    assert [(plan.minutes, plan.sessions) for plan in ALL] == [(45, 1), (90, 1), (180, 1), (480, 1), (120, 6)]


@each
def test_minute_marks_follow_each_other_and_add_up_to_the_length(plan: LessonPlan) -> None:
    for rows in sessions(plan):
        assert [row.minute for row in rows] == [sum(r.minutes for r in rows[:n]) for n in range(len(rows))]
        assert sum(row.minutes for row in rows) == plan.minutes


@each
def test_nobody_sits_for_more_than_ninety_minutes(plan: LessonPlan) -> None:
    for rows in sessions(plan):
        ends = [0, *(r.minute + r.minutes for r in rows if r.mode == "break")]
        begins = [*(r.minute for r in rows if r.mode == "break"), plan.minutes]
        assert all(begin - end <= LONGEST_WITHOUT_BREAK for begin, end in zip(begins, ends, strict=True))


@each
def test_a_fifth_of_every_session_can_be_saved(plan: LessonPlan) -> None:
    for week in range(1, plan.sessions + 1):
        assert plan.saved(week) >= 0.2 * plan.minutes
        assert not any(row.skip_when_late for row in plan.session(week) if row.mode == "break")


@each
def test_sections_stand_in_the_masters_and_exercises_in_their_sections(plan: LessonPlan) -> None:
    for row in plan.row:
        chapter, _, number = row.section.partition(".")
        if row.section:
            master = next(masters().glob(f"{chapter}_*.py")).read_text()
            assert not number or re.search(rf"^# ## {number}\. ", master, re.MULTILINE), row.section
        assert set(row.exercises) <= set(sections()[row.section].exercises if row.exercises else ()), row
        assert set(row.exercises) <= set(names())


@each
def test_an_exercise_has_the_minutes_that_it_says(plan: LessonPlan) -> None:
    for row in plan.row:
        assert row.minutes >= sum(load(name).minutes for name in row.exercises), row
        assert (row.mode == "exercise") == bool(row.exercises)
    plan_pages.check_times(plan)


@each
def test_every_live_row_names_something_that_is_there_to_run(plan: LessonPlan) -> None:
    for row in plan.row:
        assert (row.mode == "live") == bool(row.run), row
        program, *words = row.run.split() or [""]
        if row.mode != "live":
            continue
        if program == "fsdp-sim":
            assert words[0] in COMMANDS
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif row.is_command:
            assert find_spec(words[1])
        else:
            assert row.run in sections()[row.section].text, row


@each
def test_a_plan_says_what_one_can_do_at_the_end_and_what_to_say(plan: LessonPlan) -> None:
    assert 3 <= len(plan.outcomes) <= 5
    for row in plan.row:
        assert row.mode == "break" or row.say[-1] in ".?", row
        assert "!" not in row.say + row.what


def test_an_exercise_is_solved_once_in_a_plan() -> None:
    for plan in ALL:
        solved = [name for row in plan.row for name in row.exercises]
        solved += [name for homework in plan.homework for name in homework.exercises]
        assert len(solved) == len(set(solved)), plan.name


def test_the_homework_of_six_weeks_is_three_to_four_hours_and_sees_every_notebook() -> None:
    plan = plan_named("six-weeks")
    assert [homework.week for homework in plan.homework] == [1, 2, 3, 4, 5, 6]
    # Exercises take about half of it, or most of it; the rest is reading and the lab.
    assert all(85 <= minutes_of(homework.exercises) <= 190 for homework in plan.homework)
    read = {name for homework in plan.homework for name in homework.read} | {"00"}
    assert {name for name in sections() if name.isdigit()} <= read


@each
def test_its_page_links_to_what_is_there(plan: LessonPlan) -> None:
    page = (instructor() / "plans" / f"{plan.name}.md").read_text()
    for notebook in re.findall(r"\]\(\.\./\.\./(\w+)\.ipynb\)", page):
        assert (masters() / f"{notebook}.py").exists(), notebook
    for chapter, exercise in re.findall(r"\]\(\.\./expect/(\w+)\.md#(\w+)\)", page):
        assert f'<a id="{exercise}"></a>' in (instructor() / "expect" / f"{chapter}.md").read_text()


def test_every_exercise_of_a_notebook_has_its_section() -> None:
    where = section_of_exercises()
    assert where["forward_time"].name == "05.3"
    assert where["case_30"].heading == "It trains, and does not learn"
    assert sections()["01.lab"].heading == "Lab: measure a real step"
    assert sections()["lab_04"].notebook == "lab_04_overlap"


HEAD = """
[[plan]]
name = "short"
title = "Short"
for_whom = "Nobody."
minutes = 20
outcomes = ["one", "two", "three"]
before = "Nothing."
"""
ROW = """
[[plan.row]]
minute = {minute}
minutes = {minutes}
what = "Something"
mode = "{mode}"
section = "{section}"
say = "A sentence."
{more}
"""


def wrong(tmp_path: Path, *rows: dict[str, object], head: str = HEAD) -> str:
    common = {"minute": 0, "minutes": 20, "mode": "talk", "section": "05.3", "more": ""}
    file = tmp_path / "plans.toml"
    file.write_text(head + "".join(ROW.format(**(common | row)) for row in rows))
    with pytest.raises(ValueError, match=r"^plan short, ") as error:
        plans(file)
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"minutes": 15}, "week 1: its rows take 15 minutes, and the plan has 20"),
        ({"minute": 5}, "row 1 (week 1, minute 5): the row before it ends at minute 0"),
        ({"section": "05.33"}, "row 1 (week 1, minute 0): there is no section '05.33'; did you mean '05.3'"),
        ({"mode": "live"}, "a live row, and no other, names what to run"),
        ({"mode": "live", "more": "run = 'viz.shows('"}, "run: section 05.3 has no cell with 'viz.shows('"),
        ({"mode": "exercise"}, "a row of mode 'exercise', and no other, names exercises"),
        ({"mode": "exercise", "more": 'exercises = ["forward_times"]'}, "did you mean 'forward_time'"),
        ({"mode": "singing"}, "row 1 (week 1, minute 0): Invalid enum value 'singing'"),
        ({"more": "minuts = 3"}, "row 1 (week 1, minute 0): Object contains unknown field `minuts`"),
        ({"more": "week = 2"}, "sessions = 1, and its rows are of other weeks"),
    ],
)
def test_what_is_wrong_is_named_with_plan_and_row(tmp_path: Path, row: dict[str, object], said: str) -> None:
    assert said in wrong(tmp_path, row)


def test_two_hours_without_a_break_are_refused(tmp_path: Path) -> None:
    rows = ({"minutes": 80}, {"minute": 80, "minutes": 15})
    assert "row 2 (week 1, minute 80): it ends 95 minutes after the last break" in wrong(tmp_path, *rows)


def test_an_exercise_without_enough_time_is_refused() -> None:
    row = LessonSlot(minute=0, minutes=5, what="", mode="exercise", section="05.3", exercises=("forward_time",))
    plan = LessonPlan("short", "", "", 10, (), "", (row,))
    with pytest.raises(ValueError, match=r"plan short, row 1 .*: has 5 minutes, and forward_time take 10"):
        plan_pages.check_times(plan)
