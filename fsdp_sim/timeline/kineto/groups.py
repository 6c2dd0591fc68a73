"""Which ranks meet in a collective, as a trace says it: the process group's name, its ranks, and the turn."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from fsdp_sim.timeline.kineto.rows import Args

_WHOLE_LIST = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")  # torch shortens long ones by "..."


def group_name(args: Args, metadata: dict[str, Any]) -> str:
    """The same text on every rank of a process group: its name, and its ranks where the trace lists them.

    Example:
        >>> group_name(Args(process_group="3", group_ranks="[1, 3, 5, 7]"), {})
        '3 of ranks 1-7 by 2'
    """
    name = str(args.process_group or "")
    ranks = _ranks_of(name, metadata) or _listed(args.group_ranks)
    return f"{name} of ranks {_spelt(ranks)}".strip() if ranks else name


def turn(args: Args) -> int:
    """The number of a collective within its group, -1 where the trace has none."""
    return args.turn if isinstance(args.turn, int) and 0 <= args.turn < 1 << 62 else -1


def _ranks_of(name: str, metadata: dict[str, Any]) -> list[int]:
    """What the head of the trace says of a process group."""
    info = metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and str(group.get("pg_name")) == name and isinstance(group.get("ranks"), list):
            return sorted({rank for rank in group["ranks"] if isinstance(rank, int)})
    return []


def _listed(text: Any) -> list[int]:
    return sorted(map(int, re.findall(r"\d+", text))) if isinstance(text, str) and _WHOLE_LIST.fullmatch(text) else []


def _spelt(ranks: list[int]) -> str:
    """Ranks at equal distances by the first, the last and the distance."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(steps) == 1 and len(ranks) > 2:
        (step,) = steps
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ",".join(map(str, ranks))
