"""`seldom_collected`: many plans simulated one after the other, without a look for garbage after each."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (100_000, 50, 50)  # thresholds of Python's collector


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A program is thousands of tuples without cycles: Python's collector searches them in vain, again and again."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
