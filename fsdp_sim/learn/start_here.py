"""The exercise of the first notebook: how many all-gathers does one training step issue?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

CASES = [(layers, keep) for layers in (1, 4, 5, 12) for keep in (None, True, False)]
"""(number of blocks, reshard_after_forward)"""

# What people usually answer, and what they forgot.
USUAL: list[tuple[Callable[[int, bool | None], int], str]] = [
    (
        lambda layers, keep: layers + 1,
        "you counted the forward only; a unit that was freed is gathered again in backward",
    ),
    (
        lambda layers, keep: 2 * (layers + 1),
        "with None the root keeps its parameters after forward, with False every unit does",
    ),
    (
        lambda layers, keep: layers if keep is False else 2 * layers,
        "the root is a unit too: embeddings, last norm and head",
    ),
    (
        lambda layers, keep: layers + 1 if keep is False else 2 * (layers + 1),
        "None is not True: backward begins with the root, so by default the root keeps its parameters",
    ),
]


def all_gathers_per_step(layers: int, reshard_after_forward: bool | None) -> int:
    """Counted in the program that the simulator builds (which equals the one torch issues)."""
    units = [Unit("root", (Param("embed", (4, 4)), Param("head", (4, 4))), ("embed", ..., "head"))]
    units += [Unit(f"layers.{i}", (Param("w", (4, 4)),)) for i in range(layers)]
    program = build(units, Plan(reshard_after_forward=reshard_after_forward), world_size=4)
    return sum(instruction.op is Op.ALL_GATHER for instruction in program.ops)


def judge_all_gathers(answers: Sequence[Any]) -> str:
    """What is wrong with the answers to `CASES`, or nothing."""
    truth = [all_gathers_per_step(*case) for case in CASES]
    if all(answer is None or answer is Ellipsis for answer in answers):
        return "your function returns nothing yet; write the number of all-gathers after `return`."
    for formula, cause in USUAL:
        if list(answers) == [formula(*case) for case in CASES]:
            return f"{cause}."
    for (layers, keep), answer, right in zip(CASES, answers, truth, strict=True):
        if answer != right:
            return f"for {layers} blocks and reshard_after_forward={keep} you say {answer!r}; torch issues {right}."
    return ""
