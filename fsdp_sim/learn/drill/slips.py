"""`slip`: what was probably done where a number is half, twice or eight times the right one, in that very question."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

FACTORS = (2.0, 0.5, 8.0, 0.125, 4.0, 0.25)
CLOSE = 0.03
TIMES = {2.0: "twice", 0.5: "half of", 8.0: "8 times", 0.125: "an eighth of", 4.0: "4 times", 0.25: "a quarter of"}
PASSES = {"elements", "bytes", "all-gathers", "collectives", "reduce-scatters", "passes"}


def slip(factor: float, unit: str, given: Mapping[str, Any], text: str) -> str:
    """The likely cause of an answer that is ``factor`` times the truth; empty if none of the usual factors is near.

    Args:
        factor: the answer over the truth.
        unit: of the answer.
        given: what the question drew, by name: eight GPUs make another eight likely than bits do.
        text: of the question.
    """
    near = next((of for of in FACTORS if math.isclose(factor, of, rel_tol=CLOSE)), None)
    if near is None:
        return ""
    many = round(max(near, 1 / near))
    said = f"that is {TIMES[near]} the right number"
    causes = (_counted(near, many, given), _bits(near, unit), _dtype(near, unit, text), _passes(near, unit, text))
    cause = next((cause for cause in causes if cause), "")
    return f"{said}: {cause}" if cause else f"{said}: look for a factor of {many} that is counted {_how(near)}"


def _how(near: float) -> str:
    return "once too often" if near > 1 else "once too seldom"


def _counted(near: float, many: int, given: Mapping[str, Any]) -> str:
    """A number of the question that is the factor itself."""
    names = [name for name, value in given.items() if type(value) is int and value == many]
    if not names:
        return ""
    name = names[0].replace("_", " ")
    return f"the {name} of the question are {many}, and seem to be counted {_how(near)}"


def _bits(near: float, unit: str) -> str:
    if unit not in ("bytes", "bytes/s") or near not in (8.0, 0.125):
        return ""
    return "as bits it would be right, and a byte has 8 of them" if near == 8.0 else "bits were divided by 8 twice"


def _dtype(near: float, unit: str, text: str) -> str:
    if unit != "bytes" or near not in (2.0, 0.5) or not re.search(r"bf16|fp16|fp32|precision", text):
        return ""
    return (
        "4 bytes for each element, as in fp32, where it has 2"
        if near == 2.0
        else "2 bytes for each element, as in bf16, where it has 4"
    )


def _passes(near: float, unit: str, text: str) -> str:
    if unit not in PASSES or near not in (2.0, 0.5) or not re.search(r"backward|step|all-gather|all-reduce", text):
        return ""
    return (
        "forward and backward seem to be counted alike, or both directions of a link"
        if near == 2.0
        else "forward and backward both count, and an all-reduce is two passes"
    )
