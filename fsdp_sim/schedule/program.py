"""`Program`: a training step as the list of what the CPU issues, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.schedule.lines import lines
from fsdp_sim.schedule.shards import unit_shards
from fsdp_sim.schedule.states import state_bytes
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import FIELDS, Columns, Header, Lane, Memory, Op, Phase, Timeline, UnitShards

_T = TypeVar("_T")
_OP = Kind.OP  # Python 3.11 is slow to look it up


@dataclass(frozen=True)
class Program:
    """Instructions in CPU-issue order, and what they were built from.

    What follows from them is worked out when it is first asked for, and kept: see `once`.

    Attributes:
        units: each once.
        runs: the units in the order in which they run, where some run several times; else empty.
    """

    units: tuple[Unit, ...]
    plan: Plan
    world_size: int
    instructions: tuple[Instruction, ...]
    runs: tuple[Unit, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", {})

    def once(self, what: object, work_out: Callable[[], _T]) -> _T:
        """What follows from this program and nothing else, under the name ``what``; worked out the first time."""
        known: dict[object, _T] = self.__dict__["_known"]
        if what not in known:
            known[what] = work_out()
        return known[what]

    def for_plan(self, plan: Plan) -> Program:
        """The same program under another plan that issues the same. They share what is worked out of either."""
        other = object.__new__(Program)
        other.__dict__.update(self.__dict__, plan=plan)
        return other

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def ops(self) -> tuple[Instruction, ...]:
        """The instructions that take time."""
        return self.once("ops", lambda: tuple([i for i in self.instructions if i.kind is _OP]))

    @property
    def ops_of_steps(self) -> list[list[int]]:
        """For each step its operations, by their place among all operations."""

        def found() -> list[list[int]]:
            steps: list[list[int]] = [[] for _ in range(max([i.step for i in self.ops], default=0) + 1)]
            for k, i in enumerate(self.ops):
                steps[i.step].append(k)
            return steps

        return self.once("ops of steps", found)

    @property
    def numbers(self) -> list[int]:
        """Of each operation its number among the instructions."""
        return self.once("numbers", lambda: [n for n, i in enumerate(self.instructions) if i.kind is _OP])

    def segments_of(self, op: Op) -> dict[str, None]:
        """The segments of which there is an operation of a kind, in order: FWD, BWD, RECOMPUTE or a copy of ACT_D2H."""
        return self.once(("segments", op), lambda: dict.fromkeys([i.unit for i in self.ops if i.op is op]))

    @property
    def state_bytes(self) -> dict[tuple[Memory, str], int]:
        """Bytes of parameters and of optimizer states on a rank, by category and unit: they live through all steps."""
        return self.once("state_bytes", partial(state_bytes, self.units, self.plan, self.world_size))

    @property
    def unit_shards(self) -> tuple[UnitShards, ...]:
        """How the parameters of each unit or bucket are cut."""
        return self.once("unit_shards", partial(unit_shards, self.units, self.plan, self.world_size))

    @property
    def header(self) -> Header:
        """What its timeline says of itself."""
        return Header(
            producer="schedule", clock="issue order", world_size=self.world_size, api=self.plan.api,
            units=self.unit_shards,
        )  # fmt: skip

    @property
    def timeline(self) -> Timeline:
        """What a rank issues and what is alive on it, as events in order of issue; a program knows no seconds."""
        states = [
            Instruction(Kind.ALLOC, 0, 0, Phase.NONE, Lane.COMPUTE, Op.ALLOC, unit, n_bytes, category=category)
            for (category, unit), n_bytes in self.state_bytes.items()
        ]
        issued = [*states, *(i for i in self.instructions if i.kind in (Kind.OP, Kind.ALLOC, Kind.FREE))]
        columns: dict[str, Sequence[Any]] = {"seq": range(len(issued)), "rank": [0] * len(issued)}
        columns |= {name: [getattr(i, name) for i in issued] for name in Instruction._fields if name in FIELDS}
        return Timeline(lambda: self.header, Columns(len(issued), columns))

    def lines(self, *, every_op: bool = False) -> list[str]:
        """The program in the line format of the recordings of torch, so that the two can be diffed.

        Args:
            every_op: also the operations that torch's recorded format leaves out: ``accumulate``, ``h2d``, ``d2h``
                and ``rs_copy``.
        """
        return lines(self.instructions, self.plan, every_op)
