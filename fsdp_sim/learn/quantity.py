"""Quantities as people write them: ``7.9 GB``, ``7.4 GiB``, ``1.1k tokens``, ``3 ms``."""

from __future__ import annotations

import re
from typing import Any

BYTES = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60, "h": 3600}
SHOWN = {"B", "kB", "MB", "GB", "TB", "us", "ms", "s", "min", "h", "%", "FLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"}
SHOWN |= {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}
COUNT = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
FLOPS = {"FLOP": 1, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}
SCALES: dict[str, dict[str, float]] = {
    "bytes": {**BYTES, "bytes": 1, "byte": 1},
    "s": SECONDS,
    "bytes/s": {f"{name}/s": scale for name, scale in BYTES.items()},
    "FLOP/s": {f"{name}/s": scale for name, scale in FLOPS.items()}
    | {f"{name}S": scale for name, scale in FLOPS.items()},
    "%": {"%": 1},
}
MAX_LENGTH = 40
FARTHEST = 1e30
"""Of a quantity, either way: far beyond what anything here holds, moves or lasts."""
WRITTEN = re.compile(r"\s*([-+]?[\d_,]*\.?\d+(?:[eE][-+]?\d+)?)\s*(.*?)\s*")


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
    number, scale = float(found[1].replace(",", "").replace("_", "")), found[2]
    if scales is COUNT and scale.endswith((unit, singular(unit))):
        scale = scale.removesuffix(unit).removesuffix(singular(unit)).rstrip()
    if scale not in scales:
        right = ", ".join(name for name in scales if name)
        raise ValueError(f"{answer!r} has another unit; asked for are {unit}, with one of {right}")
    if not 1 / FARTHEST < abs(value := number * scales[scale]) < FARTHEST and number:
        raise ValueError(f"{answer!r} is farther than {FARTHEST:.0e} from any {unit or 'number'} that could be meant")
    return value


def unit_meant(factor: float, unit: str, close: float = 1e-3) -> str:
    """What unit was meant if an answer is the truth times ``factor``, within ``close``; empty if none is known."""
    known = {1 / scale: name for name, scale in SCALES.get(unit, {}).items() if scale != 1}
    if unit == "bytes":
        known[8.0] = "bits"
    return next((name for value, name in known.items() if abs(factor / value - 1) < close), "")


def singular(unit: str) -> str:
    """Of what is counted, one: ``rank`` of ``ranks``, ``micro-batch`` of ``micro-batches``."""
    return unit.removesuffix("es" if unit.endswith("ches") else "s")


def needs_unit(unit: str) -> bool:
    """Whether a bare number says too little: of bytes and seconds, not of what is counted."""
    return unit in SCALES


def written(value: float, unit: str) -> str:
    """A quantity as one would write it, with three digits or, of a small count, all.

    Example:
        >>> written(7.9e9, "bytes"), written(0.0031, "s"), written(38, "collectives"), written(1100, "tokens")
        ('7.9 GB', '3.1 ms', '38 collectives', '1,100 tokens')
    """
    if unit not in SCALES:
        digits = f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
        return f"{digits} {singular(unit) if value == 1 else unit}".strip()
    shown = sorted((scale, name) for name, scale in SCALES[unit].items() if name in SHOWN)
    scale, name = max((one for one in shown if one[0] <= abs(value) * (1 + 1e-9)), default=shown[0])
    number = value / scale
    return f"{number:.3g} {name}" if abs(number) < 1000 else f"{number:,.0f} {name}"
