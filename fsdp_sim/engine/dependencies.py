"""What every operation has to wait for, whatever the times are: read off the program alone.

Each tail (of a lane, of a communicator, of the CPU) has a frontier: the last operation of each lane that it comes
after; earlier ones of that lane are implied. `Before` keeps the sources apart, so that it can be said why.
"""

from __future__ import annotations

from typing import NamedTuple

from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Lane, lane_of

Frontier = dict[str, int]  # lane (or, of asynchronous collectives, their communicator) -> its last operation


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


def dependencies(program: Program, on_cpu: bool) -> tuple[list[Before], dict[int, tuple[int, ...]]]:
    """What comes before each operation of a program, by one pass in issue order.

    Returns:
        one entry per operation; and for each instruction at which the CPU waits the operations it waits for.
    """
    own: dict[Lane, int] = {}
    frontiers: dict[Lane, Frontier] = {lane: {} for lane in Lane}
    recorded: dict[int, Frontier] = {}
    last_of: dict[str, int] = {}
    cpu: Frontier = {}
    found: list[Before] = []
    blocks: dict[int, tuple[int, ...]] = {}
    k = 0
    for number, i in enumerate(program.instructions):
        kind = i.kind
        if kind is Kind.OP:
            lane = i.lane
            assert lane is not None
            name, frontier = i.communicator, frontiers[lane]
            previous = own.get(lane, -1)
            events = tuple([op for op in frontier.values() if op != previous])
            found.append(Before(previous, last_of.get(name, -1) if name else -1, events, tuple(cpu.values())))
            if name:
                last_of[name] = k
            elif on_cpu:
                cpu = {lane: k}
            if i.async_op:
                recorded[i.event] = {f"async {name}": k}
            else:
                own[lane], frontiers[lane] = k, {lane: k}
            k += 1
        elif kind is Kind.RECORD:
            recorded[i.event] = frontiers[i.lane]  # type: ignore[index]
        elif kind is Kind.WAIT or kind is Kind.WAIT_STREAM:
            assert i.lane is not None
            until = recorded[i.event] if kind is Kind.WAIT else frontiers[i.other]  # type: ignore[index]
            frontiers[i.lane] = _merge(frontiers[i.lane], until)
            if on_cpu and i.lane is Lane.COMPUTE:
                cpu = _merge(cpu, until)
                blocks[number] = tuple(frontiers[i.lane].values())
        elif kind is Kind.CPU_SYNC or kind is Kind.CPU_BLOCK:
            if i.event:
                until = recorded[i.event]
            elif i.lane is not None:
                until = frontiers[i.lane]
            else:
                until = {f"async {name}": op for name, op in last_of.items()}
                for frontier in frontiers.values():
                    until = _merge(until, frontier)
            cpu = _merge(cpu, until)
            blocks[number] = tuple(until.values())
    return found, blocks


def waits_on(program: Program, on_cpu: bool) -> list[tuple[int, ...]]:
    """For each operation those that it comes after, by their number in issue order.

    That it follows its own lane's last operation goes without saying, except for asynchronous collectives; of each
    other lane only the last counts.
    """
    queues = [f"async {i.communicator}" if i.async_op else str(i.lane) for i in program.ops]
    found = []
    for queue, before in zip(queues, dependencies(program, on_cpu)[0], strict=True):
        last: dict[str, int] = {}
        for op in (before.stream, before.communicator, *before.events, *before.cpu):
            if op >= 0 and (queues[op] != queue or queue.startswith("async")):
                last[queues[op]] = max(op, last.get(queues[op], -1))
        found.append(tuple(sorted(last.values())))
    return found


def shown_lane(i: Instruction) -> Lane:
    """The lane a timeline shows an operation on. An asynchronous collective runs on a stream of its process group,
    which has no name: it is shown on the lane of its kind.
    """
    assert i.lane is not None, f"{i.kind} {i.what} has no stream"
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
