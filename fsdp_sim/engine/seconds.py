"""What each operation of a program costs: the seconds it runs, and the seconds the CPU takes to issue it.

A replay asks once and for all, before it starts: one entry per operation, in issue order. An entry is a number, the
same on every rank, or an array of shape (ranks,). Everything wrong with what was given is found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import COLLECTIVES, Op

Times = NDArray[np.float64]  # (ranks,)
Seconds = float | Times
Given = Mapping[tuple[Op, str], ArrayLike] | Callable[[Instruction], ArrayLike]
"""Seconds by (operation, unit), or a function of the instruction. The unit of FWD, BWD and RECOMPUTE is the segment;
that of OPTIM is ``""``. A function is asked once for each (operation, unit, bytes, group size), or, if it has an
attribute ``per_occurrence`` that is true, for every operation anew."""

COPIES = frozenset(
    {
        Op.AG_COPY_IN, Op.AG_COPY_OUT, Op.RS_COPY_IN, Op.RS_COPY, Op.AG_CAST, Op.GRAD_CAST, Op.UPCAST, Op.CLONE,
        Op.DIV, Op.ACCUMULATE, Op.NORM, Op.CLIP,
    }
)  # fmt: skip


@dataclass(frozen=True)
class OpCosts:
    """The cost of every operation of a program, in issue order.

    Attributes:
        ops: the operations.
        seconds: how long each runs.
        issue_s: how long the CPU issues each.
        launch_s: how long the CPU issues one kernel. What takes longer to issue is several kernels.
        ranks: how many columns an array has.
        per_rank: whether any cost is an array.
    """

    ops: tuple[Instruction, ...]
    seconds: Sequence[Seconds]
    issue_s: Sequence[Seconds]
    launch_s: float
    ranks: int
    per_rank: bool

    def scaled(self, compute: float, network: float, cpu: float, optimizer: float) -> OpCosts:
        """The same costs where compute (all but the collectives and the optimizer), the collectives, issuing, or the
        optimizer take that many times as long: 1 / 1.1 is a part 10% faster.
        """
        factors = [network if i.op in COLLECTIVES else optimizer if i.op is Op.OPTIM else compute for i in self.ops]
        return replace(
            self,
            seconds=[s * f for s, f in zip(self.seconds, factors, strict=True)],
            issue_s=[s * cpu for s in self.issue_s],
            launch_s=self.launch_s * cpu,
        )


def costs_of(
    program: Program,
    durations: Given,
    ranks: int | None,
    issue_s: float | Given,
    launch_s: float,
    copies_s: float | None,
) -> OpCosts:
    """Ask for, and check, the cost of every operation.

    Raises:
        KeyError: a mapping lacks an operation; names operation and unit.
        ValueError: a number is negative, not finite, or not one per rank; ``ranks`` is wrong.
    """
    if not (isinstance(launch_s, int | float) and launch_s > 0):
        raise ValueError(f"launch_s is {launch_s!r}; it must be a number of seconds > 0")
    ops = tuple([i for i in program.instructions if i.kind is Kind.OP])
    seconds, arrays = _ask(ops, durations, "duration", copies_s)
    issue: list[Seconds]
    if isinstance(issue_s, int | float):
        if not 0 <= issue_s < math.inf:
            raise ValueError(f"issue_s is {issue_s!r}; it must be a number of seconds >= 0")
        issue = [float(issue_s)] * len(ops)
    else:
        issue, more = _ask(ops, issue_s, "issue time", None)
        arrays += more
    columns = max((len(c) for _, c in arrays), default=1)
    if ranks is None:
        ranks = columns
    if type(ranks) is not int or not 1 <= ranks <= program.world_size:
        raise ValueError(f"ranks is {ranks!r}; it must be a whole number from 1 to the world size {program.world_size}")
    for i, value in arrays:
        if value.shape != (ranks,):
            raise ValueError(
                f"the duration of {i.op} of unit {i.unit!r} has shape {value.shape}; it must be one number, or one "
                f"per rank as shape ({ranks},)"
            )
    return OpCosts(ops, seconds, issue, float(launch_s), ranks, bool(arrays))


_WHAT = itemgetter(*map(Instruction._fields.index, ("op", "unit")))
_WHAT_AND_SIZE = itemgetter(*map(Instruction._fields.index, ("op", "unit", "bytes", "group_size")))
Arrays = list[tuple[Instruction, Times]]


def _ask(ops: Sequence[Instruction], given: Given, what: str, copies_s: float | None) -> tuple[list[Seconds], Arrays]:
    """One entry per operation, and those that are arrays. Each distinct operation is asked for once."""
    asked: Mapping[object, Instruction]
    if getattr(given, "per_occurrence", False):
        keys: Sequence[object] = range(len(ops))
        asked = dict(enumerate(ops))
    else:
        keys = list(map(_WHAT_AND_SIZE if callable(given) else _WHAT, ops))
        asked = dict(zip(keys, ops, strict=True))
    known: dict[object, Seconds] = {}
    arrays: Arrays = []
    for key, i in asked.items():
        if callable(given):
            value = given(i)
        elif copies_s is not None and i.op in COPIES and key not in given:
            value = copies_s
        else:
            try:
                value = given[i.op, i.unit]
            except KeyError:
                raise KeyError(
                    f"{what}s have no entry for {i.op} of unit {i.unit!r}; the program needs one for each of its "
                    f"{len(asked)} (operation, unit) pairs (copies_s=0.0 makes the copies free)"
                ) from None
        if type(value) is float and 0.0 <= value < math.inf:
            known[key] = value
        else:
            known[key] = checked = _checked(value, i, what)
            if not isinstance(checked, float):
                arrays.append((i, checked))
    return list(map(known.__getitem__, keys)), arrays


def _checked(value: ArrayLike, i: Instruction, what: str) -> Seconds:
    array = np.asarray(value, dtype=float)
    if array.ndim <= 1 and np.isfinite(array).all() and (array >= 0).all():
        return array if array.ndim else float(array)
    raise ValueError(
        f"the {what} of {i.op} of unit {i.unit!r} is {value!s}; it must be a number of seconds >= 0, or one per rank"
    )
