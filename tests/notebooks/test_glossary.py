"""The glossary: in order, each term once, every link leads somewhere; and its links in the notebooks."""

from __future__ import annotations

import re

import pytest

from notebooks.masters.glossary_links import GLOSSARY, HEADING, OTHER_WORDS, anchor, linked, term_of, terms

TEXT = GLOSSARY.read_text(encoding="utf-8")
NAMES = HEADING.findall(TEXT)
BODIES = dict(zip(NAMES, (part.strip() for part in HEADING.split(TEXT)[2::2]), strict=True))
LINK = re.compile(r"\[[^]]+\]\(#([^)]+)\)")
# What a notebook on FSDP cannot do without; a chapter that puts one of these in bold gets its link.
NEEDED = (
    "all-gather", "reduce-scatter", "all-reduce", "rank", "unit", "root", "shard", "unshard", "reshard", "DTensor",
    "stream", "event", "prefetch", "exposed communication", "device mesh", "collective", "communicator", "DDP", "FSDP",
    "FSDP1", "FSDP2", "ZeRO", "HSDP", "NCCL", "gloo", "DCP", "micro-batch", "activation", "logits", "padding",
    "placement", "bandwidth", "latency",
)  # fmt: skip


def test_there_are_as_many_terms_as_the_course_needs() -> None:
    assert 70 <= len(NAMES) <= 125
    assert [name for name in NEEDED if name.lower() not in terms()] == []


def test_the_terms_are_in_alphabetical_order_and_none_is_there_twice() -> None:
    folded = [name.lower() for name in NAMES]

    assert folded == sorted(folded)
    assert len(set(folded)) == len(folded)
    assert len(set(map(anchor, NAMES))) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_definition_is_one_to_four_sentences_that_link_to_other_terms_only(name: str) -> None:
    text = " ".join(BODIES[name].split())
    sentences = re.findall(r"[.?!](?:\s|$)", text.replace("dist.", "dist"))

    assert 1 <= len(sentences) <= 4, text
    assert len(text) < 420
    anchors = set(map(anchor, NAMES))
    assert set(LINK.findall(text)) <= anchors - {anchor(name)}


def test_every_link_text_is_a_form_of_its_term() -> None:
    for text, to in re.findall(r"\[([^]]+)\]\(#([^)]+)\)", TEXT):
        assert term_of(text) is not None, text
        assert terms()[str(term_of(text))] == to, text


def test_the_first_use_of_a_term_is_linked_and_the_next_is_not() -> None:
    seen: set[str] = set()

    first = linked("A **unit** is a **shard**, a **unit**.", seen)
    assert first == "A [**unit**](glossary.md#unit) is a [**shard**](glossary.md#shard), a **unit**."
    assert linked("**Units** again, and an **event**.", seen, "../glossary.md") == (
        "**Units** again, and an [**event**](../glossary.md#event)."
    )
    assert seen == {"unit", "shard", "event"}


@pytest.mark.parametrize(
    ("word", "term"),
    [
        ("Micro-batches", "micro-batch"), ("DTensors", "dtensor"), ("all-gathered", "all-gather"),
        ("sharded", "shard"), ("Replicas", "replica"), ("policies", "policy"), ("ZeRO", "zero"),
        ("rank:", "rank"), ("exposed", "exposed communication"), ("exposed\ncommunication", "exposed communication"),
        ("cooking", None), ("not", None),
    ],
)  # fmt: skip
def test_terms_are_found_in_any_case_and_number(word: str, term: str | None) -> None:
    assert term_of(word) == term


@pytest.mark.parametrize(
    "source",
    [
        "No **other words** are touched, and no [**unit**](somewhere.md).",
        "```\n**unit** in code\n```",
        "A sum: 2 ** 3 ** 4",
        "***unit***",
    ],
)
def test_what_is_no_first_use_stays(source: str) -> None:
    assert linked(source, set()) == source


def test_other_words_are_of_terms_that_there_are_and_are_none_themselves() -> None:
    assert set(OTHER_WORDS.values()) <= set(terms())
    assert not set(OTHER_WORDS) & set(terms())


def test_bold_sentences_do_not_hide_the_terms_between_them() -> None:
    long = "**" + "very " * 20 + "bold**"

    assert linked(f"{long}. A **unit**. {long}.", set()) == f"{long}. A [**unit**](glossary.md#unit). {long}."


def test_linking_twice_changes_nothing() -> None:
    once = linked("A **unit**.", set())

    assert linked(once, set()) == once
