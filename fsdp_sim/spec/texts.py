"""Reads the values of fields from texts, for the command line, the rows of a sweep and the explorer.

A text means what the same value means in Python. What its field does not take is refused with Python's sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_sim.spec.dtypes import TORCH_DTYPES
from fsdp_sim.spec.fields import Allowed, check
from fsdp_sim.spec.plan import Plan, takes

WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
ALIASES = {torch: ours for ours, torch in TORCH_DTYPES.items()}
ALIASES |= {torch.removeprefix("torch."): ours for torch, ours in ALIASES.items()}
ALIASES |= {"half": "fp16", "float": "fp32"}


def value_of(spec: type, name: str, text: str) -> Any:
    """Read the value of one field of ``spec`` from a text.

    ``true``, ``false`` and ``none`` may be in any case, and so may names of which there is a list; a dtype may have
    torch's name; names of modules are as they are, with commas between them (one that is a number has a comma after
    it).

    Raises:
        ValueError: the field takes no such value; the sentence is that of the field.

    Example:
        >>> value_of(Plan, "grad_accum", "2"), value_of(Plan, "param_dtype", "bfloat16"), value_of(Plan, "wrap", "a.0,")
        (2, 'bf16', ('a.0',))
        >>> value_of(Plan, "grad_accum", "two")
        Traceback (most recent call last):
        ValueError: Plan.grad_accum is 'two'; it must be a whole number >= 1
    """
    return _values(spec, name, text)[0]


def plan_fields(texts: Mapping[str, str]) -> dict[str, Any]:
    """Read the values of a plan's fields from texts.

    Where a word may mean two values of its field, ``api`` decides: ``backward_prefetch=none`` is FSDP1's ``none``, and
    FSDP2's None.

    Raises:
        ValueError: a value that its field does not take.

    Example:
        >>> plan_fields({"reshard_after_forward": "false", "forward_prefetch": "2"})
        {'reshard_after_forward': False, 'forward_prefetch': 2}
        >>> plan_fields({"api": "fsdp1", "backward_prefetch": "none"})
        {'api': 'fsdp1', 'backward_prefetch': 'none'}
    """
    api = value_of(Plan, "api", texts["api"]) if "api" in texts else Plan.api
    fields = {}
    for name, text in texts.items():
        values = _values(Plan, name, text)
        fields[name] = values[0] if len(values) == 1 else next(filter(takes(api, name).test, values), values[0])
    return fields


def text_of(value: Any) -> str:
    """A value as the text that `value_of` reads.

    Example:
        >>> text_of(None), text_of(2), text_of(("layers.0", "layers.1")), text_of(("0",))
        ('none', '2', 'layers.0,layers.1', '0,')
    """
    if isinstance(value, tuple):
        return ",".join(value) + ("," if len(value) == 1 else "")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@functools.lru_cache(maxsize=4096)
def _values(spec: type, name: str, text: str) -> list[Any]:
    """Every value of the field that the text may mean, the likeliest first."""
    allowed: Allowed = spec.__dataclass_fields__[name].metadata["allowed"]  # type: ignore[attr-defined]
    plain = text.strip()
    literal = list(_literals(plain))
    taken = [value for value in literal if allowed.test(value)]
    if plain in allowed.names:
        taken.insert(0, plain)
    if not taken:
        taken = [value for value in _names(plain, literal) if allowed.test(value)][:1]
    if not taken:
        check(spec.__name__, name, [*literal, plain][0], allowed)
    return taken


def _literals(plain: str) -> Iterator[Any]:
    """The word or the number that a text is."""
    if plain.lower() in WORDS:
        yield WORDS[plain.lower()]
    if plain[:1] == "0" and plain[1:2].isdigit():  # no number in Python: what is left of 4,096 at its comma
        return
    for number in (int, float):
        try:
            yield number(plain)
            return
        except ValueError:
            pass


def _names(plain: str, literal: list[Any]) -> Iterator[Any]:
    """The names that a text may be: first as written, then in another case."""
    yield plain
    yield ALIASES.get(plain.lower(), plain)
    if "," in plain or not literal:  # "5" is a number, "5," the name of a module
        yield tuple(name.strip() for name in plain.removesuffix(",").split(","))
    yield plain.lower()
    yield plain.upper()
