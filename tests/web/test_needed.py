"""What "Copy as Python" takes from the cells before a figure."""

from __future__ import annotations

import pytest

from web.pages.needed import needed

CELLS = [
    "import math\nimport json",
    "def area(r):\n    return math.pi * r**2",
    "sizes = [1, 2]\nunused = 5\nsizes",
    "sizes.append(3)\nsizes[0] = 9",
    "unused += 1",
]


def test_definitions_come_along_with_what_they_build_on_in_order_and_nothing_else() -> None:
    assert needed(CELLS, "area(2)") == "import math\ndef area(r):\n    return math.pi * r**2\narea(2)\n"


def test_what_changes_a_value_comes_along_and_what_only_shows_it_does_not() -> None:
    assert needed(CELLS, "plot(sizes)") == "sizes = [1, 2]\nsizes.append(3)\nsizes[0] = 9\nplot(sizes)\n"


def test_a_decorator_belongs_to_its_function_and_needs_its_own_names() -> None:
    before = ["import functools", "@functools.cache\ndef f():\n    return 1"]
    assert needed(before, "f()") == "import functools\n@functools.cache\ndef f():\n    return 1\nf()\n"


def test_of_two_statements_in_a_line_each_is_taken_by_itself() -> None:
    assert needed(["a = 1; b = 2"], "b") == "b = 2\nb\n"


def test_what_is_more_than_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        needed(["%timeit f()"], "f()")
