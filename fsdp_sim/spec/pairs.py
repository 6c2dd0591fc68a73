"""`plan_from_pairs`: a `Plan` from the words of a command line, ``key=value``."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from fsdp_sim.spec.plan import TORCH_DTYPES, Plan

WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
ALIASES = {torch: ours for ours, torch in TORCH_DTYPES.items()}
ALIASES |= {torch.removeprefix("torch."): ours for torch, ours in ALIASES.items()}
ALIASES |= {"half": "fp16", "float": "fp32"}


def plan_from_pairs(pairs: Iterable[str]) -> Plan:
    """The plan that ``key=value`` pairs describe; fields that are not named keep torch's defaults.

    Keys are the fields of `Plan`. Values are ``true``, ``false``, ``none`` (in any case), ``last``, numbers, dtypes
    (``bf16`` or ``bfloat16``), names as they are, and for several names ``a,b``.

    Raises:
        ValueError: a pair without ``=``, a key that is no field (with the nearest one), a key given twice, a value
            that its field does not take (with what it takes), or fields that do not go together.

    Example:
        >>> plan = plan_from_pairs(["reshard_after_forward=false", "param_dtype=bf16", "forward_prefetch=2"])
        >>> plan.reshard_after_forward, plan.param_dtype, plan.forward_prefetch
        (False, 'bf16', 2)
        >>> plan_from_pairs(["forward_prefech=2"])
        Traceback (most recent call last):
        ValueError: 'forward_prefech=2': a plan has no field forward_prefech; did you mean forward_prefetch?
    """
    fields = {f.name: f for f in dataclasses.fields(Plan)}
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(f"{pair!r} is no pair; write key=value, for example forward_prefetch=1")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields)}"
            raise ValueError(f"{pair!r}: a plan has no field {key}; {hint}")
        if key in given:
            raise ValueError(f"{pair!r}: {key} is given twice; give it once")
        given[key] = _value(pair, text, fields[key])
    return Plan(**given)


def _value(pair: str, text: str, of: dataclasses.Field[Any]) -> Any:
    """The first reading of the text that the field takes."""
    key, allowed = of.name, of.metadata["allowed"]
    for value in _readings(text, (float,) if "float" in str(of.type) else (int, float)):
        if allowed.test(value):
            return value
    near = difflib.get_close_matches(text, _quoted(allowed.words), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    words = allowed.words.replace("True", "true").replace("False", "false").replace("None", "none").replace("'", "")
    raise ValueError(f"{pair!r}: {text or 'nothing'} is no value of {key}; it must be {words}{hint}")


def _readings(text: str, numbers: tuple[type, ...]) -> Iterable[Any]:
    if text.lower() in WORDS:
        yield WORDS[text.lower()]
    for number in numbers:
        with contextlib.suppress(ValueError):
            yield number(text)
    yield ALIASES.get(text, text)
    yield text.lower()
    yield text.upper()
    yield tuple(name.strip() for name in text.split(","))


def _quoted(words: str) -> list[str]:
    return words.split("'")[1::2]
