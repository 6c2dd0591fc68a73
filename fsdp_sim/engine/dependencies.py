"""What every operation has to wait for, whatever the times are: read off the program alone.

Each tail (of a lane, of a communicator, of the CPU) has a frontier: the last operation of each lane that it comes
after; earlier ones of that lane are implied. `Before` keeps the sources apart, so that it can be said why.

Every pass over a program (`one_rank`, `many_ranks`, `contended_rank`) reads its waits, records and streams here, where
they are followed once for all runs of it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property, partial
from typing import NamedTuple

from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Lane, lane_of

Frontier = dict[str | None, int]  # lane (or, of asynchronous collectives, their communicator) -> its last operation
_OP, _WAIT, _WAIT_STREAM, _RECORD, _HOOK = Kind.OP, Kind.WAIT, Kind.WAIT_STREAM, Kind.RECORD, Kind.HOOK
_new = tuple.__new__  # of a NamedTuple, at half the time
_ABOUT_MEMORY = frozenset({Kind.ALLOC, Kind.FREE, Kind.RECORD_STREAM})


class Before(NamedTuple):
    """The operations one operation comes after, by their number in issue order.

    Attributes:
        stream: the last one on its own lane, or -1.
        communicator: the last collective of its communicator, or -1.
        events: those that its lane has been told to wait for, beyond its own.
        cpu: those that the CPU had waited for when it issued this one.
    """

    stream: int
    communicator: int
    events: tuple[int, ...]
    cpu: tuple[int, ...]


class Stop(NamedTuple):
    """An instruction at which the CPU waits.

    Attributes:
        number: of the instruction.
        issued: how many operations the CPU has issued before.
        on: the operations it waits for.
    """

    number: int
    issued: int
    on: Collection[int]


class AboutMemory(NamedTuple):
    """An alloc, a free or a record_stream.

    Attributes:
        number: of the instruction.
        issued: how many operations the CPU has issued before.
        stops: the instructions at which it has waited since the last of these.
        after: the operations that its stream comes after.
    """

    number: int
    issued: int
    stops: tuple[int, ...]
    after: tuple[int, ...]


class Dependencies:
    """What comes before each operation of a program, by one pass in issue order.

    Attributes:
        ops: the operations, of any sizes (`Program.shape`); their number is their place here.
        before: of each operation what it comes after, by why.
        stops: where the CPU waits.

    Raises:
        ValueError: the program waits for an event that nothing has recorded.
    """

    def __init__(self, program: Program, on_cpu: bool) -> None:
        self.ops: tuple[Instruction, ...] = program.ops
        self.before: list[Before] = []
        self.stops: list[Stop] = []
        self._about_memory: list[tuple[int, int, tuple[int, ...], Frontier]] = []
        try:
            self._follow(program, on_cpu)
        except KeyError as error:
            raise ValueError(f"the program waits for event {error}, which nothing has recorded before") from error

    def _follow(self, program: Program, on_cpu: bool) -> None:
        before, about_memory = self.before.append, self._about_memory.append
        own: dict[Lane | None, int] = {}
        frontiers: dict[Lane | None, Frontier] = {lane: {} for lane in Lane}
        recorded: dict[int, Frontier] = {}
        last_of: dict[str, int] = {}
        cpu: Frontier = {}
        stops_since: tuple[int, ...] = ()
        k = 0
        for number, i in enumerate(program.instructions):
            kind, lane = i.kind, i.lane
            if kind is _OP:
                name, frontier, previous = i.communicator, frontiers[lane], own.get(lane, -1)
                events = tuple([op for op in frontier.values() if op != previous])
                before(_new(Before, (previous, last_of.get(name, -1) if name else -1, events, tuple(cpu.values()))))
                if name:
                    last_of[name] = k
                elif on_cpu:
                    cpu = {lane: k}
                if i.async_op:
                    recorded[i.event] = {f"async {name}": k}
                else:
                    own[lane], frontiers[lane] = k, {lane: k}
                k += 1
                stops_since = ()
            elif kind in _ABOUT_MEMORY:
                about_memory((number, k, stops_since, frontiers[lane]))
            elif kind is _RECORD:
                recorded[i.event] = frontiers[lane]
            elif kind is _WAIT or kind is _WAIT_STREAM:
                until = recorded[i.event] if kind is _WAIT else frontiers[i.other]
                frontiers[lane] = _merge(frontiers[lane], until)
                if on_cpu and lane is Lane.COMPUTE:
                    cpu = _merge(cpu, until)
                    self.stops.append(Stop(number, k, tuple(frontiers[lane].values())))
                    stops_since += (number,)
            elif kind is not _HOOK:  # the CPU waits
                if i.event:
                    until = recorded[i.event]
                elif lane is not None:
                    until = frontiers[lane]
                else:
                    until = {f"async {name}": op for name, op in last_of.items()}
                    for frontier in frontiers.values():
                        until = _merge(until, frontier)
                cpu = _merge(cpu, until)
                self.stops.append(Stop(number, k, tuple(until.values())))
                stops_since += (number,)

    @cached_property
    def about_memory(self) -> list[AboutMemory]:
        """The instructions that are about memory."""
        return [AboutMemory(number, k, stops, tuple(on.values())) for number, k, stops, on in self._about_memory]

    @cached_property
    def after(self) -> list[tuple[int, ...]]:
        """Of each operation all that it comes after, each once."""
        found = []
        for stream, communicator, events, _ in self.before:
            one = events if stream < 0 else (stream, *events)
            found.append(one if communicator < 0 or communicator in one else (*one, communicator))
        return found

    @cached_property
    def awaited_by(self) -> list[list[int]]:
        """Of each operation those that come after it."""
        found: list[list[int]] = [[] for _ in self.ops]
        for k, after in enumerate(self.after):
            for before in after:
                found[before].append(k)
        return found

    @cached_property
    def waits(self) -> bytes:
        """Of each operation how many others it comes after."""
        return bytes(map(len, self.after))

    @cached_property
    def computes(self) -> list[int]:
        """The operations that are no collectives."""
        return [k for k, i in enumerate(self.ops) if not i.communicator]

    @cached_property
    def is_collective(self) -> list[bool]:
        """Of each operation whether it is a collective, which is one kernel."""
        return [bool(i.communicator) for i in self.ops]

    @cached_property
    def stops_at(self) -> dict[int, list[Stop]]:
        """The stops by the number of operations that the CPU has issued before."""
        found: dict[int, list[Stop]] = {}
        for stop in self.stops:
            found.setdefault(stop.issued, []).append(stop)
        return found


def dependencies(program: Program, on_cpu: bool) -> Dependencies:
    """What comes before each operation of a program.

    Args:
        on_cpu: the thread that issues also computes.

    Raises:
        ValueError: the program waits for an event that nothing has recorded.
    """
    return program.once_for_all(("dependencies", on_cpu), partial(Dependencies, on_cpu=on_cpu))


def waits_on(program: Program, on_cpu: bool) -> list[tuple[int, ...]]:
    """For each operation those that it comes after, by their number in issue order.

    That it follows its own lane's last operation goes without saying, except for asynchronous collectives; of each
    other lane only the last counts.
    """
    queues = [f"async {i.communicator}" if i.async_op else str(i.lane) for i in program.ops]
    found = []
    for queue, before in zip(queues, dependencies(program, on_cpu).before, strict=True):
        last: dict[str, int] = {}
        for op in (before.stream, before.communicator, *before.events, *before.cpu):
            if op >= 0 and (queues[op] != queue or queue.startswith("async")):
                last[queues[op]] = max(op, last.get(queues[op], -1))
        found.append(tuple(sorted(last.values())))
    return found


def shown_lane(i: Instruction, on_cpu: bool) -> Lane:
    """The lane a timeline shows an operation on. An asynchronous collective runs on a stream of its process group,
    which has no name: it is shown on the lane of its kind. On a CPU all that is computed is on the compute lane.
    """
    assert i.lane is not None, f"{i.kind} {i.what} has no stream"
    if on_cpu and i.lane is Lane.CPU:
        return Lane.COMPUTE
    return lane_of(i.op) if i.async_op else i.lane


def _merge(one: Frontier, other: Frontier) -> Frontier:
    """The later of each lane's operations; shares what it is given where it can."""
    if not one:
        return other
    merged = one | other
    for lane, op in one.items():
        if op > merged[lane]:
            merged[lane] = op
    return merged
