"""Compares an answer with what is right, down to the first number that differs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsdp_sim.learn.quantity import in_unit

SHOWN = 3  # numbers of a list or tensor


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs, and how: two texts and, if it can be said, a reason."""

    where: str
    expected: str
    found: str
    reason: str = ""

    def __str__(self) -> str:
        at = f"{self.where}: " if self.where else ""
        return f"{at}expected {self.expected}, found {self.found}" + (f" ({self.reason})" if self.reason else "")


def difference(expected: Any, found: Any, *, unit: str = "", rel: float = 0.0, abs_: float = 0.0) -> Difference | None:
    """The first difference, or None.

    Args:
        expected, found: numbers, texts, lists, dicts or tensors. Lists and tuples are the same.
        unit: of the numbers; answers may be texts such as ``"7.9 GB"``.
        rel, abs_: two numbers are the same up to ``rel`` times the expected one, or up to ``abs_``.
    """
    return _difference(expected, found, "", unit, rel, abs_)


def _difference(expected: Any, found: Any, where: str, unit: str, rel: float, abs_: float) -> Difference | None:
    def differs(reason: str = "") -> Difference:
        shown = f"{text(expected)} {unit}".rstrip() if _is_number(expected) else text(expected)
        return Difference(where, shown, text(found), reason)

    if hasattr(expected, "shape"):
        return _of_tensors(expected, found, where, rel, abs_)
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return differs("a dict is asked for")
        missing = [key for key in expected if key not in found]
        if missing:
            return differs(f"there is no {missing[0]!r}")
        items = [(f"{where} {key}".strip(), value, found[key]) for key, value in expected.items()]
        extra = [key for key in found if key not in expected]
        if extra:
            return differs(f"{extra[0]!r} is not asked for")
    elif isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)):
            return differs("a list is asked for")
        if len(found) != len(expected):
            asked = "1 value is" if len(expected) == 1 else f"{len(expected)} values are"
            return differs(f"{asked} asked for, not {len(found)}")
        items = [(f"{where} place {i + 1}".strip(), a, b) for i, (a, b) in enumerate(zip(expected, found, strict=True))]
    elif _is_number(expected):
        if getattr(found, "shape", None) == ():
            found = found.item()  # a norm or a loss as torch returns it
        try:
            number = in_unit(found, unit)
        except ValueError as error:
            return differs(str(error))
        if not _is_number(number):
            return differs("a number is asked for")
        huge = isinstance(number, int) and abs(number) > 10**300  # no float could hold it
        close = not huge and math.isclose(number, expected, rel_tol=rel, abs_tol=abs_)
        return None if number == expected or close else differs()
    else:
        same = type(expected) is type(found) and expected == found
        return None if same else differs()
    for place, a, b in items:
        if (first := _difference(a, b, place, unit, rel, abs_)) is not None:
            return first
    return None


def _of_tensors(expected: Any, found: Any, where: str, rel: float, abs_: float) -> Difference | None:
    import torch

    def differs(reason: str, at: str = "") -> Difference:
        return Difference(" ".join(filter(None, (where, at))), text(expected), text(found), reason)

    if isinstance(found, (list, tuple)) and found and all(isinstance(x, (int, float)) for x in found):
        found = torch.tensor(found)
    if not isinstance(found, torch.Tensor):
        return differs("a tensor is asked for")
    if tuple(found.shape) != tuple(expected.shape):
        return differs(f"its shape should be {tuple(expected.shape)}, not {tuple(found.shape)}")
    a, b = expected.double().reshape(-1), found.double().reshape(-1)
    if torch.isnan(b).any():
        return differs("there are NaNs in it")
    wrong = (~torch.isclose(b, a, rtol=rel, atol=abs_)).nonzero()  # an infinite number is close to itself alone
    return None if not len(wrong) else differs(f"{len(wrong):,} of {a.numel():,} numbers differ")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def text(value: Any) -> str:
    """A value in a few words."""
    if value is ...:
        return "nothing (...)"
    if hasattr(value, "shape"):
        flat = value.reshape(-1)
        numbers = ", ".join(text(x) for x in flat[:SHOWN].tolist())
        more = ", ..." if flat.numel() > SHOWN else ""
        return f"[{numbers}{more}] of shape {tuple(value.shape)}"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else f"{float(value) if abs(value) < 10**300 else 'a huge number'}"
    if isinstance(value, float):
        return f"{int(value):,}" if value.is_integer() and abs(value) < 10**15 else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text(x) for x in value[:SHOWN])}{', ...' if len(value) > SHOWN else ''}]"
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:120]}..."
