"""What people say: every statement is answered, folded, escaped, and settled by torch or arithmetic where it can be."""

from __future__ import annotations

from collections import Counter

import pytest

from fsdp_sim.learn.coverage import rows
from fsdp_sim.learn.find import CHAPTERS
from fsdp_sim.learn.statements import WITH_STATEMENTS, Misconception, Misconceptions, evidence, misconceptions

ENTRIES = [(chapter, entry) for chapter in WITH_STATEMENTS for entry in misconceptions(chapter).entries]
NAMES = [f"{chapter}-{entry.covers[0].removeprefix('misconception ')}" for chapter, entry in ENTRIES]
SETTLED = [pytest.param(e, id=name) for (_, e), name in zip(ENTRIES, NAMES, strict=True) if e.holds is not None]


@pytest.mark.parametrize("entry", SETTLED)
def test_what_can_be_settled_in_a_moment_is_true(entry: Misconception) -> None:
    assert entry.holds is not None
    assert entry.holds() is True


def test_many_statements_are_settled() -> None:
    assert len(SETTLED) >= 90


def test_every_misconception_is_answered_in_one_chapter() -> None:
    answered = Counter(row for _, entry in ENTRIES for row in entry.covers)
    known = {row.name for row in rows() if row.kind == "misconception"}

    assert sorted(known - set(answered)) == []
    assert sorted(set(answered) - known) == []


@pytest.mark.parametrize(
    ("statement", "truth", "fault"),
    [
        ("No.", "It is not so.", "'No.' has 3 characters; it should have 11 to 160"),
        ("It is so. " * 17, "It is not so.", "has 170 characters; it should have 11 to 160"),
        ("It is so, really.", "It is not. " * 40, "has 440 characters; it should have 11 to 420"),
        ("It is so, really.", "It is not\nso.", "should be one paragraph of sentences"),
        ("It is so, really.", "It is `not so.", "each backtick with its second"),
        ("It is so, really", "It is not so.", "should be one paragraph of sentences"),
    ],
)
def test_what_is_too_long_or_not_well_formed_is_refused(statement: str, truth: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Misconception(statement, truth, ("misconception 1",))


def test_a_statement_that_covers_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'It is so, really\.' covers no row of the coverage map"):
        Misconception("It is so, really.", "It is not so.", ())


def test_statements_are_told_apart() -> None:
    assert len({entry.statement for _, entry in ENTRIES}) == len(ENTRIES)


def test_the_table_of_a_notebook_folds_each_truth_and_escapes_text() -> None:
    html = Misconceptions((Misconception("a < b & `x<y>`", "*no*: `b` is.", ("misconception 1",)),))._repr_html_()

    assert html.count("<details") == html.count("<summary") == html.count("</details>") == 1
    assert "a &lt; b &amp; <code>x&lt;y&gt;</code>" in html
    assert "<em>no</em>: <code>b</code>" in html
    assert html.index("</summary>") < html.index("In truth:")  # a word and not only a colour
    assert "tabindex" not in html  # a summary is reached and opened by keyboard as it is


def test_in_a_terminal_the_truth_stands_below_the_statement() -> None:
    text = str(
        Misconceptions((Misconception("It is so, really.", "It is not. " * 19 + "It is not.", ("misconception 1",)),))
    )

    assert "“It is so, really.”\n    → It is not." in text
    assert max(map(len, text.splitlines())) <= 100
    assert repr(misconceptions("memory")) == str(misconceptions("memory"))


@pytest.mark.parametrize("chapter", WITH_STATEMENTS)
def test_six_are_seen_at_once_and_the_others_are_behind_one_fold(chapter: str) -> None:
    shown = misconceptions(chapter)
    first, fold, rest = shown._repr_html_().partition(f">{len(shown.entries) - 6} more</summary>")

    assert len(shown.entries) >= 8
    assert shown.heading.startswith("6 ")
    assert first.count("In truth:") == 6
    assert fold
    assert rest.count("In truth:") == len(shown.entries) - 6
    assert str(shown).count("→") == len(shown.entries)


def test_six_or_fewer_need_no_fold() -> None:
    one = misconceptions("memory").entries[0]

    assert Misconceptions((one,) * 6)._repr_html_().count("<details") == 6


def test_the_questions_of_interviews_have_no_statements_and_all_other_chapters_have() -> None:
    assert set(CHAPTERS) - set(WITH_STATEMENTS) == {"interview"}
    with pytest.raises(ValueError, match=r"no chapter 'interview'; there are memory, .*, bug_hunt$"):
        misconceptions("interview")


def test_the_evidence_can_say_no() -> None:
    adam = "torch.optim:Adam"

    assert not evidence.absent("torch:Tensor.numel")
    assert evidence.absent("torch:Tensor.no_such_method")
    assert not evidence.refused("builtins:int", ValueError, "1")
    assert not evidence.defaults(adam, lr=1.0)
    assert not evidence.takes(adam, "lr", "no_such_argument")
    assert evidence.count("ALL_GATHER", "forward") == evidence.LAYERS + 1
    assert evidence.collectives(api="ddp") == {"ALL_REDUCE"}
    with pytest.raises(AttributeError):
        evidence.absent("torch:NoSuchClass.method")
    with pytest.raises(ImportError):
        evidence.absent("torch.no_such_module.below")
