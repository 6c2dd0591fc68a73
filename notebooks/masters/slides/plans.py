"""A plan of the instructor's kit as a deck: each row shows slides of its section, with its minutes in the notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from fsdp_sim.learn.classroom.plans import LessonPlan, LessonSlot, clock, minutes_of
from fsdp_sim.learn.classroom.sections import NotebookSection, sections
from fsdp_sim.learn.find import load
from notebooks.masters.slides import words
from notebooks.masters.slides.chapters import edition
from notebooks.masters.slides.deck import Deck, Slide

MOST_PER_ROW = 4
"""Slides: more than these are for a chapter's own deck."""
MOST_IN_LIST = 8
ASK = "Say where one can ask until then, and that an exercise has three hints."

Decks = Mapping[str, Deck]


def chapters_of(plan: LessonPlan) -> list[str]:
    """The notebooks whose slides a plan shows."""
    found = [sections()[row.section].notebook for row in plan.row if row.section]
    return list(dict.fromkeys(found))


def deck(plan: LessonPlan, chapters: Decks) -> Deck:
    """The deck of a plan.

    Args:
        chapters: the decks of the notebooks that it shows, by name.
    """
    slides = [_title(plan), _outcomes(plan)]
    for week in range(1, plan.sessions + 1):
        if plan.sessions > 1:
            slides.append(_week(plan, week))
        for row in plan.session(week):
            slides += _row(row, plan, chapters, shown=slides[-MOST_PER_ROW:])
        slides += _homework(plan, week)
    return Deck(plan.name, plan.title, (*slides, _remember(plan)))


def mark(row: LessonSlot) -> str:
    """When a row is, and how: what its notes begin with."""
    late = " May be skipped when late." if row.skip_when_late else ""
    return f"**{row.at} to {clock(row.minute + row.minutes)}, {row.mode}.**{late}"


def told(row: LessonSlot) -> str:
    """What the one who teaches does and says in a row."""
    run = ""
    if row.run:
        run = f" Run in a terminal: `{row.run}`." if row.is_command else f" Run, after all above it: `{row.run}`."
    say = f' Say: "{row.say}"' if row.say else ""
    return f"{mark(row)} {_sentence(row.what)}{run}{say}"


def _row(row: LessonSlot, plan: LessonPlan, chapters: Decks, *, shown: Sequence[Slide]) -> list[Slide]:
    """The slides of a row, without those that were just shown; where all were, it asks what is to be found out."""
    found = _slides_of(row, plan, chapters)
    if row.mode == "live":
        just = {(slide.section, slide.cell, slide.kind) for slide in shown}
        found = [slide for slide in found if (slide.section, slide.cell, slide.kind) not in just]
    first, *others = found or [_question("Look", row)]
    return [first.with_notes(told(row)), *(slide.with_notes(f"{mark(row)} Goes on.") for slide in others)]


def _slides_of(row: LessonSlot, plan: LessonPlan, chapters: Decks) -> list[Slide]:
    if row.mode == "break":
        back = clock(row.minute + row.minutes)
        return [Slide("break", "Break", f"<p>{row.minutes} minutes: we go on at {back}</p>", over=plan.title)]
    section = sections()[row.section]
    of = [slide for slide in chapters[section.notebook].slides if slide.section == row.section]
    if row.mode == "exercise":
        titles = [words.inline(load(name).title) for name in row.exercises]
        return [slide for slide in of if slide.kind == "exercise" and slide.title in titles]
    if row.mode == "live":
        return live(of, _cell(section, row.run))
    if row.mode == "talk" and of and of[0].kind == "section" and of[0].body:
        return [of[0]]
    return [_question("Discuss" if row.mode == "discussion" else "Think", row)]


def _question(do: str, row: LessonSlot) -> Slide:
    return Slide("question", do, _large(row.what), sections()[row.section].heading)


def live(slides: Sequence[Slide], cell: int) -> list[Slide]:
    """What a row shows that runs a cell: the question before it, what the cell shows, and what goes on from there.

    Args:
        slides: of the section.
        cell: the number of the cell, -1 if a command is run instead.
    """
    asked = [number for number, slide in enumerate(slides) if slide.asks and slide.cell <= max(cell, 0)]
    first = asked[-1] if asked else 0
    begun = [slide for n, slide in enumerate(slides) if n == first or (n > first and slide.cell >= cell)]
    found: list[Slide] = []
    for slide in begun:
        if slide.asks and any(not earlier.asks for earlier in found):
            break
        if slide.kind != "exercise":
            found.append(slide)
    return found[:MOST_PER_ROW]


def _cell(section: NotebookSection, run: str) -> int:
    """The number of the cell with this code in the notebook; -1 for a command."""
    cells = edition(section.notebook).cells
    runs = [number for number, cell in enumerate(cells) if cell.cell_type == "code" and run in cell.source]
    return next((number for number in runs if cells[number].source in section.text), -1)


def _title(plan: LessonPlan) -> Slide:
    body = f"<p>{words.inline(plan.for_whom)}</p>"
    notes = (f"Before it begins: {plan.before.strip()}",)
    return Slide("title", escape(plan.title), body, over=f"Learn FSDP · {plan.length}", notes=notes)


def _outcomes(plan: LessonPlan) -> Slide:
    notes = ("Read one of these out, and say that it will be tried, not told.",)
    return Slide("list", "At the end you can", _list(plan.outcomes), over=escape(plan.title), notes=notes)


def _remember(plan: LessonPlan) -> Slide:
    notes = ("Ask each to pick one of these and to say it to a neighbour.",)
    return Slide("list", "What to remember: now you can", _list(plan.outcomes), over=escape(plan.title), notes=notes)


def _week(plan: LessonPlan, week: int) -> Slide:
    chapters = dict.fromkeys(sections()[row.section].notebook for row in plan.session(week) if row.section)
    titles = "<br>".join(words.inline(sections()[name[:2]].heading) for name in chapters)
    said = f"{plan.minutes} minutes: {', '.join(row.what.rstrip('.') for row in plan.session(week)[:2])}, and more."
    return Slide("title", f"Week {week}", f"<p>{titles}</p>", over=escape(plan.title), notes=(said,))


def _homework(plan: LessonPlan, week: int) -> Iterator[Slide]:
    """What is done until next time: what to work through, then the exercises, some on a slide."""
    title, over = "Until next time" if week < plan.sessions else "To go on", f"Week {week}"
    for homework in (homework for homework in plan.homework if homework.week == week):
        read = [f"{sections()[name].name}: {sections()[name].heading}" for name in homework.read]
        yield Slide("list", f"{title}: work through", _list(read), over, notes=(ASK,))
        total = f"The exercises take {minutes_of(homework.exercises)} minutes together."
        exercises = homework.exercises
        on_each = math.ceil(len(exercises) / math.ceil(len(exercises) / MOST_IN_LIST)) if exercises else 1
        for first in range(0, len(exercises), on_each):
            names = exercises[first : first + on_each]
            solve = [f"{load(name).title} ({load(name).minutes} minutes)" for name in names]
            notes = (total, "By name: " + ", ".join(f"`{name}`" for name in names) + ".")
            yield Slide("list", f"{title}: solve", _list(solve), over, notes=notes)


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{words.inline(line)}</li>" for line in lines)
    return f'<ul class="fit">{items}</ul>'


def _large(text: str) -> str:
    return f'<p class="question">{words.inline(_sentence(text))}</p>'


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
