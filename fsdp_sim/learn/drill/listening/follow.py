"""`Conversation`: an interviewer who listens: hears an answer, asks for what is missing, then goes down the ladder."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, field
from enum import Enum
from importlib.resources import files
from string import ascii_lowercase

from fsdp_sim.learn.drill.listening.endpoint import Endpoint, EndpointError
from fsdp_sim.learn.drill.listening.listen import Quote, listen, listen_on
from fsdp_sim.learn.drill.question import UnreadableError
from fsdp_sim.learn.drill.spoken import SpokenQuestion

ASKED_FOR = 3
"""Of the points that are missing so many are asked for, one by one."""


class Part(Enum):
    """Where a conversation stands."""

    ANSWER = "answer"
    MISSING = "missing"
    LADDER = "ladder"
    OVER = "over"


@dataclass(frozen=True)
class Spoke:
    """One turn: what was asked, what was said, and what of it counted.

    Attributes:
        made: points that this turn made, each with the words.
        against: points of which it said the contrary.
        good: of a follow-up of the ladder, whether it was answered; None of other turns.
        answer: the words that answered it, or that speak against an answer.
        note: what went wrong with an endpoint; empty where nothing did.
    """

    asked: str
    said: str
    made: dict[int, Quote]
    against: dict[int, Quote]
    good: bool | None = None
    note: str = ""
    answer: Quote | None = None

    @property
    def quotes(self) -> list[Quote]:
        """The words that counted."""
        if self.good is None:
            return list(self.made.values())
        return [self.answer] if self.good and self.answer else []


@functools.cache
def probes() -> dict[str, tuple[str, ...]]:
    """What to ask for each missing point.

    Raises:
        ValueError: a question has not as many as points.
    """
    text = (files("fsdp_sim.learn.drill.listening") / "probes.toml").read_text(encoding="utf-8")
    return {name: tuple(lines) for name, lines in tomllib.loads(text).items()}


@dataclass
class Conversation:
    """A spoken question and what was said to it, turn by turn.

    Attributes:
        turns: so far.
        overruled: what the candidate claims against the listener, by the letter of a point or the number of a
            follow-up, each with the reason.
        given_back: what was heard and the candidate did not say, or said wrongly, likewise.
        endpoint: a model of the user's own that listens too.
    """

    source: SpokenQuestion
    endpoint: Endpoint | None = None
    turns: list[Spoke] = field(default_factory=list)
    overruled: dict[str, str] = field(default_factory=dict)
    given_back: dict[str, str] = field(default_factory=dict)
    part: Part = Part.ANSWER
    _probed: list[int] = field(default_factory=list)
    _rung: int = 0

    @property
    def asks(self) -> str:
        """What the interviewer asks now; empty when it is over."""
        if self.part is Part.ANSWER:
            return self.source.question
        if self.part is Part.MISSING:
            return probes()[self.source.name][self._probed[-1]]
        return self.source.ladder[self._rung].question if self.part is Part.LADDER else ""

    @property
    def first(self) -> dict[int, Quote]:
        """The points of the first answer, before anything was asked for."""
        made = self.turns[0].made if self.turns else {}
        return {place: quote for place, quote in made.items() if ascii_lowercase[place] not in self.given_back}

    @property
    def made(self) -> dict[int, Quote]:
        """All points that were made, with the words; what was contradicted later or given back is not among them."""
        made: dict[int, Quote] = {}
        for turn in self.turns:
            made = {place: quote for place, quote in made.items() if place not in turn.against} | turn.made
        return {place: made[place] for place in sorted(made) if ascii_lowercase[place] not in self.given_back}

    @property
    def against(self) -> dict[int, Quote]:
        """The points of which the contrary was said, and not taken back."""
        said = {place: quote for turn in self.turns for place, quote in turn.against.items()}
        return {place: quote for place, quote in said.items() if place not in self.made}

    @property
    def missing(self) -> list[int]:
        """The points that nobody made or claimed."""
        places = range(len(self.source.points))
        return [place for place in places if place not in self.made and ascii_lowercase[place] not in self.overruled]

    @property
    def good(self) -> bool:
        """Whether it is a good answer, with what was asked for and what the candidate claims."""
        return self.source.good({*range(len(self.source.points))} - {*self.missing})

    @property
    def follow_ups(self) -> dict[str, Spoke]:
        """What was said to the follow-ups, by their numbers."""
        return {str(n): turn for n, turn in enumerate((t for t in self.turns if t.good is not None), 1)}

    @property
    def answered(self) -> list[str]:
        """The follow-ups that were answered, with what the candidate claims."""
        heard = [number for number, turn in self.follow_ups.items() if turn.good and number not in self.given_back]
        return [number for number in self.follow_ups if number in heard or number in self.overruled]

    @property
    def claimable(self) -> list[str]:
        """What may be claimed: points that are missing by their letters, and the follow-up to which something was said
        that was not heard, by its number."""
        unheard = [n for n, turn in self.follow_ups.items() if n not in self.answered and turn.said.strip()]
        return [ascii_lowercase[place] for place in self.missing] + unheard

    @property
    def credited(self) -> list[str]:
        """What counts and may be given back: points by their letters, follow-ups by their numbers."""
        letters = ascii_lowercase[: len(self.source.points)]
        return [*(each for place, each in enumerate(letters) if place not in self.missing), *self.answered]

    def say(self, text: str) -> Spoke:
        """Say something to what is asked; the turn, after which something else is asked.

        Raises:
            ValueError: the conversation is over.
        """
        if self.part is Part.OVER:
            raise ValueError("this question is over")
        asked, good, note, answer = self.asks, None, "", None
        heard = listen(self.source.name, text)
        made, against = dict(heard.made), dict(heard.against)
        if self.part is Part.MISSING and text.strip():
            place = self._probed[-1]
            if quote := _in_context(self.source.name, asked, text, place):
                made.setdefault(place, quote)
        if self.endpoint and text.strip() and self.part is not Part.LADDER:
            try:
                made = {**self.endpoint.listen(self.source, text), **made}
            except EndpointError as error:
                note = f"{error}: heard without it."
        if self.part is Part.LADDER:
            against = {}  # what is asked here is about other circumstances
            on = listen_on(self.source.name, self._rung, text)
            good, answer = bool(on.made), next(iter([*on.made.values(), *on.against.values()]), None)
        turn = Spoke(asked, text, {p: q for p, q in made.items() if p not in self.made}, against, good, note, answer)
        self.turns.append(turn)
        self._go_on(good)
        return turn

    def overrule(self, which: str, reason: str) -> None:
        """Claim a point or a follow-up against the listener, with the reason; both are kept. After a follow-up the next
        one is asked.

        Raises:
            UnreadableError: there is no such point or follow-up, it was heard, or there is no reason.
        """
        which = self._named(which)
        if which in self.credited:
            raise UnreadableError(f"{which}) counts already; to give it back, put a minus before it: -{which}")
        if which not in self.claimable:
            raise UnreadableError(f"{which}) is no follow-up that you answered and I did not hear")
        self.overruled[which] = _reason(reason, "say why, in a few words: by which words of yours did you say it?")
        self.given_back.pop(which, None)
        if which == str(self._rung) and self._rung < len(self.source.ladder):
            self.part = Part.LADDER

    def give_back(self, which: str, reason: str) -> None:
        """Give back a point or a follow-up that counts and should not, with the reason; both are kept.

        Raises:
            UnreadableError: there is no such point or follow-up, it does not count, or there is no reason.
        """
        which = self._named(which)
        if which not in self.credited:
            raise UnreadableError(f"{which}) does not count, so there is nothing to give back")
        self.given_back[which] = _reason(reason, "say why, in a few words: what did you mean instead?")
        self.overruled.pop(which, None)

    def correct(self, typed: str) -> None:
        """Overrule the listener as it is typed: "c I said so" claims, "-c I did not" gives back.

        Raises:
            UnreadableError: as `overrule` and `give_back` do.
        """
        sign, which, reason = re.fullmatch(r"\s*([-\u2212\u2013]?)\s*(\S*)\s*(.*)", typed, re.DOTALL).groups()  # type: ignore[union-attr]
        (self.give_back if sign else self.overrule)(which, reason)

    @property
    def corrections(self) -> dict[str, str]:
        """All that the candidate overruled, as it is typed: with a minus what was given back."""
        return {**self.overruled, **{f"-{which}": reason for which, reason in self.given_back.items()}}

    def _named(self, which: str) -> str:
        """The letter of a point or the number of a follow-up, as it was typed."""
        which, letters = which.strip().strip(").:").lower(), ascii_lowercase[: len(self.source.points)]
        numbers = [str(n) for n in range(1, len(self.source.ladder) + 1)]
        if which not in (*letters, *numbers):
            raise UnreadableError(
                f"{which[:20]!r} is not the letter of a point, a to {letters[-1]}, nor the number of a follow-up, "
                f"1 to {numbers[-1]}"
            )
        return which

    def _go_on(self, good: bool | None) -> None:
        if self.part is Part.LADDER:
            self._rung += 1
            if not good or self._rung == len(self.source.ladder):
                self.part = Part.OVER
            return
        waiting = [place for place in self.missing if place not in self._probed]
        if waiting and len(self._probed) < ASKED_FOR:
            self._probed.append(waiting[0])
            self.part = Part.MISSING
        else:
            self.part = Part.LADDER if self.good else Part.OVER


def _reason(given: str, ask: str) -> str:
    if len(given.split()) < 3:
        raise UnreadableError(ask)
    return given.strip()


def _in_context(name: str, asked: str, said: str, place: int) -> Quote | None:
    """The words that make a point as an answer to what was asked for; a reply need not repeat the question."""
    lead = asked.rstrip("?.") + ", "
    quote = listen(name, lead + said).made.get(place)
    if quote is None or quote.end <= len(lead) or place in listen(name, lead).made:
        return None
    start, end = max(0, quote.start - len(lead)), quote.end - len(lead)
    return Quote(said[start:end], start, end)
