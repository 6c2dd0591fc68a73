"""Plans for teaching: from 45 minutes to six weeks, each a table of rows with minute marks, as data and as a page.

`plans` reads ``notebooks/instructor/plans.toml`` and refuses what does not add up: marks that leave a gap, a session
without a break, a section or an exercise that is not there. `page` renders one, with the exercises' own minutes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from fsdp_sim.learn.classroom.sections import instructor, sections
from fsdp_sim.learn.find import load, names
from fsdp_sim.words import nearest

LONGEST_WITHOUT_BREAK = 90  # minutes


class LessonSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some minutes of a plan.

    Attributes:
        minute: from the start of the session.
        what: what happens, for the one who teaches.
        section: where the course has it, such as ``05.3``; empty for a break.
        run: of a live row: a piece of the code of the cell to run, or a command.
        exercises: what the room solves.
        say: one sentence that is said; empty for a break.
        week: of a course of several sessions.
    """

    minute: int
    minutes: int
    what: str
    mode: Literal["talk", "live", "exercise", "break", "discussion"]
    section: str = ""
    run: str = ""
    exercises: tuple[str, ...] = ()
    say: str = ""
    skip_when_late: bool = False
    week: int = 1

    @property
    def at(self) -> str:
        """When it begins, as ``1:05``."""
        return clock(self.minute)

    @property
    def is_command(self) -> bool:
        """Whether ``run`` is typed into a terminal; else it is code of a cell."""
        return self.run.startswith(("fsdp-sim ", "make ", "python -m "))


class Homework(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done between two sessions: sections or labs to work through, and exercises."""

    week: int
    read: tuple[str, ...]
    exercises: tuple[str, ...]


class LessonPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan.

    Attributes:
        minutes: of a session.
        outcomes: what those who came can do at the end.
        before: what has to be done before it begins.
        sessions: 1, or one for each week.
    """

    name: str
    title: str
    for_whom: str
    minutes: int
    outcomes: tuple[str, ...]
    before: str
    row: tuple[LessonSlot, ...]
    sessions: int = 1
    homework: tuple[Homework, ...] = ()

    @property
    def length(self) -> str:
        return f"{self.sessions} sessions of {self.minutes} minutes" if self.sessions > 1 else f"{self.minutes} minutes"

    def session(self, week: int) -> list[LessonSlot]:
        return [row for row in self.row if row.week == week]

    def saved(self, week: int) -> int:
        """Minutes that are saved in a session by leaving out all that may be left out."""
        return sum(row.minutes for row in self.session(week) if row.skip_when_late)


def clock(minute: int) -> str:
    return f"{minute // 60}:{minute % 60:02d}"


def plans(file: Path | None = None) -> dict[str, LessonPlan]:
    """The plans by name, in the order of the file.

    Args:
        file: to read; the kit's own if None.

    Raises:
        ValueError: something is wrong in the file; the message names the plan, the row and what would be right.
    """
    file = file or instructor() / "plans.toml"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))["plan"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file.name}: {error}") from None
    except KeyError:
        raise ValueError(f"{file.name} has no [[plan]]") from None
    found = [_plan(number, table) for number, table in enumerate(tables, start=1)]
    return {plan.name: plan for plan in found}


def plan_named(name: str) -> LessonPlan:
    """A plan by its name.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    known = plans()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"there is no plan {name!r}; {hint}")
    return known[name]


def _plan(number: int, table: dict[str, Any]) -> LessonPlan:
    place = f"plan {table.get('name', number)}"
    rows = table.get("row", [])
    for count, row in enumerate(rows if isinstance(rows, list) else [], start=1):
        _converted(row, LessonSlot, f"{place}, row {count} (week {row.get('week', 1)}, minute {row.get('minute')})")
    plan: LessonPlan = _converted(table, LessonPlan, place)
    for message in _wrong(plan):
        raise ValueError(f"{place}, {message}")
    return plan


def _converted(table: object, kind: Any, place: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}") from None


def _wrong(plan: LessonPlan) -> Iterator[str]:
    if not 3 <= len(plan.outcomes) <= 5:
        yield f"outcomes: there are {len(plan.outcomes)}; 3 to 5 can be remembered"
    if {row.week for row in plan.row} != set(range(1, plan.sessions + 1)):
        yield f"sessions = {plan.sessions}, and its rows are of other weeks"
    for week in range(1, plan.sessions + 1):
        now = since = 0  # the minute reached, and the end of the last break
        for row in plan.session(week):
            where = f"row {plan.row.index(row) + 1} (week {week}, minute {row.minute}): "
            if row.minute != now or row.minutes <= 0:
                yield f"{where}the row before it ends at minute {now}, and each takes at least one"
            since = row.minute if row.mode == "break" else since
            now += row.minutes
            if row.mode == "break":
                since = now
            elif now - since > LONGEST_WITHOUT_BREAK:
                yield f"{where}it ends {now - since} minutes after the last break; {LONGEST_WITHOUT_BREAK} are the most"
            yield from (where + message for message in _wrong_row(row))
        if now != plan.minutes:
            yield f"week {week}: its rows take {now} minutes, and the plan has {plan.minutes}"
    for homework in plan.homework:
        yield from (f"homework of week {homework.week}: {m}" for m in _unknown(homework.read, homework.exercises))


def _wrong_row(row: LessonSlot) -> Iterator[str]:
    if row.mode == "break":
        return
    if not row.say or not row.section:
        yield f"a row of mode {row.mode!r} says a sentence (say) and where the course has it (section)"
    if (row.mode == "live") != bool(row.run):
        yield "a live row, and no other, names what to run"
    if (row.mode == "exercise") != bool(row.exercises):
        yield "a row of mode 'exercise', and no other, names exercises"
    yield from _unknown([row.section], row.exercises)
    if row.run and not row.is_command and row.section in sections() and row.run not in sections()[row.section].text:
        yield f"run: section {row.section} has no cell with {row.run!r}"


def _unknown(places: list[str] | tuple[str, ...], exercises: tuple[str, ...]) -> Iterator[str]:
    for name in places:
        if name and name not in sections():
            near = nearest(name, sections()) or list(sections())[:1]
            yield f"there is no section {name!r}; did you mean {near[0]!r}?"
    for name in exercises:
        if name not in names():
            near = nearest(name, names()) or list(names())[:1]
            yield f"there is no exercise {name!r}; did you mean {near[0]!r}?"


def minutes_of(exercises: tuple[str, ...]) -> int:
    """The sum of the exercises' own minutes: imports their files."""
    return sum(load(name).minutes for name in exercises)
