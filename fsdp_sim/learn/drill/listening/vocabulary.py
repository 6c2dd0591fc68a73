"""`vocabulary()`: the words that mean a concept, how words are spelt as one, what denies; from ``words.toml``."""

from __future__ import annotations

import functools
import re
import tomllib
from importlib.resources import files

import msgspec


class _Negation(msgspec.Struct, frozen=True):
    deny: tuple[str, ...]
    ends: tuple[str, ...]
    reach: int


class _Openings(msgspec.Struct, frozen=True):
    agree: tuple[str, ...]
    deny: tuple[str, ...]
    turns: tuple[str, ...]


class Vocabulary(msgspec.Struct, frozen=True):
    """What ``words.toml`` says.

    Attributes:
        concepts: the phrases of each concept.
        rivals: concepts of which what follows one is said of it until another is named.
        spelling: several words by the one that stands for them; keys are regular expressions.
        irregular: the forms of a word that no rule makes.
        negation: what denies, where a denial ends, and after how many words it does at the latest.
        openings: how an answer begins that agrees, or denies what was asked; words that turn it round again.
    """

    concepts: dict[str, str]
    rivals: dict[str, tuple[str, ...]]
    spelling: dict[str, str]
    irregular: dict[str, str]
    negation: _Negation
    openings: _Openings

    def phrases(self, concept: str) -> list[str]:
        """The phrases that mean a concept; a word that is no concept means itself."""
        return [phrase.strip() for phrase in self.concepts.get(concept, concept.replace(".", " ")).split(",")]


@functools.cache
def vocabulary() -> Vocabulary:
    """The vocabulary that all questions share."""
    text = (files("fsdp_sim.learn.drill.listening") / "words.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Vocabulary)


@functools.cache
def spellings() -> list[tuple[re.Pattern[str], str]]:
    """What stands for what, in the order of the file."""
    return [(re.compile(pattern), word) for pattern, word in vocabulary().spelling.items()]


@functools.cache
def base_forms() -> dict[str, str]:
    """The base form of each irregular one."""
    return {form: base for base, forms in vocabulary().irregular.items() for form in forms.split()}
