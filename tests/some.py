"""Of many cases of one kind, some for `make test`; the rest is left to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], first: int) -> list[Any]:
    """The first few as they are, the others marked ``tail``."""
    return [case if n < first else tail(case) for n, case in enumerate(cases)]


def tail(case: Any) -> Any:
    """A case (a value, or a `pytest.param`) that is left to ``make test-all``."""
    if hasattr(case, "values") and hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.tail])
    return pytest.param(case, marks=pytest.mark.tail)
