"""`read(text)`: an answer as `Word`s: stems, with where each stands, what it is denied by, and where sentences end."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Any

from fsdp_sim.learn.corrected import corrections
from fsdp_sim.learn.drill.listening.vocabulary import base_forms, spellings, vocabulary

MAX_LENGTH = 6000
"""Characters of an answer that are read: two minutes of fast talk are 2,500."""
SENTENCE = 7
"""Words that the end of a sentence counts for, where words must stand near each other."""
CLOSE, LONG = 0.87, 8
"""How alike a misspelt word must be, and how long, to be taken for one of the vocabulary."""
NUMERALS = dict(zero=0, one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, twelve=12)
_WORD = re.compile(r"[a-z][a-z0-9_]*|\d+(?:,\d{3})*(?:\.\d+)?(?:/[a-z0-9]+)?|[%+]|[.?!;](?=\s|$)|[,:()\u2013\u2014]")


@dataclass(frozen=True)
class Word:
    """One word of an answer.

    Attributes:
        stem: what it is compared by.
        start, end: where it stands in the text, in characters.
        place: how far it is from the first word; ends of sentences count too.
        sentence: in which sentence, from 0.
        denied: it is within reach of a "not".
    """

    stem: str
    start: int
    end: int
    place: int
    sentence: int
    denied: bool


@functools.cache
def stem(word: str) -> str:
    """The stem of a word in lower case: ``gathers``, ``gathered`` and ``gathering`` have one."""
    import snowballstemmer

    if word in NUMERALS:
        return str(NUMERALS[word])
    word = base_forms().get(word, word)
    if not word.isalpha() or len(word) < 3 or word == "its":  # whose stem would be that of "it"
        return word.strip("_")
    return str(snowballstemmer.stemmer("english").stemWord(word))


@functools.cache
def known_words() -> frozenset[str]:
    """The long words of the vocabulary, among which a misspelt one is looked for."""
    found = re.findall(r"[a-z]+", " ".join([*vocabulary().concepts.values(), *vocabulary().irregular.values()]))
    return frozenset(word for word in found if len(word) >= LONG - 1)


def _mended(word: str) -> str:
    if len(word) < LONG or not word.isalpha() or stem(word) in {stem(known) for known in known_words()}:
        return word
    near = difflib.get_close_matches(word, known_words(), 1, CLOSE)
    return near[0] if near else word


def spelt(text: str) -> tuple[str, list[int]]:
    """The text in lower case and with one spelling, and for each of its characters where that was in the original."""
    text = text[:MAX_LENGTH].lower()
    places = list(range(len(text) + 1))
    for pattern, word in spellings():
        changes = [(found.start(), found.end(), found.expand(word)) for found in pattern.finditer(text)]
        text, places = _changed(text, places, changes)
    while taken_back := next(corrections(text), None):
        text, places = _changed(text, places, [taken_back])
    return text, places


def _changed(text: str, places: list[int], changes: list[tuple[int, int, str]]) -> tuple[str, list[int]]:
    """A text with stretches of it replaced, and where its characters stood."""
    parts, kept, last = [], [], 0
    for start, end, new in changes:
        parts += [text[last:start], new]
        kept += places[last:start] + [places[start]] * (len(new) - 1) + [places[end - 1]] * bool(new)
        last = end
    return "".join([*parts, text[last:]]), kept + places[last:]


class Words(tuple[Word, ...]):
    """The words of an answer, in order; what was looked for in them is kept, for many patterns look for the same."""

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        return {}


@functools.lru_cache(maxsize=64)
def read(text: str) -> Words:
    """The words of an answer, kept for a while with what was looked for in them: one answer is listened to often."""
    plain, places = spelt(text)
    rules = vocabulary().negation
    deny = [tuple(phrase.split()) for phrase in rules.deny]
    words: list[Word] = []
    raw: list[str] = []
    place = sentence = 0
    denied_until = -1
    for found in _WORD.finditer(plain):
        token = found.group()
        if token in ".?!;":
            place, sentence, denied_until = place + SENTENCE, sentence + 1, -1
            raw.append("")
            continue
        if token in ",:()\u2013\u2014":
            denied_until = -1
            raw.append("")
            continue
        raw.append(token)
        if token in rules.ends:
            denied_until = -1
        word = stem(_mended(token))
        place += 1
        words.append(
            Word(word, places[found.start()], places[found.end() - 1] + 1, place, sentence, place <= denied_until)
        )
        if any(tuple(raw[-len(phrase) :]) == phrase for phrase in deny):
            denied_until = place + rules.reach
    return Words(words)
