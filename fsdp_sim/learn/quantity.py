"""Quantities as people write them: ``7.9 GB``, ``7.4 GiB``, ``1.1k tokens``, ``3 ms``."""

from __future__ import annotations

import re
from typing import Any

BYTES = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60, "h": 3600}
COUNT = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SCALES: dict[str, dict[str, float]] = {"bytes": {**BYTES, "bytes": 1, "byte": 1}, "s": SECONDS}
MAX_LENGTH = 40
WRITTEN = re.compile(r"\s*([-+]?[\d_,]*\.?\d+(?:[eE][-+]?\d+)?)\s*([a-zA-Zµ]*)\s*([a-zA-Z]*)\s*")


def in_unit(answer: Any, unit: str) -> Any:
    """A quantity in the unit that was asked for; numbers, and what is no text, as they are.

    Args:
        unit: ``bytes``, ``s``, or the name of what is counted.

    Raises:
        ValueError: the text is no quantity, or one of another kind; says which units are right.

    Example:
        >>> in_unit("7.4 GiB", "bytes") == 7.4 * 2**30, in_unit("1.1k tokens", "tokens"), in_unit(5, "s")
        (True, 1100.0, 5)
    """
    if not isinstance(answer, str):
        return answer
    found = WRITTEN.fullmatch(answer) if len(answer) <= MAX_LENGTH else None
    scales = SCALES.get(unit, COUNT)
    if found is None:
        raise ValueError(
            f"{answer[:MAX_LENGTH]!r} is no quantity; answer with a number of {unit or 'things'}, such as 12 or '12'"
        )
    number, scale, counted = float(found[1].replace(",", "").replace("_", "")), found[2], found[3]
    if scales is COUNT and scale == unit:
        scale = ""
    if scale not in scales or (counted and counted != unit):
        right = ", ".join(name for name in scales if name)
        raise ValueError(f"{answer!r} has another unit; asked for are {unit}, with one of {right}")
    return number * scales[scale]


def slip(factor: float, unit: str) -> str:
    """What unit was meant if an answer is the truth times ``factor``; empty if none is known."""
    known = {1 / scale: name for name, scale in SCALES.get(unit, {}).items() if scale != 1}
    if unit == "bytes":
        known[8.0] = "bits"
    return next((name for value, name in known.items() if abs(factor / value - 1) < 1e-3), "")
