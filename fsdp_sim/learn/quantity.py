"""Quantities as people write them: ``7.9 GB``, ``7.4 GiB``, ``1.1k tokens``, ``3 ms``."""

from __future__ import annotations

import re
from typing import Any

from fsdp_sim.learn.numerals import in_digits

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
SPOKEN = {
    "bytes": {"byte": "B", "kilobyte": "kB", "megabyte": "MB", "gigabyte": "GB", "terabyte": "TB", "gig": "GB"}
    | {"kibibyte": "KiB", "mebibyte": "MiB", "gibibyte": "GiB", "tebibyte": "TiB"}
    | {
        "gb": "GB",
        "mb": "MB",
        "kb": "kB",
        "tb": "TB",
        "gib": "GiB",
        "mib": "MiB",
        "kib": "KiB",
        "tib": "TiB",
        "b": "B",
    }
    | {"G": "GB", "giga": "GB", "M": "MB", "mega": "MB", "T": "TB", "tera": "TB"},
    "s": {
        "second": "s",
        "sec": "s",
        "millisecond": "ms",
        "msec": "ms",
        "microsecond": "us",
        "minute": "min",
        "hour": "h",
    },
    "%": {"percent": "%", "per cent": "%", "pct": "%"},
    "FLOP": {"teraflop": "TFLOP", "gigaflop": "GFLOP", "petaflop": "PFLOP"}
    | {"tflop": "TFLOP", "gflop": "GFLOP", "pflop": "PFLOP"},
    "": {"thousand": "k", "million": "M", "billion": "B", "bn": "B", "trillion": "T"},
}
"""How units are said, by what is measured; the plural too."""
BITS = {
    name: scale / 8
    for letter, word, scale in (("k", "kilo", 1e3), ("M", "mega", 1e6), ("G", "giga", 1e9), ("T", "tera", 1e12))
    for name in (f"{letter}bit", f"{letter}bits", f"{word}bit", f"{word}bits")
}
"""Bits, as links are sold; "Gb" alone may be either, and is asked for again, but "Gb/s" and "Gbps" are bits."""
MAX_LENGTH, READ = 40, 300
"""Characters of an answer that are quoted, and that are read."""
RATES = (" per second", " per sec", "/s", "/second", "/sec", " a second")
FARTHEST = 1e30
"""Of a quantity, either way: far beyond what anything here holds, moves or lasts."""
LEAD = (
    r"(?:(?:about|approximately|approx\.?|around|roughly|circa|ca\.?|nearly|almost|some|maybe|probably|it'?s|it is|"
    r"that'?s|that is|i'?d say|i would say|i think|i guess|we get|so|just|only|exactly|~|\u2248|=|:)\s*)*"
)
WRITTEN = re.compile(rf"\s*{LEAD}([-+]?[\d_,]*\.?\d+(?:[eE][-+]?\d+)?)\s*(.*?)\s*", re.IGNORECASE | re.DOTALL)
TAIL = re.compile(
    r"\s*(?:$|[.,;:(?!]\s*(?!\d)|(?:per|each|every|a|an|on|in|of|for|because|since|as|so|if|when|with|at|by|from|that|which|to|"
    r"total|altogether|overall|more or less|or so|roughly|approximately|right|i think|i guess|i'd say)\b)",
    re.IGNORECASE,
)
"""What may follow a quantity: nothing, or words that say of what, or why."""


def in_unit(answer: Any, unit: str) -> Any:
    """A quantity in the unit that was asked for; numbers, and what is no text, as they are.

    Args:
        unit: ``bytes``, ``s``, or the name of what is counted.

    Raises:
        ValueError: the text is no quantity, or one of another kind; says which units are right.

    Example:
        >>> in_unit("7.4 GiB", "bytes") == 7.4 * 2**30, in_unit("1.1k tokens", "tokens"), in_unit(5, "s")
        (True, 1100.0, 5)
        >>> in_unit("about 13 gigabytes per GPU, because of 16 bytes each", "bytes")
        13000000000.0
    """
    if not isinstance(answer, str):
        return answer
    answer = in_digits(answer) if len(answer) <= READ else answer
    found = WRITTEN.fullmatch(answer.rpartition("=")[2]) if len(answer) <= READ else None
    scales = SCALES.get(unit, COUNT)
    quoted = repr(answer[:MAX_LENGTH])
    if found is None:
        such = written(1.5 * _usual(unit), unit) if unit in SCALES else "12 or '12'"
        raise ValueError(f"{quoted} is no quantity; answer with a number of {unit or 'things'}, such as {such}")
    number, rest = float(found[1].replace(",", "").replace("_", "")), found[2]
    scale = _scale(rest, unit, scales)
    if scale is None:
        if unit in SCALES and TAIL.match(rest):
            raise ValueError(f"{quoted} of what? Write the unit, as in {written(1.5 * _usual(unit), unit)}")
        if re.match(r"\s*(?:or|to|and|-|\u2013)\s*\d", rest):
            raise ValueError(f"{quoted} is more than one number; name one, for near is near enough")
        right = ", ".join(name for name in scales if name)
        raise ValueError(f"{quoted} has another unit; asked for are {unit or 'a plain number'}, with one of {right}")
    answer, value = answer[:MAX_LENGTH], number * scale
    if not 1 / FARTHEST < abs(value) < FARTHEST and number:
        raise ValueError(f"{answer!r} is farther than {FARTHEST:.0e} from any {unit or 'number'} that could be meant")
    return value


def _scale(rest: str, unit: str, scales: dict[str, float]) -> float | None:
    """What a number is multiplied by, for what follows it; None if that is no unit of this kind."""
    for name in sorted(scales, key=len, reverse=True):
        if rest.startswith(name) and _ends(rest[len(name) :], unit):
            return scales[name]
    ways = _said(unit)
    for folded in (False, True):  # "Gb/s" are bits, "gb/s" hardly
        for said, scale in ways.items():
            start = rest[: len(said)]
            meant = len(said) > 3 and start.lower() == said if folded else start == said  # not "Gb", which are bits
            if meant and _ends(rest[len(said) :], unit):
                return scale
    return None


def _ends(after: str, unit: str) -> bool:
    """Whether a quantity may end before these words: of what is counted, its name comes first."""
    if not unit:
        after = re.sub(r"^\s*(?:times|x|fold)\b", "", after)
    elif unit not in SCALES:
        after = re.sub(rf"^[\s-]*(?:{re.escape(unit)}|{re.escape(singular(unit))})\b", "", after)
    return bool(TAIL.match(after)) and not re.match(r"\s*per (?:second|s)\b|/", after)


def _said(unit: str) -> dict[str, float]:
    """The scale of each way to say a unit, the longest first."""
    per = r"/s" if unit.endswith("/s") else ""
    scales, words = SCALES.get(unit, COUNT), SPOKEN.get(unit.removesuffix("/s"), {} if unit in SCALES else SPOKEN[""])
    ways = {}
    for word, name in words.items():
        for each in (word, f"{word}s") if len(word) > 2 else (word,):
            for end in RATES if per else ("",):
                ways[each + end] = scales[name + per]
            if unit == "FLOP/s":
                ways[each] = scales[name + per]
    if unit == "bytes":
        ways |= BITS
    if unit == "bytes/s":
        named = {**{n: s for n, s in BYTES.items() if len(n) > 1}, **BITS}
        ways |= {f"{name}{end}": scale for name, scale in named.items() for end in (*RATES, "ps")}
        ways |= {f"{n.lower()} per second": s for n, s in BYTES.items() if len(n) == 2}
        ways |= {f"{name[:1]}b{end}": BITS[name] for name in ("kbit", "Mbit", "Gbit", "Tbit") for end in ("/s", "ps")}
    return dict(sorted(ways.items(), key=lambda way: -len(way[0])))


def _usual(unit: str) -> float:
    return {"bytes": 1e9, "bytes/s": 1e9, "FLOP/s": 1e12}.get(unit, 1.0)


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
    digits = f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"
    return f"{digits}%" if name == "%" else f"{digits} {name}"
