"""The course can be read aloud: short sentences, varied beginnings, headings that differ, words that people say.

What a chapter says is in its master's text cells, and in what its predictions ask and answer.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from fsdp_sim.learn.coverage import SHOWN
from fsdp_sim.learn.predictions import names
from fsdp_sim.learn.statements import misconceptions
from notebooks.masters import build

MOST_WORDS = 45
MOST_SAID, MOST_RUMOURS = 6, 3
RUMOUR = re.compile(
    r"\byou (?:may|will|can)(?: have| also)* (?:read|seen?|find|meet|met)\b|\byou have read\b|\bin print\b"
    r"|\bis (?:often|sometimes) (?:said|drawn|given)\b|\bpeople (?:often|say)\b",
    re.IGNORECASE,
)
NOT_OUR_WORDS = {  # what nobody would say across a table, or what leaks out of the code: what we say
    r"\b(some|other|old) texts\b": "nobody, or a link to the text",
    r"\bone (reads|finds) that\b": "you will read that",
    r"\b(some|many|others) say\b(?! about)": "nobody, or said() with the sentence",
    r"\bmany a\b": "many",
    r"\bso it stands\b": "so it says",
    r"\bwhole ones\b": "what is whole: parameters, gradients",
    r"\bwhat is asked for early\b": "the parameters gathered ahead",
    r"\bbelongs? into\b": "belongs in",
    r"\bissues? (?:an |the )?orders?\b": "issues",
    r"\b[ec]\d+@\w+": "the event, in words",
    r"\bobviously\b|\bof course\b": "nothing: it is obvious only to those who know it",
}
MOST_CODE_LINES = 10  # that a learner sees at once; what is longer is split, or folded by the tag hide-input
LONGER = {
    "def fsdp1_step(model, micro_batches, lr, max_norm):": "a step as scripts have it, which the section translates",
}
MASTERS = build.masters()
CHAPTERS = [master for master in MASTERS if master.stem[:2].isdigit()]
LINK, CODE = re.compile(r"\]\([^)]*\)"), re.compile(r"`[^`]*`")
LISTED = re.compile(r"^(?:[-*]|\d+\.) ", re.MULTILINE)
END = re.compile(r"(?<=[.?!:])(?<!e\.g\.)[*\")]*\s+(?=[\"*(\[]*[A-Z0-9])")


def cells(master: Path) -> Iterator[str]:
    """The text cells of a master. (Reading it with jupytext takes ten times as long.)"""
    for cell in re.split(r"^# %%", master.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            yield re.sub(r"^# ?", "", body, flags=re.MULTILINE)


def paragraphs(cell: str) -> Iterator[str]:
    """The paragraphs and items of lists of a cell, each on one line, without headings, drawings and code."""
    cell = re.sub(r"```.*?```", "", cell, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", re.sub(r"^#+ .*$|^> ?", "", cell, flags=re.MULTILINE)):
        if not block.startswith(("    ", "<", "|")):
            for said in LISTED.split(block):
                yield " ".join(CODE.sub("Code", LINK.sub("]", said)).split())


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; a colon ends one where a capital letter follows."""
    return [sentence for sentence in END.split(paragraph) if re.search(r"\w", sentence)]


@functools.cache
def said(master: Path) -> list[list[str]]:
    """The sentences of each paragraph of a chapter, its predictions among them."""
    asked = [text for p in names().values() if p.file == master.stem for text in (p.question, p.why)]
    return [sentences(p) for cell in [*cells(master), *asked] for p in paragraphs(cell)]


def words(sentence: str) -> int:
    return len(re.findall(r"\S*\w\S*", sentence))


def repeated(paragraph: list[str]) -> list[str]:
    """Words with which three sentences in a row begin."""
    first = [re.findall(r"[\w']+", sentence)[0].lower() for sentence in paragraph]
    return [word for word, run in groupby(first) if len(list(run)) >= 3 and word != "code"]


def unwanted(text: str) -> list[str]:
    return [f"{m[0]!r}: {better}" for bad, better in NOT_OUR_WORDS.items() for m in re.finditer(bad, text, re.I)]


each_master = pytest.mark.parametrize("master", MASTERS, ids=[master.stem for master in MASTERS])


@each_master
def test_a_sentence_can_be_said_in_one_breath(master: Path) -> None:
    assert not [sentence for paragraph in said(master) for sentence in paragraph if words(sentence) > MOST_WORDS]


@each_master
def test_no_three_sentences_in_a_row_begin_alike(master: Path) -> None:
    assert not [(word, paragraph) for paragraph in said(master) for word in repeated(paragraph)]


@each_master
def test_no_words_that_nobody_would_say(master: Path) -> None:
    assert not [found for paragraph in said(master) for sentence in paragraph for found in unwanted(sentence)]


@each_master
def test_every_heading_of_a_chapter_is_another(master: Path) -> None:
    headings = Counter(h.lower() for cell in cells(master) for h in re.findall(r"^#+ (.+)$", cell, re.MULTILINE))
    assert headings
    assert not [heading for heading, times in headings.items() if times > 1]


@each_master
def test_few_paragraphs_argue_with_people_who_are_not_there(master: Path) -> None:
    rumours = [sentence for paragraph in said(master) for sentence in paragraph if RUMOUR.search(sentence)]
    assert len([rumour for rumour in rumours if not rumour.startswith("What people say")]) <= MOST_RUMOURS, rumours


@each_master
def test_at_most_six_things_that_people_say_are_seen_at_once(master: Path) -> None:
    shown = [
        entry
        for chapter in SHOWN.findall(master.read_text(encoding="utf-8"))
        for entry in misconceptions(chapter).shown
    ]
    assert len(shown) <= MOST_SAID


@pytest.mark.parametrize("master", CHAPTERS, ids=[master.stem for master in CHAPTERS])
def test_a_code_cell_that_a_learner_sees_is_short(master: Path) -> None:
    notebook = json.loads((build.STUDENTS / f"{master.stem}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and not {"exercise", "jupyter"} & cell["metadata"].keys():
            lines = [line for line in "".join(cell["source"]).splitlines() if line.strip()]
            assert len(lines) <= MOST_CODE_LINES or lines[0] in LONGER, "\n".join(lines)


def test_sentences_are_found_in_lists_quotes_and_around_code_and_links() -> None:
    cell = "## A heading\n\n> Look: `f(x). Y` runs.\n> Then\n> stop.\n\n- One [two](https://a.b/c. D).\n- Three!\n"
    assert [sentences(p) for p in paragraphs(f"{cell}\n    code. Here.") if p] == [
        ["Look:", "Code runs.", "Then stop."],
        ["One [two]."],
        ["Three!"],
    ]


def test_what_is_wrong_is_named() -> None:
    assert RUMOUR.search("You may have read that it is so.")
    assert words("Keep the tied weights in one unit.") == 7
    assert repeated(["It waits.", "It gathers.", "It computes.", "Then it frees."]) == ["it"]
    assert not repeated(["It waits.", "Then it gathers.", "It computes."])
    assert unwanted("So it stands in many a guide.") == ["'many a': many", "'So it stands': so it says"]
