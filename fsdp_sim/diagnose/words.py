"""Milliseconds, shares and lists of names, as sentences say them."""

from __future__ import annotations


def ms(seconds: float) -> str:
    """Milliseconds with as many digits as they deserve."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.1f} ms" if value >= 1 else f"{value:.3g} ms"


def part(seconds: float, of_s: float) -> str:
    share = seconds / of_s if of_s else 0.0
    return f"{share:.0%}" if share >= 0.1 or share <= 0 else f"{share:.1%}"


def names(units: list[str]) -> str:
    """Up to three names, each once."""
    distinct = list(dict.fromkeys(unit or "the optimizer" for unit in units))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more
