"""``ask()``: one question in a notebook cell, answered in the next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from html import escape
from typing import Any

from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.interview import Interview
from fsdp_sim.learn.drill.question import Question, Reply
from fsdp_sim.learn.drill.template import TOPICS, QuestionTemplate, templates

EDGE = "border-left:5px solid #0072B2;padding:.4em .8em"


@dataclass(repr=False)
class OpenQuestion:
    """A question that waits; shown as text and as HTML. ``answer`` may be called again after a wrong answer."""

    template: QuestionTemplate
    question: Question
    since_s: float = field(default_factory=time.monotonic)

    def answer(self, typed: Any) -> Reply:
        """Answer it: a quantity such as ``"7.9 GB"``, the letter of an option, or letters in order.

        Raises:
            UnreadableError: it is no answer; says what one looks like.
        """
        reply = self.question.grade(str(typed))
        took_s = time.monotonic() - self.since_s
        record.note(self.template.name, right=reply.right, took_s=took_s, given_s=self.template.seconds)
        return reply

    def __str__(self) -> str:
        return "\n".join([self.question.text, *(f"  {option}" for option in self.question.lettered), self._how])

    __repr__ = __str__

    @property
    def _how(self) -> str:
        return f"Answer with {self.question.how}. An interviewer gives {self.template.seconds} seconds."

    def _repr_html_(self) -> str:
        return question_html(self.question.text, self.question.lettered, self._how)


def question_html(text: str, options: list[str], below: str) -> str:
    """A question with its options and a line below it."""
    listed = "".join(f"<br>{escape(option)}" for option in options)
    return f'<div style="{EDGE}"><b>{escape(text)}</b>{listed}<br><small>{escape(below)}</small></div>'


def ask(name: str = "", *, seed: int | None = None) -> OpenQuestion:
    """Ask a question.

    Args:
        name: of a question, or of a topic; without it what is due to come back, or else something new.
        seed: the same question with the same numbers.

    Raises:
        ValueError: there is no such question or topic.
    """
    known = templates()
    if name in known:
        if seed is None:
            seed = time.time_ns()
        return OpenQuestion(known[name], known[name].ask(seed))
    if name and name not in TOPICS:
        raise ValueError(f"there is no question and no topic {name!r}; topics are {', '.join(TOPICS)}")
    topics = (name,) if name else TOPICS
    turn = Interview(topics=topics, with_spoken=False, due_first=True, seed=seed).ask()
    assert turn is not None  # without limits there is always one more
    assert turn.question is not None
    return OpenQuestion(known[turn.source.name], turn.question)
