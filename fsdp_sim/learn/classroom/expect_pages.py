"""What to expect of a chapter as a page of Markdown."""

from __future__ import annotations

from collections import Counter

from fsdp_sim.learn.classroom.expect import Notes, exercises_of, notes, who, whole_message
from fsdp_sim.learn.classroom.sections import section_of_exercises
from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import CHAPTERS, names

MADE = "<!-- Made by `fsdp-sim teach write` from the exercises and expect.toml: change them there. -->"
NOTEBOOKS = "../.."  # from the page's folder


def page(chapter: str) -> str:
    """The page of a chapter.

    Raises:
        ValueError: there is no such chapter.
    """
    exercises, of = exercises_of(chapter), notes().get(chapter)
    minutes = sum(exercise.minutes for exercise in exercises)
    lines = [MADE, "", f"# What to expect: {_title(chapter)}", ""]
    lines += [f"{len(exercises)} exercises, {minutes} minutes for someone who has read so far."]
    lines += [*(_by_hand(of) if of else []), "", "## The exercises"]
    for exercise in exercises:
        lines += _exercise(exercise, of)
    return "\n".join(lines) + "\n"


def _by_hand(of: Notes) -> list[str]:
    lines = ["", "## Ask the room", ""]
    for number, question in enumerate(of.question, start=1):
        lines += [f"{number}. {question.ask}", "", f"   *A good answer:* {question.good}", ""]
    if of.believed:
        lines += ["## What people believe", ""]
        lines += [f"- \u201c{entry.statement}\u201d {entry.truth}" for entry in of.statements]
    return lines if lines[-1] else lines[:-1]


def _title(chapter: str) -> str:
    """The chapter's name, and the number of the notebook in which most of its exercises stand."""
    places = section_of_exercises()
    numbers = Counter(places[name].name[:2] for name, of in names().items() if of == chapter and name in places)
    words = chapter.replace("_", " ")
    return f"{words} (notebook {numbers.most_common(1)[0][0]})" if numbers else words


def _exercise(exercise: Exercise, of: Notes | None) -> list[str]:
    section = section_of_exercises().get(exercise.name)
    where = f", in {section.link(NOTEBOOKS)}" if section else ""
    lines = ["", f'<a id="{exercise.name}"></a>', "", f"### {exercise.title}", ""]
    lines += [f"`{exercise.name}`: {exercise.minutes} minutes, {exercise.kind}, {exercise.difficulty}/5{where}", ""]
    if of and (sentence := of.sentence_for(exercise.name)):
        lines += [f"**What usually helps.** {sentence}", ""]
    lines += ["Wrong answers that it knows, and what each is told:", ""]
    for wrong, name in zip(exercise.wrong, who(exercise.wrong, exercise), strict=True):
        lines.append(f"- {name or 'another'}: {escaped(whole_message(exercise, wrong.message))}")
    return lines + (["", _shortcuts(exercise)] if exercise.shortcuts else [])


def _shortcuts(exercise: Exercise) -> str:
    """One line; shortcuts that are told the same stand together."""
    together: dict[str, list[str]] = {}
    for wrong, name in zip(exercise.shortcuts, who(exercise.shortcuts, exercise), strict=True):
        together.setdefault(escaped(whole_message(exercise, wrong.message)), []).append(name or "a made-up result")
    sentences = (f"{', '.join(dict.fromkeys(some))} (told: {message})" for message, some in together.items())
    return f"Shortcuts that it refuses: {'; '.join(sentences)}."


def escaped(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("__", "\\_\\_")


def listing() -> str:
    """The chapters, one in a line: how many exercises, and how many questions to ask."""
    by_hand, lines = notes(), []
    for number, chapter in enumerate(CHAPTERS, start=1):
        exercises = sum(of == chapter for of in names().values())
        asked = len(by_hand[chapter].question) if chapter in by_hand else 0
        lines.append(f"{number:02d} {chapter:12} {exercises:2} exercises, {asked} questions to ask")
    return "\n".join(lines)
