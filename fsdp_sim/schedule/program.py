"""`Program`: a training step as the list of what the CPU issues, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter, ne
from typing import Any, NamedTuple, TypeVar

from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.schedule.lines import lines
from fsdp_sim.schedule.shards import unit_shards
from fsdp_sim.schedule.states import state_bytes
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import FIELDS, Columns, Header, Lane, Memory, Op, Phase, Timeline, UnitShards

_T = TypeVar("_T")
_OP = Kind.OP  # Python 3.11 is slow to look it up
OF_SIZE = ("bytes", "group_size", "stride", "detail")
"""What the same instruction for another number of ranks may have other values of; its detail names a factor."""
Sizes = tuple[int, int, int, str]
sizes_of = itemgetter(*map(Instruction._fields.index, OF_SIZE))
but_sizes = itemgetter(*[place for place, name in enumerate(Instruction._fields) if name not in OF_SIZE])


class Resized(NamedTuple):
    """How the sizes of a program differ from those of another one, if nothing else does.

    Attributes:
        shape: the other one.
        keys: of each instruction which of ``sizes`` it has; -1 for one that has none.
        sizes: see `OF_SIZE`.
    """

    shape: Program
    keys: Sequence[int]
    sizes: Sequence[Sizes]


@dataclass(frozen=True)
class Program:
    """Instructions in CPU-issue order, and what they were built from.

    What follows from them is worked out when it is first asked for, and kept: see `once`. Programs that differ in sizes
    alone share what follows from all else (`once_for_all`); of all but one the instructions are built when somebody
    asks for them.

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
        self.__dict__["_known"] = self.__dict__["_known_for_all"] = {}

    def once(self, what: object, work_out: Callable[[], _T]) -> _T:
        """What follows from this program and nothing else, under the name ``what``; worked out the first time."""
        known: dict[object, _T] = self.__dict__["_known"]
        if what not in known:
            known[what] = work_out()
        return known[what]

    def once_for_all(self, what: object, work_out: Callable[[Program], _T]) -> _T:
        """What follows from a program whatever its sizes are, worked out for `shape` the first time."""
        known: dict[object, _T] = self.__dict__["_known_for_all"]
        if what not in known:
            known[what] = work_out(self.shape)
        return known[what]

    def for_plan(self, plan: Plan) -> Program:
        """The same program under another plan that issues the same. They share what is worked out of either."""
        other = object.__new__(Program)
        other.__dict__.update(self.__dict__, plan=plan)
        return other

    def with_sizes(
        self, plan: Plan, world_size: int, resized: Resized, build: Callable[[], tuple[Instruction, ...]]
    ) -> Program:
        """A program that differs from this one in sizes alone, under a plan that issues the same; ``build`` says its
        instructions.
        """
        other = self.for_plan(plan)
        other.__dict__.update(world_size=world_size, _resized=resized, _build=build, _known={})
        del other.__dict__["instructions"]
        return other

    def __getattr__(self, name: str) -> Any:
        """The instructions, where they are not there yet."""
        if name != "instructions" or "_build" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.once("instructions", self.__dict__["_build"])

    @property
    def resized(self) -> Resized | None:
        """How its sizes follow from those of another program; None of one that was built first."""
        return self.__dict__.get("_resized")

    @property
    def shape(self) -> Program:
        """The program whose instructions are there, and differ from those of this one in sizes at most."""
        return self if self.resized is None else self.resized.shape.for_plan(self.plan)

    def instruction(self, number: int) -> Instruction:
        """One of the instructions, without building all of them."""
        if self.resized is None:
            return self.instructions[number]
        shape, keys, sizes = self.resized
        own: dict[str, Any] = {} if keys[number] < 0 else dict(zip(OF_SIZE, sizes[keys[number]], strict=True))
        return shape.instructions[number]._replace(**own)

    def issues_as(self, other: Program) -> bool:
        """Whether the instructions are equal."""
        if len(self) != len(other):
            return False
        if self.resized and other.resized:
            if any(map(ne, map(but_sizes, self.shape), map(but_sizes, other.shape))):
                return False
            if self.resized.sizes == other.resized.sizes and self.shape.instructions == other.shape.instructions:
                return True
        return self.instructions == other.instructions

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions if self.resized is None else self.resized.shape.instructions)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def ops(self) -> tuple[Instruction, ...]:
        """The instructions that take time."""
        return self.once("ops", lambda: tuple([i for i in self.instructions if i.kind is _OP]))

    @property
    def ops_of_steps(self) -> list[list[int]]:
        """For each step its operations, by their place among all operations."""

        def found(self: Program) -> list[list[int]]:
            steps: list[list[int]] = [[] for _ in range(max([i.step for i in self.ops], default=0) + 1)]
            for k, i in enumerate(self.ops):
                steps[i.step].append(k)
            return steps

        return self.once_for_all("ops of steps", found)

    @property
    def numbers(self) -> list[int]:
        """Of each operation its number among the instructions."""
        return self.once_for_all("numbers", lambda self: [n for n, i in enumerate(self) if i.kind is _OP])

    def segments_of(self, op: Op) -> dict[str, None]:
        """The segments of which there is an operation of a kind, in order: FWD, BWD, RECOMPUTE or a copy of ACT_D2H."""
        return self.once_for_all(("segments", op), lambda self: dict.fromkeys([i.unit for i in self.ops if i.op is op]))

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
