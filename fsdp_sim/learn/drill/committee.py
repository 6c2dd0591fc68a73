"""What a hiring committee writes after an interview: the level, the evidence, the gaps, and what to do this week."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_sim.learn.drill.design import Design
from fsdp_sim.learn.drill.heard import sentence
from fsdp_sim.learn.drill.result import QuestionResult, place
from fsdp_sim.learn.find import CHAPTERS, CORE

PASSES = 2 / 3
"""The part of a level's questions that must be right for the level."""
ENOUGH = 4
"""Questions below which nobody says a level; of the level itself, below which it is not sure."""
LEVELS = {
    0: "Not yet: the basics are not there.",
    1: "Junior: knows what FSDP does in a step.",
    2: "Middle: knows the consequences, and what each setting costs.",
    3: "Senior: answers what tells the experienced apart.",
}
SHOWN, TO_READ = 6, 4
"""Lines of evidence and of gaps; sections to read in a week."""


def decision(results: Sequence[QuestionResult]) -> str:
    """The level that was shown, and on how many questions that stands."""
    if len(results) < ENOUGH:
        asked = f"{len(results)} question{'s were' if len(results) != 1 else ' was'} asked"
        return f"No level: {asked}, and it takes at least {ENOUGH} questions."
    level = max((level for level in (1, 2, 3) if _passed(results, level)), default=0)
    counts = ", ".join(
        f"{sum(r.right for r in of)} of {len(of)} at level {level}"
        for level in (1, 2, 3)
        if (of := [r for r in results if r.level == level])
    )
    helped = sum(len(r.talk.made) - len(r.talk.first) for r in results if r.talk)
    talks = [r.talk for r in results if r.talk]
    further, answered = sum(len(talk.follow_ups) for talk in talks), sum(len(talk.answered) for talk in talks)
    claimed = _of_both_kinds(which for talk in talks for which in talk.overruled)
    returned = _of_both_kinds(which for talk in talks for which in talk.given_back)
    asked = f" {_counted(helped, 'point')} came only when asked for." if helped else ""
    asked += f" {answered} of {_counted(further, 'follow-up')} answered." if further else ""
    claims = f" {claimed} the candidate claims and the listener did not hear." if claimed else ""
    claims += f" {returned} the listener heard and the candidate gave back." if returned else ""
    n_asked = sum(r.level == level for r in results)
    few = (
        f" It rests on {n_asked} question{'s' * (n_asked != 1)} of that level: a longer interview would be surer."
        if level and n_asked < ENOUGH
        else ""
    )
    return f"{LEVELS[level]} Right: {counts}.{asked}{claims}{few}"


def _of_both_kinds(which: Iterable[str]) -> str:
    """``2 points and 1 follow-up``: letters are points, numbers follow-ups."""
    named = [*which]
    numbers = sum(each.isdigit() for each in named)
    return " and ".join(filter(None, (_counted(len(named) - numbers, "point"), _counted(numbers, "follow-up"))))


def _counted(number: int, what: str) -> str:
    """``2 points``; nothing for none."""
    return f"{number} {what}{'s' * (number != 1)}" if number else ""


def _passed(results: Sequence[QuestionResult], level: int) -> bool:
    """Whether a level was shown: two thirds of its questions, and of all that are easier."""
    of = [result for result in results if result.level == level]
    below = [result for result in results if result.level <= level]
    return bool(of) and all(sum(r.right for r in some) >= PASSES * len(some) for some in (of, below))


def evidence(results: Sequence[QuestionResult]) -> tuple[str, ...]:
    """What was said well, in the candidate's words, hardest first; then right numbers."""
    lines = []
    for talk in (r.talk for r in sorted(results, key=lambda r: -r.level) if r.talk):
        made: dict[str, list[str]] = {}
        for point, quote in list(talk.first.items())[:2]:
            made.setdefault(sentence(talk.turns[0].said, quote), []).append(talk.source.points[point])
        lines += [
            f"On “{talk.source.question}”: “{said}” That makes the point{'s' * (len(points) > 1)}: {' '.join(points)}"
            for said, points in made.items()
        ]
    numbers = [f"{_title(r)}: “{r.typed}” is right, at level {r.level}." for r in results if r.right and not r.talk]
    return tuple((lines + numbers)[:SHOWN])


def gaps(results: Sequence[QuestionResult]) -> tuple[str, ...]:
    """What was said wrongly, what was missing, and what was not known."""
    lines = []
    for result in results:
        if result.talk:
            asked, points = f"On “{result.talk.source.question}”", result.talk.source.points
            lines += [f"{asked} said the contrary, “{q.text}”: {points[p]}" for p, q in result.talk.against.items()]
            silent = [p for p in result.talk.missing if p not in result.talk.against]
            if silent:
                lines.append(f"{asked} did not say: {' '.join(points[p] for p in silent[:2])}")
        elif not result.right:
            said = f"“{result.typed}” is wrong" if result.typed else "did not know"
            lines.append(f"{_title(result)}: {said}{f': {result.cause}' if result.cause else ''}.")
    return tuple(lines[:SHOWN])


def of_design(design: Design) -> tuple[tuple[str, ...], ...]:
    """Of an open design question: the verdict, what was shown, what is lacking, and what to read. Numbers are judged by
    the simulator, on the candidate's own plan."""
    *report, verdict, read = design.review()
    marked = {sign: _together([line[2:] for line in report if line[0] == sign]) for sign in "✓✗"}
    plan = f"Open design, {design.question.name}: {verdict[2:]} {report[0]}"
    return (plan,), marked["✓"], marked["✗"], (read.replace("Read: ", "Read ", 1),)


def _together(lines: Sequence[str]) -> tuple[str, ...]:
    """Lines of a review, each under its heading: what was named, and what was not, are one each."""
    joined: dict[str, list[str]] = {}
    for line in lines:
        heading, _, named = line.partition("amed: ")
        joined.setdefault(f"Design: {heading}amed: " if named else f"Design: {line}", []).append(named)
    return tuple(heading + " ".join(named) for heading, named in joined.items())


def this_week(results: Sequence[QuestionResult]) -> tuple[str, ...]:
    """Sections to read, with the exercises of their chapter, and what to drill."""
    missed = [result for result in results if not result.right or (result.talk and result.talk.against)]
    lines = []
    for section in list(dict.fromkeys(result.section for result in missed))[:TO_READ]:
        chapter = int(section.partition(".")[0])
        exercises = CORE[CHAPTERS[chapter - 1]] if 1 <= chapter <= len(CHAPTERS) else ()
        then = f"; then the exercises {', '.join(exercises)}" if exercises else ""
        lines.append(f"Read {place(section)}{then}.")
    topics = list(dict.fromkeys(result.topic for result in missed))
    if topics:
        lines.append("Drill ten minutes a day: fsdp-sim drill " + " ".join(f"--topic {topic}" for topic in topics[:3]))
    lines.append("Hold this interview again in a week: fsdp-sim drill mock")
    return tuple(lines)


def _title(result: QuestionResult) -> str:
    return result.name.replace("_", " ").capitalize()
