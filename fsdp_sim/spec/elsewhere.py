"""`instead_of`: what somebody means who gives a field a value that it does not take."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files

API_OF_ZERO = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp2"}  # which api is a stage of ZeRO's

_NUMBER = re.compile(
    r"(?P<digits>\d{1,3}(?:[,'_ ]\d{3})+|\d+)(?P<rest>\.\d+)?\s*(?P<unit>[kmgtb]?)(?P<binary>i?)", re.I
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}
BOOLS = {"yes": True, "on": True, "y": True, "1": True, "no": False, "off": False, "n": False, "0": False}
_LONGEST = 40  # characters of a value that is looked up


def instead_of(field: str, value: object) -> str:
    """What a value is here that other software says for it; empty where that is not known.

    Example:
        >>> instead_of("fp8", "mxfp4"), instead_of("fp8", "abc")
        ('training in four bits is not simulated', '')
    """
    if not isinstance(value, str | bool | int | float):
        return ""
    text = str(value).strip().lower()[:_LONGEST]
    return next((here for form, here in _elsewhere().get(field, {}).items() if re.fullmatch(form, text)), "")


def number_meant(value: object) -> str:
    """What to write for a whole number that is not written as one; empty for what is none.

    Example:
        >>> number_meant("8,192"), number_meant("8k"), number_meant(8e3), number_meant("8x8")
        ('write 8192', 'k is 1,000 or 1,024: write 8000 or 8192', 'write 8000', 'write 64')
    """
    if isinstance(value, float):
        return f"write {int(value)}" if value.is_integer() and 1 <= value < 2**63 else ""
    if isinstance(value, str) and (product := re.fullmatch(r"\s*(\d{1,9})\s*[x*×]\s*(\d{1,9})\s*", value)):
        return f"write {int(product[1]) * int(product[2])}"
    found = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= _LONGEST else None
    if found is None:
        return ""
    plain = re.sub(r"\D", "", found["digits"]) + (found["rest"] or "")
    if re.match(r"0\d", plain):
        return f"write {plain.lstrip('0') or '0'}, and 4,096 without its comma"
    power, unit = _POWERS[found["unit"].lower()], found["unit"]
    if not power:
        return f"write {int(float(plain)) if float(plain).is_integer() else plain}"
    if unit.lower() == "b":
        return f"write {float(plain) * 1e9:.0f}"
    decimal, binary = float(plain) * 1000**power, float(plain) * 1024**power
    if found["binary"]:
        return f"write {binary:.0f}"
    return f"{unit} is {1000**power:,} or {1024**power:,}: write {decimal:.0f} or {binary:.0f}"


@cache
def _elsewhere() -> dict[str, dict[str, str]]:
    return tomllib.loads(files("fsdp_sim.spec").joinpath("elsewhere.toml").read_text())
