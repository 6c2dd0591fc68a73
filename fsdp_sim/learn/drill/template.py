"""`template`: makes a function that draws a question into one that can be asked, drilled and put on the cheat sheet.

A folder of ``questions`` named in `TOPICS` holds the templates of a topic. Each is a function that takes a
`random.Random`, draws its numbers from it, computes the answer with the library, and returns a `Question`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_sim.learn.drill.question import Choice, Order, Question

TOPICS = ("memory", "communication", "schedule", "overlap", "scaling", "api", "failures", "practice")
"""In the order of the course."""
LEVELS = (1, 2, 3)
QUESTIONS = Path(__file__).parent / "questions"

Draws = Callable[[random.Random], Question]


@dataclass(frozen=True)
class QuestionTemplate:
    """A question with numbers to be drawn.

    Attributes:
        level: 1 what everyone is asked, 2 what follows from it, 3 what tells the experienced apart.
        seconds: what an interviewer gives.
        section: where the course teaches it: ``01_where_the_memory_goes#What is sharded``, a notebook and a heading.
        rule: the line of the cheat sheet: the formula or the fact, without the drawn numbers.
        source: of what is not derived: a torch symbol, a paper, a data sheet. Empty if everything is derived.
    """

    name: str
    topic: str
    level: int
    seconds: int
    section: str
    rule: str
    source: str
    draws: Draws = dataclasses.field(repr=False)

    def ask(self, seed: int) -> Question:
        """An instance: the same for the same seed. Options are shuffled, an order's so that it is not right already."""
        draw = random.Random(f"{self.name} {seed}")
        question = self.draws(draw)
        if not isinstance(question, Choice | Order):
            return question
        shuffled = list(question.options)
        draw.shuffle(shuffled)
        while isinstance(question, Order) and tuple(shuffled) == question.answer:
            draw.shuffle(shuffled)
        return dataclasses.replace(question, options=tuple(shuffled))


def template(
    *, level: int, seconds: int, section: str, rule: str, source: str = ""
) -> Callable[[Draws], QuestionTemplate]:
    """Make a function a `QuestionTemplate`, named as the function; its topic is the folder of its file.

    Raises:
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level}: it is one of {LEVELS}")

    def made(draws: Draws) -> QuestionTemplate:
        topic = draws.__module__.split(".")[-2]
        return QuestionTemplate(draws.__name__, topic, level, seconds, section, rule, source, draws)

    return made


@functools.cache
def templates() -> dict[str, QuestionTemplate]:
    """All templates by their names, topic by topic and file by file.

    Raises:
        ValueError: two have the same name.
    """
    found: dict[str, QuestionTemplate] = {}
    for topic in TOPICS:
        for file in pkgutil.iter_modules([str(QUESTIONS / topic)]):
            module = importlib.import_module(f"fsdp_sim.learn.drill.questions.{topic}.{file.name}")
            for value in vars(module).values():
                if isinstance(value, QuestionTemplate):
                    if value.name in found:
                        raise ValueError(f"{value.name} is a template of {found[value.name].topic} and of {topic}")
                    found[value.name] = value
    return found
