"""`listen(name, said)`: which points of a spoken question an answer makes, and by which words."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from string import ascii_lowercase

from fsdp_sim.learn.drill.listening.pattern import NEAR, NEARER, Pattern, pattern
from fsdp_sim.learn.drill.listening.vocabulary import vocabulary
from fsdp_sim.learn.drill.listening.words import Words, read
from fsdp_sim.learn.drill.spoken import spoken

NO = {"no", "not", "none", "nobody", "nothing", "never", "neither"}
"""How a strong answer begins that says no."""


@dataclass(frozen=True)
class Quote:
    """Words of an answer: their text, and where they stand in it, in characters."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Heard:
    """What was heard in an answer.

    Attributes:
        made: the points that were made, by their places, each with the words that made it.
        against: points of which the contrary was said, each with the words.
    """

    made: Mapping[int, Quote]
    against: Mapping[int, Quote]


@functools.cache
def patterns() -> dict[str, dict[str, tuple[Pattern, ...]]]:
    """The patterns of each point of each spoken question, by its letter; ``a!`` is what speaks against point a.

    Raises:
        ValueError: a point has none, or there are patterns of what is no point.
    """
    return _read("heard.toml", {name: ascii_lowercase[: len(source.points)] for name, source in spoken().items()}, NEAR)


@functools.cache
def follow_ups() -> dict[str, dict[str, tuple[Pattern, ...]]]:
    """The patterns of each follow-up, by its number; ``1!`` is what speaks against an answer to the first.

    Raises:
        ValueError: a follow-up has none, or there are patterns of what is none.
    """
    return _read("follow_ups.toml", dict.fromkeys(spoken(), "123"), NEARER)


def _read(file: str, keys: Mapping[str, str], near: int) -> dict[str, dict[str, tuple[Pattern, ...]]]:
    text = (files("fsdp_sim.learn.drill.listening") / file).read_text(encoding="utf-8")
    table = tomllib.loads(text)
    for name, known in keys.items():
        if {*known} != {key for key in table.get(name, ()) if not key.endswith("!")}:
            raise ValueError(f"{name}: {file} needs patterns for {', '.join(known)}")
    return {
        name: {
            key: tuple(pattern(line, NEARER if key[1:] else near) for line in lines) for key, lines in points.items()
        }
        for name, points in table.items()
    }


def listen(name: str, said: str) -> Heard:
    """Which points of a spoken question an answer makes.

    Args:
        name: of the question.
        said: the answer, as it was typed; its first 6,000 characters are read.
    """
    return _heard(patterns()[name], said, ascii_lowercase)


def listen_on(name: str, rung: int, said: str) -> Heard:
    """Whether an answer to a follow-up answers it, as a point that is made or spoken against.

    Args:
        name: of the question.
        rung: of its ladder, from 0.
        said: the answer, read as far as by `listen`.
    """
    key = f"{rung + 1}"
    if opening := _contrary_opening(said, spoken()[name].ladder[rung].strong):
        return Heard({}, {rung: opening})
    return _heard({each: lines for each, lines in follow_ups()[name].items() if each[0] == key}, said, "123")


def _contrary_opening(said: str, strong: str) -> Quote | None:
    """The first words of an answer, where they say yes and a strong one says no, or deny what it goes on from."""
    openings, strong_words = vocabulary().openings, re.findall(r"\w+", strong.lower())[:5]
    denied = bool(NO.intersection(strong_words))
    begins = re.match(rf"\W*({'|'.join(openings.agree if denied else openings.deny)})\b", said, re.IGNORECASE)
    first_sentence = re.split(r"[.?!;](?:\s|$)", said, maxsplit=1)[0]
    turned = re.search(rf"\b(?:{'|'.join(openings.turns)})\b|n['\u2019]t\b", first_sentence, re.IGNORECASE)
    if begins is None or turned:
        return None
    return Quote(begins[1], begins.start(1), begins.end(1))


def _heard(of: Mapping[str, tuple[Pattern, ...]], said: str, places: str) -> Heard:
    words = read(said)
    found = {key: quote for key, lines in of.items() if (quote := _first(lines, words, said))}
    against = {places.index(key[0]): quote for key, quote in found.items() if key.endswith("!")}
    made = {places.index(key): quote for key, quote in found.items() if not key.endswith("!")}
    return Heard({place: quote for place, quote in sorted(made.items()) if place not in against}, against)


def _first(lines: tuple[Pattern, ...], words: Words, said: str) -> Quote | None:
    for line in lines:
        if spot := line.find(words):
            start, end = words[spot.first].start, words[spot.last].end
            return Quote(said[start:end], start, end)
    return None
