"""Operations that run at the same time slow each other down: what does it cost?

A collective's kernels take streaming multiprocessors from a matmul and memory bandwidth from everything else;
computing takes bandwidth from a collective; collectives of several communicators share the network card. So an
operation runs at a rate that changes whenever another one starts or ends, and no single pass in issue order is exact:
`fsdp_sim.engine.contended_rank` (one rank) and `fsdp_sim.engine.machine` (several) move a clock from event to event,
with rates that are constant in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdp_sim.engine.kinds import OpKinds, numbered
from fsdp_sim.schedule import Instruction, Program
from fsdp_sim.timeline import Op

Slowdown = float | Mapping[Op, float] | Callable[[Instruction, Instruction], float]
"""How many times as long an operation takes: for all, by what it is (1 for those not named), or as a function of it and
of the operation that slows it. A function is asked once for each pair of (operation, unit) that meets, or, if it has an
attribute ``per_unit`` that is false, for each pair of (operation, communicator, bytes, group size), which is quicker:
the layers of a model are alike."""
Share = float | Mapping[str, float] | Callable[[Instruction], float]
"""The part of the network card one collective can use: for all, by communicator (0 if not named), or a function."""


@dataclass(frozen=True)
class Contention:
    """How operations that run at the same time on one rank slow each other down.

    Attributes:
        compute_slowdown_by_collective: how many times as long anything else takes while one collective is in flight;
            1.1 is 10% slower. Beside k of them the excess counts k times.
        collective_slowdown_by_compute: how many times as long a collective takes beside anything else; of several
            the worst counts. A collective over ranks goes at the pace of its slowest rank.
        nic_share: the part of the network card that a collective alone keeps busy, 0 to 1. Where the parts of those in
            flight add up to more than 1, each of them takes that many times as long. 0 (the default) shares nothing.

    Raises:
        ValueError: a slowdown below 1, or a share outside 0 to 1.

    Example:
        >>> matmuls_suffer = Contention(compute_slowdown_by_collective={Op.FWD: 1.1, Op.BWD: 1.1}, nic_share=1.0)
        >>> Contention(compute_slowdown_by_collective=0.9)
        Traceback (most recent call last):
        ValueError: Contention.compute_slowdown_by_collective is 0.9; it must be a number >= 1 (1 slows nothing)
    """

    compute_slowdown_by_collective: Slowdown = 1.0
    collective_slowdown_by_compute: Slowdown = 1.0
    nic_share: Share = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_slowdown_by_collective", "collective_slowdown_by_compute"):
            for value in _numbers(getattr(self, name)):
                check_slowdown(value, f"Contention.{name}")
        for value in _numbers(self.nic_share):
            check_share(value, "Contention.nic_share")


def rates_of(program: Program, contention: Contention, kinds: OpKinds) -> Rates:
    """The rates of a program's operations; kept with it where a contention of functions does not ask about units."""

    def made() -> Rates:
        return Rates(contention, program, kinds)

    given = (
        contention.compute_slowdown_by_collective, contention.collective_slowdown_by_compute, contention.nic_share,
    )  # fmt: skip
    if all(isinstance(value, int | float) or not getattr(value, "per_unit", True) for value in given):
        return program.once(("rates", contention, kinds), made)
    return made()


def _numbers(given: object) -> list[object]:
    if callable(given):
        return []
    return list(given.values()) if isinstance(given, Mapping) else [given]


def check_slowdown(value: object, what: str) -> float:
    if isinstance(value, int | float) and value >= 1 and value < float("inf"):
        return float(value)
    raise ValueError(f"{what} is {value!r}; it must be a number >= 1 (1 slows nothing)")


def check_share(value: object, what: str) -> float:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    raise ValueError(f"{what} is {value!r}; it must be a number from 0 to 1 (0 shares nothing)")


WAYS = {Op.H2D: "in", Op.ACT_H2D: "in", Op.D2H: "out", Op.ACT_D2H: "out"}  # each shares one direction of PCIe


class Rates:
    """The rates of the operations that run at the same time on one rank. Copies in one direction of PCIe share it.

    Args:
        kinds: of the program's operations. Those of one kind differ in their units at most.

    Attributes:
        kind_of: of each operation a number. Those with the same one go at the same rate in the same company.
        known: what `of` has found so far.
    """

    def __init__(self, contention: Contention, program: Program, kinds: OpKinds) -> None:
        self.compute_slowdown = contention.compute_slowdown_by_collective
        self.collective_slowdown = contention.collective_slowdown_by_compute
        self.nic_share = contention.nic_share
        fields = ["op", "communicator", "lane"]
        functions = [f for f in (self.compute_slowdown, self.collective_slowdown, self.nic_share) if callable(f)]
        self.per_unit = any(getattr(function, "per_unit", True) for function in functions)
        fields += ["bytes", "group_size"] if any(not getattr(f, "per_unit", True) for f in functions) else []
        if self.per_unit:
            self.kind_of, self._first = numbered(program.ops, *fields, "unit")
        else:
            self.kind_of, self._first = kinds.by(*fields)
        self._is_collective = [bool(i.communicator) for i in self._first]
        self._ways = [WAYS.get(i.op, "") for i in self._first]
        self.known: dict[tuple[int, ...], list[float]] = {}
        self._slowdowns: dict[tuple[int, int], float] = {}
        self._shares: dict[int, float] = {}

    def of(self, running: tuple[int, ...]) -> list[float]:
        """The rate of each of the operations in flight, given as their kinds: 1 for what nothing slows."""
        found = self.known.get(running)
        if found is None:
            found = self.known[running] = self._of(running)
        return found

    def _of(self, running: tuple[int, ...]) -> list[float]:
        is_collective, known, ways = self._is_collective, self._slowdowns, self._ways
        collectives = [kind for kind in running if is_collective[kind]]
        copied = [ways[kind] for kind in running if ways[kind]]
        if len(running) == 1 or not (collectives or len(copied) > 1):
            return [1.0] * len(running)
        others = [kind for kind in running if not is_collective[kind]]
        crowd = sum([self._share(kind) for kind in collectives]) if len(collectives) > 1 else 1.0
        rates = []
        for kind in running:
            slow = 1.0
            if is_collective[kind]:
                for other in others:
                    slow = max(slow, known.get((kind, other)) or self._slowdown(kind, other))
                if crowd > 1.0 and self._share(kind):
                    slow *= crowd
            else:
                for collective in collectives:
                    slow += (known.get((kind, collective)) or self._slowdown(kind, collective)) - 1.0
            rates.append(1.0 / (slow * max(1, copied.count(ways[kind]))))
        return rates

    def _slowdown(self, kind: int, by_kind: int) -> float:
        slowed, by = self._first[kind], self._first[by_kind]
        given = self.collective_slowdown if slowed.communicator else self.compute_slowdown
        value: object = given
        if isinstance(given, Mapping):
            value = given.get(slowed.op, 1.0)
        elif callable(given):
            value = given(slowed, by)
        if not (type(value) is float and 1.0 <= value < float("inf")):  # words take longer than the check
            value = check_slowdown(value, f"the slowdown of {slowed.what} beside {by.what}")
        self._slowdowns[kind, by_kind] = value
        return value

    def _share(self, kind: int) -> float:
        if kind not in self._shares:
            given, collective = self.nic_share, self._first[kind]
            if callable(given):
                value = check_share(given(collective), f"nic_share of {collective.what}")
            else:
                value = given.get(collective.communicator, 0.0) if isinstance(given, Mapping) else given
            self._shares[kind] = float(value)
        return self._shares[kind]
