"""What to expect: every wrong answer is there, what is written by hand is about what exists, pages are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_sim.learn.classroom import expect_pages
from fsdp_sim.learn.classroom.expect import Notes, exercises_of, notes, who, whole_message
from fsdp_sim.learn.classroom.sections import instructor
from fsdp_sim.learn.coverage import masters
from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import CHAPTERS, load
from fsdp_sim.learn.statements import WITH_STATEMENTS

NOTES = notes()
chapters = pytest.mark.parametrize("chapter", CHAPTERS)
by_hand = pytest.mark.parametrize("of", NOTES.values(), ids=lambda of: of.name)


def part_of(page: str, exercise: Exercise) -> str:
    return page.split(f'<a id="{exercise.name}"></a>')[1].split("<a id=")[0]


def kept(chapter: str) -> str:
    return (instructor() / "expect" / f"{chapter}.md").read_text()


@chapters
def test_its_page_links_to_notebooks_that_are_there(chapter: str) -> None:
    for notebook in re.findall(r"\]\(\.\./\.\./(\w+)\.ipynb\)", kept(chapter)):
        assert (masters() / f"{notebook}.py").exists(), notebook


@chapters
def test_every_wrong_answer_and_every_shortcut_appears(chapter: str) -> None:
    for exercise in exercises_of(chapter):
        part = part_of(kept(chapter), exercise)
        assert exercise.title in part
        assert f"{exercise.minutes} minutes" in part
        listed = part.split("what each is told:")[1].split("Shortcuts")[0]
        assert listed.count("\n- ") == len(exercise.wrong)
        for wrong in (*exercise.wrong, *exercise.shortcuts):
            assert expect_pages.escaped(whole_message(exercise, wrong.message)) in part, (exercise.name, wrong.message)


def test_what_is_told_is_the_whole_sentence_where_the_judge_has_it() -> None:
    exercise = load("case_23")
    assert whole_message(exercise, "those rows count twice").startswith(
        "ranks that had run out went on with their last batch"
    )
    assert whole_message(exercise, "returned without calling") == "returned without calling"
    assert whole_message(exercise, "expected") == "what was expected and what was found"


def test_a_wrong_answer_is_named_in_words_by_what_it_changes_or_as_it_is_written() -> None:
    trace, batches = load("first_to_differ"), load("case_23")
    assert who(trace.wrong, trace)[:2] == ["against rank 0", "counted from 0"]
    assert who(batches.wrong, batches)[1:3] == [
        "one less",
        "`steps -= 1` in place of `dist.all_reduce(steps, op=dist.ReduceOp.MIN) # as many as everyone has`",
    ]
    assert who(load("state_bytes_per_parameter").wrong, load("state_bytes_per_parameter"))[2] == (
        "without `+ 4 * master_copy`"
    )
    assert who(load("plan_for_24_gb").wrong, load("plan_for_24_gb"))[0] == "`plan(16, None, False, 'bf16')`"
    assert who(load("case_35").wrong, load("case_35"))[0] == "the code as it was given"


def test_every_chapter_of_the_course_has_notes() -> None:
    assert set(WITH_STATEMENTS) <= set(NOTES)


@by_hand
def test_a_chapter_has_questions_sentences_and_what_is_believed(of: Notes) -> None:
    assert 2 <= len(of.question) <= 3
    assert len(of.sentence) >= 3
    assert len({one.exercise for one in of.sentence}) == len(of.sentence)
    assert len(of.statements) == len(of.believed) >= (3 if of.name in WITH_STATEMENTS else 0)
    page = kept(of.name)
    for question in of.question:
        assert question.ask in page
        assert question.good in page
    for entry in of.statements:
        assert entry.statement in page
        assert entry.truth in page


@by_hand
def test_what_is_written_is_short_and_well_formed(of: Notes) -> None:
    for question in of.question:
        assert question.ask[-1] == "?"
        assert len(question.ask) <= 180
        assert 40 <= len(question.good) <= 330
    for text in (*(q.ask for q in of.question), *(q.good for q in of.question), *(one.say for one in of.sentence)):
        assert "!" not in text
        assert "  " not in text
        assert "\n" not in text
        assert text[-1] in ".?"


@by_hand
def test_no_sentence_gives_the_solution_away(of: Notes) -> None:
    for one in of.sentence:
        assert len(one.say) <= 170
        hint = load(one.exercise).hints[2]  # almost the code
        shared = set(re.findall(r"\w+(?:\.\w+)*\(", one.say)) & set(re.findall(r"\w+(?:\.\w+)*\(", hint))
        assert not shared - {"type(", "numel(", "p.to_local("}, one.exercise


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('name = "cooking"\nquestion = []\nsentence = []', "chapter cooking: there are memory, "),
        (
            'name = "memory"\nquestion = []\nsentence = [{exercise = "forward_time", say = "Hm."}]',
            "chapter memory: it has no exercise 'forward_time'",
        ),
        (
            'name = "memory"\nquestion = []\nsentence = []\nbelieved = ["misconception 99"]',
            r"chapter memory: no entry of misconceptions\('memory'\) answers misconception 99",
        ),
        ('name = "memory"\nquestion = [{ask = "Why?"}]\nsentence = []', "missing required field `good`"),
    ],
)
def test_what_is_wrong_is_named_with_its_chapter(tmp_path: Path, table: str, said: str) -> None:
    file = tmp_path / "expect.toml"
    file.write_text(f"[[chapter]]\n{table}\n")
    with pytest.raises(ValueError, match=said):
        notes(file)


def test_a_chapter_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="no chapter 'cooking'; there are memory, "):
        expect_pages.page("cooking")
