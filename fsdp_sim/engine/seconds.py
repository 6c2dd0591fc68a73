"""What each operation of a program costs: the seconds it runs, and the seconds the CPU takes to issue it.

A replay asks once and for all, before it starts: one entry per operation, in issue order. An entry is a number, the
same on every rank, or an array of shape (ranks,). Everything wrong with what was given is found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul
from typing import TYPE_CHECKING, Any, TypeAlias

from fsdp_sim.engine.kinds import Alike, OpKinds, kinds_of, kinds_of_each
from fsdp_sim.schedule import Instruction, Program
from fsdp_sim.timeline import COLLECTIVES, Lane, Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Times: TypeAlias = "NDArray[np.float64]"  # (ranks,)
Seconds: TypeAlias = "float | Times"
Given: TypeAlias = "Mapping[tuple[Op, str], ArrayLike] | Callable[[Instruction], ArrayLike]"
"""Seconds by (operation, unit), or a function of the instruction. The unit of FWD, BWD and RECOMPUTE is the segment;
that of OPTIM is ``""``. Each is asked for once for each kind of operation (see `OpKinds`); a function that has an
attribute ``per_occurrence`` that is true, for every operation anew."""


def later(one: Seconds, other: Seconds) -> Seconds:
    """The later of two times on each rank; a number if both are."""
    if type(one) is float and type(other) is float:
        return one if one >= other else other
    import numpy as np  # which one rank does without

    return np.maximum(one, other)


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
        program: whose.
        seconds: how long each runs.
        issue_of: how long the CPU issues one of each kind.
        launch_s: how long the CPU issues one kernel. What takes longer to issue is several kernels.
        ranks: how many columns an array has.
        per_rank: whether any cost is an array.
        kinds: operations of one kind cost the same.
    """

    program: Program = field(repr=False)
    seconds: Sequence[Seconds]
    issue_of: tuple[Seconds, ...]
    launch_s: float
    ranks: int
    per_rank: bool
    kinds: OpKinds = field(repr=False)

    @property
    def ops(self) -> tuple[Instruction, ...]:
        """The operations."""
        return self.program.ops

    @cached_property
    def issue_s(self) -> list[Seconds]:
        """How long the CPU issues each."""
        return self.kinds.spread(self.issue_of)

    def scaled(self, compute: float, network: float, cpu: float) -> OpCosts:
        """The same costs where compute, the collectives, or issuing and what the CPU computes itself take that many
        times as long: 1 / 1.1 is a part 10% faster. Copies between the two memories take as long as before.
        """

        def factor(i: Instruction) -> float:
            if i.op in COLLECTIVES:
                return network
            if i.lane is Lane.CPU:
                return cpu
            return 1.0 if i.op in (Op.H2D, Op.D2H, Op.ACT_D2H, Op.ACT_H2D) else compute

        of_kinds = list(map(factor, self.kinds.first))
        return replace(
            self,
            seconds=list(map(mul, self.seconds, self.kinds.spread(of_kinds))),
            issue_of=tuple([s * cpu for s in self.issue_of]) if cpu != 1.0 else self.issue_of,
            launch_s=self.launch_s * cpu,
        )


def costs_of(
    program: Program,
    durations: Given,
    ranks: int | None,
    issue_s: float | Given,
    launch_s: float,
    copies_s: float | None,
    alike: Alike,
) -> OpCosts:
    """Ask for, and check, the cost of every operation.

    Raises:
        KeyError: a mapping lacks an operation; names operation and unit.
        ValueError: a number is negative, not finite, or not one per rank; ``ranks`` is wrong.
    """
    if not (isinstance(launch_s, int | float) and launch_s > 0):
        raise ValueError(f"launch_s is {launch_s!r}; it must be a number of seconds > 0")
    anew = any(getattr(given, "per_occurrence", False) for given in (durations, issue_s))
    kinds = kinds_of_each(program) if anew else kinds_of(program, alike)
    seconds, arrays = _ask(kinds, durations, "duration", copies_s)
    issue: Sequence[Seconds]
    if isinstance(issue_s, int | float):
        if not 0 <= issue_s < math.inf:
            raise ValueError(f"issue_s is {issue_s!r}; it must be a number of seconds >= 0")
        issue = [float(issue_s)] * len(kinds.first)
    else:
        issue, more = _ask(kinds, issue_s, "issue time", None)
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
    return OpCosts(program, kinds.spread(seconds), tuple(issue), float(launch_s), ranks, bool(arrays), kinds)


Arrays = list[tuple[Instruction, Times]]


def _ask(kinds: OpKinds, given: Given, what: str, copies_s: float | None) -> tuple[list[Seconds], Arrays]:
    """One entry per kind of operation, and those that are arrays."""
    values: list[Any]
    if callable(given):
        values = [given(i) for i in kinds.first]
    else:
        values = [_named(kinds, given, i, what, copies_s) for i in kinds.first]
    arrays: Arrays = []
    for number, value in enumerate(values):
        if type(value) is not float or not 0.0 <= value < math.inf:
            checked = values[number] = _checked(value, kinds.first[number], what)
            if not isinstance(checked, float):
                arrays.append((kinds.first[number], checked))
    return values, arrays


def _named(
    kinds: OpKinds, given: Mapping[tuple[Op, str], ArrayLike], i: Instruction, what: str, copies_s: float | None
) -> ArrayLike:
    if copies_s is not None and i.op in COPIES and (i.op, i.unit) not in given:
        return copies_s
    try:
        return given[i.op, i.unit]
    except KeyError:
        pairs = len({(i.op, i.unit) for i in kinds.first})
        raise KeyError(
            f"{what}s have no entry for {i.op} of unit {i.unit!r}; the program needs one for each of its "
            f"{pairs} (operation, unit) pairs (copies_s=0.0 makes the copies free)"
        ) from None


def _checked(value: ArrayLike, i: Instruction, what: str) -> Seconds:
    number = value
    if not isinstance(value, int | float):
        import numpy as np

        array = np.asarray(value, dtype=float)
        if array.ndim == 1 and len(array) and array.min() >= 0 and array.max() < math.inf:  # not so if one is no number
            return array
        number = float(array) if array.ndim == 0 else math.nan
    if isinstance(number, int | float) and 0 <= number < math.inf:
        return float(number)
    raise ValueError(
        f"the {what} of {i.op} of unit {i.unit!r} is {value!s}; it must be a number of seconds >= 0, or one per rank"
    )
