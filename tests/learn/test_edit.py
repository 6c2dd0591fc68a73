"""A function as an edit of another: what it changes, that it travels, and what is no edit."""

from __future__ import annotations

import inspect
import traceback

import cloudpickle
import pytest

from fsdp_sim.learn.edit import Edit, source_of

FIRST = 1


def numbered(names):
    found = []
    for number, name in enumerate(names, FIRST):
        if name:
            found.append(f"{number} {name}")
            found.append("")  # a line between
    return found


def test_the_rest_is_as_it_was() -> None:
    assert Edit({"{number} {name}": "{name} {number}"}, numbered)(["a"]) == ["a 1", ""]
    assert numbered(["a"]) == ["1 a", ""]


def test_several_texts_are_replaced_at_once() -> None:
    swapped = Edit({"{number}": "{name}", "{name}": "{number}"}, numbered)
    assert swapped(["a"]) == ["a 1", ""]


def test_lines_are_written_without_their_indentation_and_get_that_of_the_first() -> None:
    by_hand = Edit(
        {'found.append(f"{number} {name}")\nfound.append("")': "if number > 1:\n    found.append(name)"}, numbered
    )
    assert by_hand(["a", "b"]) == ["b"]
    assert "            if number > 1:\n                found.append(name)  # a line between\n" in by_hand.source


def test_nothing_in_the_place_of_a_whole_line_leaves_it_out() -> None:
    shorter = Edit({'found.append("")  # a line between': ""}, numbered)
    assert shorter.source == source_of(numbered).replace('            found.append("")  # a line between\n', "")


def test_it_uses_the_names_of_the_module_of_what_it_edits() -> None:
    assert Edit({"enumerate(names, FIRST)": "enumerate(names, 10 * FIRST)"}, numbered)(["a"]) == ["10 a", ""]


def test_it_travels_as_text_and_its_traceback_quotes_the_edited_line() -> None:
    edit = Edit({"return found": "return found[7]"}, numbered)
    there = cloudpickle.loads(cloudpickle.dumps(edit))
    assert inspect.isfunction(there.function)
    with pytest.raises(IndexError) as raised:
        there(["a"])
    assert "in numbered\n    return found[7]" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"print": "log"}, "'print' stands 0 times in numbered; an edit needs it once"),
        ({"found": "list"}, "'found' stands 4 times in numbered; an edit needs it once"),
        ({"return found": "return ("}, "is no Python"),
    ],
)
def test_what_is_no_edit_is_refused(texts: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _ = Edit(texts, numbered).source
