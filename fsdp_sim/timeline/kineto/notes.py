"""An annotation that means something."""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """When it lasted on which thread, and what it says (see `names.mark`)."""

    start: float
    end: float
    tid: int
    kind: str
    unit: str = ""
    number: int = 0
