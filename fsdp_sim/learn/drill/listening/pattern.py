"""`Pattern`: what must be said for a point, read from a line of ``heard.toml``, and looked for in an answer."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_sim.learn.drill.listening.vocabulary import vocabulary
from fsdp_sim.learn.drill.listening.words import Words, spelt, stem

NEAR, NEARER = 18, 10
"""Words within which all of a pattern must stand; of one that speaks against a point, or answers a follow-up."""
FAR = 30
"""Words back to the rival of whom something is said."""
CLOSE = 0.05
"""How far off a number may be."""
TRIED = 20_000
"""Combinations of places that are looked at, at most."""


@dataclass(frozen=True)
class Spot:
    """Where a term was found: the first and the last of its words."""

    first: int
    last: int


@dataclass(frozen=True)
class _Term:
    """Choices, each with its sign: ``+`` affirmed, ``-`` denied, or empty for either; ``!`` must not be there."""

    choices: tuple[tuple[str, str], ...]
    subject: str

    @property
    def unwanted(self) -> bool:
        return self.choices[0][0] == "!"

    def spots(self, words: Words) -> list[Spot]:
        found: set[Spot] = set()
        for sign, choice in self.choices:
            for spot in spots(choice, words):
                sign = sign or "+" * choice.startswith("#")  # "not 13 GB" is no 13 GB
                agrees = sign in ("", "!") or words[spot.last].denied == (sign == "-")
                if agrees and (not self.subject or _subject(words, spot, self.subject)):
                    found.add(spot)
        return sorted(found, key=lambda spot: spot.first)


def _subject(words: Words, spot: Spot, subject: str) -> bool:
    """Whether the rival named last before a spot is this one."""
    group = next((names for names in vocabulary().rivals.values() if subject in names), (subject,))
    named = {name: [s.last for s in spots(name, words) if s.last < spot.first] for name in group}
    last = {name: max(places, default=-1) for name, places in named.items()}
    mine = last[subject]
    return mine >= 0 and mine == max(last.values()) and words[spot.first].place - words[mine].place <= FAR


@functools.cache
def _stems(phrase: str) -> tuple[str, ...]:
    plain, _ = spelt(phrase)
    parts = re.findall(r"[a-z][a-z0-9_]*|\d[\d.,]*(?:/[a-z0-9]+)?|[%+]", plain)
    return tuple(stem(part) for part in parts)


def spots(choice: str, words: Words) -> list[Spot]:
    """Where a concept, a word or a number stands."""
    if choice not in words.kept:
        words.kept[choice] = _numbers(choice[1:], words) if choice.startswith("#") else _phrases(choice, words)
    return list(words.kept[choice])


def _phrases(choice: str, words: Words) -> list[Spot]:
    return [
        Spot(place, place + len(stems) - 1)
        for place, word in enumerate(words)
        for stems in _wanted(choice).get(word.stem, ())
        if tuple(each.stem for each in words[place : place + len(stems)]) == stems
    ]


@functools.cache
def _wanted(choice: str) -> dict[str, list[tuple[str, ...]]]:
    """The phrases of a choice as stems, by the first of them."""
    by_first: dict[str, list[tuple[str, ...]]] = {}
    for phrase in vocabulary().phrases(choice):
        by_first.setdefault(_stems(phrase)[0], []).append(_stems(phrase))
    return by_first


def _numbers(wanted: str, words: Words) -> list[Spot]:
    found = []
    for place, word in enumerate(words):
        try:
            value = float(word.stem.replace(",", ""))
        except ValueError:
            continue
        if math.isclose(value, float(wanted), rel_tol=CLOSE):
            found.append(Spot(place, place))
    return found


@dataclass(frozen=True)
class Pattern:
    """Terms that must stand near each other.

    Attributes:
        text: as it was written.
        order: pairs of places of terms, of which the first comes before the second in time.
    """

    text: str
    terms: tuple[_Term, ...]
    order: tuple[tuple[int, int], ...]
    near: int

    def find(self, words: Words) -> Spot | None:
        """The shortest stretch of the answer that has all of it; None if none has."""
        wanted = [term.spots(words) for term in self.terms if not term.unwanted]
        unwanted = [spot for term in self.terms if term.unwanted for spot in term.spots(words)]
        best: Spot | None = None
        for chosen in itertools.islice(_near(wanted, words, self.near), TRIED):
            first, last = min(s.first for s in chosen), max(s.last for s in chosen)
            if best and last - first >= best.last - best.first:
                continue
            if all(_before(words, chosen[a], chosen[b]) for a, b in self.order) and not any(
                words[first].sentence <= words[spot.first].sentence <= words[last].sentence for spot in unwanted
            ):
                best = Spot(first, last)
        return best


def _near(wanted: Sequence[Sequence[Spot]], words: Words, near: int) -> Iterator[tuple[Spot, ...]]:
    """Choices of one spot for each term, no two on one word, all within reach."""
    if not wanted or not all(wanted):
        return

    def grow(chosen: tuple[Spot, ...], low: float, high: float) -> Iterator[tuple[Spot, ...]]:
        if len(chosen) == len(wanted):
            yield chosen
            return
        for spot in wanted[len(chosen)]:
            lower, higher = min(low, words[spot.first].place), max(high, words[spot.last].place)
            if higher - lower <= near and not any(s.first <= spot.last and spot.first <= s.last for s in chosen):
                yield from grow((*chosen, spot), lower, higher)

    yield from grow((), math.inf, -math.inf)


def _before(words: Words, a: Spot, b: Spot) -> bool:
    """Whether a comes before b in time, by the order of the words and by "before" and "after"."""
    early, late = (a, b) if a.first < b.first else (b, a)
    before, after = stem("before"), stem("after")
    between = [word.stem for word in words[early.last + 1 : late.first] if word.stem in (before, after)]
    ahead = [word.stem for word in words[max(0, early.first - 4) : early.first]]
    swapped = between[-1] == after if between else before in ahead
    return (early is a) != swapped


@functools.cache
def pattern(text: str, near: int = NEAR) -> Pattern:
    """Read a line of ``heard.toml``.

    Args:
        near: words within which all of it must stand, where the line does not say.

    Raises:
        ValueError: it is not written as such lines are.
    """
    reach = re.search(r"\{(\d+)\}", text)
    near = int(reach[1]) if reach else near
    terms: list[_Term] = []
    order: list[tuple[int, int]] = []
    for part in re.sub(r"\{\d+\}", "", text).split():
        sides = part.split("<")
        terms += [_term(side, text) for side in sides]
        order += [(place, place + 1) for place in range(len(terms) - len(sides), len(terms) - 1)]
    return Pattern(text, tuple(terms), tuple(order), near)


def _term(side: str, text: str) -> _Term:
    found = re.fullmatch(r"(?:(\w+):)?([+!]?)(\S+)", side)
    if not found:
        raise ValueError(f"{text!r}: {side!r} is no word, concept or number")
    choices = [(choice[0], choice[1:]) if choice[0] == "-" else (found[2], choice) for choice in found[3].split("|")]
    for _, choice in choices:
        if not choice.startswith("#") and not all(map(_stems, vocabulary().phrases(choice))):
            raise ValueError(f"{text!r}: {choice!r} has no word that could be heard")
    return _Term(tuple(choices), found[1] or "")
