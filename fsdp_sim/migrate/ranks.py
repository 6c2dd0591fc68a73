"""What one rank does alone, and where a collective must not stand: tests of the rank."""

from __future__ import annotations

import re

import libcst as cst

from fsdp_sim.migrate.source import Script

RANK = re.compile(r"rank|master|main_process|is_main|primary|coordinator", re.IGNORECASE)


def asks_for_rank(script: Script, test: cst.BaseExpression) -> bool:
    """Whether a condition differs from rank to rank, as far as its names tell."""
    return bool(RANK.search(script.code(test)))


def split(script: Script, test: cst.BaseExpression) -> tuple[str, str]:
    """What all ranks agree on in a condition, maybe nothing, and what is each rank's own; ``and`` joins them."""
    parts: list[cst.BaseExpression] = []
    ahead = [test]
    while ahead:
        one = ahead.pop(0)
        if isinstance(one, cst.BooleanOperation) and isinstance(one.operator, cst.And):
            ahead = [one.left, one.right, *ahead]
        else:
            parts.append(one)
    common = [script.code(one) for one in parts if not asks_for_rank(script, one)]
    own = [script.code(one) for one in parts if asks_for_rank(script, one)]
    return " and ".join(common), " and ".join(own)
