"""A plan as a page of Markdown: the table to have in view, then what to say and run, row by row."""

from __future__ import annotations

from fsdp_sim.learn.classroom.plans import Homework, LessonPlan, LessonSlot, minutes_of, plans
from fsdp_sim.learn.classroom.sections import sections
from fsdp_sim.learn.find import load

MADE = "<!-- Made by `fsdp-sim teach write` from plans.toml: change it there. -->"
NOTEBOOKS = "../.."  # from the page's folder


def page(plan: LessonPlan) -> str:
    """The page of a plan.

    Raises:
        ValueError: a row has less time than its exercises say they take; the message names plan and row.
    """
    check_times(plan)
    lines = [MADE, "", f"# {plan.title}", "", f"{plan.length}. {plan.for_whom}", "", "At the end one can", ""]
    lines += [f"- {outcome}" for outcome in plan.outcomes]
    lines += ["", f"**Before it begins.** {plan.before}"]
    for week in range(1, plan.sessions + 1):
        lines += _session(plan, week)
    return "\n".join(lines) + "\n"


def check_times(plan: LessonPlan) -> None:
    """Raise ValueError if a row has less time than its exercises, or an exercise stands in another section."""
    for number, row in enumerate(plan.row, start=1):
        place = f"plan {plan.name}, row {number} (week {row.week}, minute {row.minute})"
        if row.minutes < (needed := minutes_of(row.exercises)):
            raise ValueError(f"{place}: has {row.minutes} minutes, and {', '.join(row.exercises)} take {needed}")
        for name in row.exercises:
            if name not in sections()[row.section].exercises:
                raise ValueError(f"{place}: exercise {name} is not in section {row.section}")


def _session(plan: LessonPlan, week: int) -> list[str]:
    rows, several = plan.session(week), plan.sessions > 1
    lines = ["", f"## Week {week}"] if several else []
    level = "###" if several else "##"
    lines += ["", f"{level} At a glance", "", "| at | minutes | how | what | where | late? |"]
    lines += ["| --- | --- | --- | --- | --- | --- |", *map(_glance, rows), f"| {_end(plan)} | | | end | | |"]
    lines += ["", f"{level} When late", "", *_when_late(plan, week), "", f"{level} Row by row"]
    for row in rows:
        lines += _detail(row)
    for homework in plan.homework:
        if homework.week == week:
            lines += ["", f"{level} Until next time" if week < plan.sessions else f"{level} To go on", ""]
            lines += _homework(homework)
    return lines


def _end(plan: LessonPlan) -> str:
    return f"{plan.minutes // 60}:{plan.minutes % 60:02d}"


def _glance(row: LessonSlot) -> str:
    where = sections()[row.section].link(NOTEBOOKS) if row.section else ""
    late = "skip" if row.skip_when_late else ""
    return f"| {row.at} | {row.minutes} | {row.mode} | {row.what} | {where} | {late} |"


def _when_late(plan: LessonPlan, week: int) -> list[str]:
    skipped = [row for row in plan.session(week) if row.skip_when_late]
    if not skipped:
        return ["Nothing here can be left out: shorten the discussion."]
    saved = plan.saved(week)
    lines = [f"Leave out, beginning with the last; together {saved} of {plan.minutes} minutes:", ""]
    return lines + [f"- {row.at}, {row.minutes} minutes: {row.what}" for row in skipped]


def _detail(row: LessonSlot) -> list[str]:
    lines = ["", f"**{row.at}, {row.minutes} minutes, {row.mode}.** {row.what}"]
    if row.say:
        lines += ["", f"> {row.say}"]
    if row.is_command:
        lines += ["", f"Run in a terminal: `{row.run}`"]
    elif row.run:
        lines += ["", f"Run the cell with `{row.run}`, after all above it."]
    return lines + (["", *_exercises(row.exercises)] if row.exercises else [])


def _exercises(chosen: tuple[str, ...]) -> list[str]:
    found = [load(name) for name in chosen]
    return [
        f"- `{e.name}`: {e.title} ({e.minutes} minutes, [what to expect](../expect/{e.chapter}.md#{e.name}))"
        for e in found
    ]


def _homework(homework: Homework) -> list[str]:
    read = ", ".join(sections()[name].link(NOTEBOOKS) for name in homework.read)
    lines = [f"Work through: {read}.", "", f"Exercises, together {minutes_of(homework.exercises)} minutes:", ""]
    return lines + _exercises(homework.exercises)


def listing() -> str:
    """The plans, one in a line."""
    return "\n".join(f"{plan.name:12} {plan.length:32} {plan.title}" for plan in plans().values())
