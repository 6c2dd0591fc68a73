"""Software stacks by name: the fields of `Plan` that each one sets, and where that was read."""

from __future__ import annotations

from typing import Any

from fsdp_sim.spec.catalogue import tables

FILE = "stacks.toml"


def stack_names() -> tuple[str, ...]:
    return tuple(tables(FILE))


def stack_settings(name: str) -> dict[str, Any]:
    """Fields of `Plan` as a stack has them; none where there is no such stack."""
    settings: dict[str, Any] = tables(FILE).get(str(name), {}).get("plan", {})
    return settings


def stack_remark(name: str) -> str:
    """What a reader of a prediction should know of its stack; empty where that was read in its code."""
    stack = tables(FILE)[name]
    return (
        f"The stack {name} is unverified: its code was not read ({stack['source']})." if stack.get("unverified") else ""
    )
