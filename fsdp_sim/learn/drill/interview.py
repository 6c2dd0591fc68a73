"""`Interview`: asks one question after another, harder after a right answer and easier after a wrong one.

Topics take turns. Of a topic and a level, what is due to come back is asked before what is new. An answer is kept, so
that the question comes back when it is about to be forgotten (see `record`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.listening.endpoint import Endpoint
from fsdp_sim.learn.drill.listening.follow import Conversation, Spoke
from fsdp_sim.learn.drill.question import Question, Reply
from fsdp_sim.learn.drill.result import QuestionResult
from fsdp_sim.learn.drill.spoken import SpokenQuestion, spoken
from fsdp_sim.learn.drill.template import LEVELS, TOPICS, QuestionTemplate, templates

SPOKEN_EVERY = 4
"""Of so many questions one is to be answered in words, where spoken ones are asked for."""

SKIP, STOP = ("?", "skip"), ("q", "quit", "exit")
"""What one types where one does not know, and to end."""

Source = QuestionTemplate | SpokenQuestion


@dataclass(frozen=True)
class InterviewTurn:
    """A question that waits for its answer.

    Attributes:
        number: 1 for the first.
        question: None where the answer is spoken.
        talk: the conversation about a spoken one.
    """

    number: int
    source: Source
    seed: int
    question: Question | None
    since_s: float
    talk: Conversation | None = None

    @property
    def text(self) -> str:
        return self.source.question if isinstance(self.source, SpokenQuestion) else self.question.text  # type: ignore[union-attr]


@dataclass
class Interview:
    """A mixed, adaptive interview.

    Attributes:
        limit_s: no further question is asked after so many seconds.
        questions: nor after so many.
        topics: what it is about.
        seed: the same questions with the same numbers; None draws them anew.
        level: of the next question.
        with_spoken: some questions are to be answered in words.
        endpoint: a model of the user's own that listens too; None for words alone.
        due_first: what is due to come back is asked before all else, whatever its topic.
    """

    limit_s: float = float("inf")
    questions: int = 10**6
    topics: Sequence[str] = TOPICS
    level: int = 1
    with_spoken: bool = True
    due_first: bool = False
    seed: int | None = None
    endpoint: Endpoint | None = None
    clock: Callable[[], float] = time.monotonic
    results: list[QuestionResult] = field(default_factory=list, init=False)
    turn: InterviewTurn | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        wrong = [topic for topic in self.topics if topic not in TOPICS]
        if wrong or not self.topics:
            raise ValueError(f"topics={list(self.topics)}: choose among {', '.join(TOPICS)}")
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level}: it is one of {LEVELS}")
        self._since_s = self.clock()
        self._draw = random.Random(self.seed)  # None: anew each time
        self._seen: set[str] = set()

    @property
    def left_s(self) -> float:
        """Seconds until no further question is asked."""
        return self.limit_s - (self.clock() - self._since_s)

    @property
    def time_left(self) -> str:
        """How many minutes are left, as the end of a line; empty without a limit."""
        return f", {self.left_s / 60:.0f} minutes left" if self.left_s < float("inf") else ""

    def ask(self) -> InterviewTurn | None:
        """The next question; the same until it is answered. None where time or questions are used up."""
        if self.turn is None and self.left_s > 0 and len(self.results) < self.questions:
            source = self._choose()
            seed = self._draw.randrange(2**32)
            question = source.ask(seed) if isinstance(source, QuestionTemplate) else None
            self._seen.add(source.name)
            talk = Conversation(source, self.endpoint) if isinstance(source, SpokenQuestion) else None
            self.turn = InterviewTurn(len(self.results) + 1, source, seed, question, self.clock(), talk)
        return self.turn

    def answer(self, typed: str) -> Reply:
        """Answer the question that waits.

        Raises:
            fsdp_sim.learn.drill.question.UnreadableError: what was typed is no answer; the question waits on.
            ValueError: no question waits, or it is a spoken one.
        """
        turn = self._waiting()
        if turn.question is None:
            raise ValueError("this one is spoken: call `say`")
        reply = turn.question.grade(typed)
        self._note(turn, reply.right, turn.question.quoted(typed), reply.cause)
        return reply

    def say(self, said: str) -> Spoke:
        """Say something to the spoken question that waits, or to what is asked about it next; what was heard.

        Raises:
            ValueError: no spoken question waits, or all has been asked.
        """
        return self._talk().say(said)

    def overrule(self, typed: str) -> None:
        """Claim what was not heard: the letter of a point or the number of a follow-up, and why. With a minus before
        it, give back what was heard and not said.

        Raises:
            fsdp_sim.learn.drill.question.UnreadableError: there is no such point or follow-up, or no reason.
            ValueError: no spoken question waits.
        """
        self._talk().correct(typed)

    def settle(self) -> bool:
        """Be done with the spoken question that waits; whether it was a good answer.

        Raises:
            ValueError: no spoken question waits.
        """
        talk, turn = self._talk(), self._waiting()
        self._note(turn, talk.good, talk.turns[0].said if talk.turns else "", "")
        return talk.good

    def _talk(self) -> Conversation:
        talk = self._waiting().talk
        if talk is None:
            raise ValueError("this one is not spoken: call `answer`")
        return talk

    def skip(self) -> None:
        """Say that one does not know; it counts as a wrong answer.

        Raises:
            ValueError: no question waits.
        """
        self._note(self._waiting(), False, "", "")

    def _waiting(self) -> InterviewTurn:
        if self.turn is None:
            raise ValueError("no question waits for an answer: call `ask`")
        return self.turn

    def _note(self, turn: InterviewTurn, right: bool, typed: str, cause: str) -> None:
        source, took_s = turn.source, self.clock() - turn.since_s
        corrected = turn.talk.corrections if turn.talk else {}
        trouble = record.note(source.name, right=right, took_s=took_s, given_s=source.seconds, overruled=corrected)
        self.results.append(
            QuestionResult(
                source.name,
                source.topic,
                source.level,
                right,
                took_s,
                source.seconds,
                source.section,
                typed,
                cause,
                trouble,
                turn.talk,
            )
        )
        self.level = min(max(self.level + (1 if right else -1), LEVELS[0]), LEVELS[-1])
        self.turn = None

    def _choose(self) -> Source:
        """Of the topic asked least, what is nearest to the level; due before new, new before asked already."""
        speaks = self.with_spoken and (len(self.results) + 1) % SPOKEN_EVERY == 0
        known: Iterable[Source] = spoken().values() if speaks else templates().values()
        pool = [source for source in known if source.topic in self.topics]
        asked = [result.topic for result in self.results]
        due = set(record.due(source.name for source in pool))

        def rank(source: Source) -> tuple[bool | int | float, ...]:
            seen, far, new = source.name in self._seen, abs(source.level - self.level), source.name not in due
            return seen, self.due_first and new, asked.count(source.topic), far, new, self._draw.random()

        return min(pool, key=rank)
