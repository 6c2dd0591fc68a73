"""The pass in which every rank has a column: times are arrays of shape (ranks,).

Streams and communicators are FIFO and nothing contends for anything else, so an operation starts at the latest of a
few earlier times and ends a duration later: a recurrence in (max, +) that one pass in issue order solves (Baccelli,
Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992).

A time that is the same on every rank stays a plain number, and arrays are never written to, so they are shared: the
end of an all-gather over all ranks is one float, whatever the ranks are.
"""

from __future__ import annotations

import numpy as np

from fsdp_sim.engine.groups import over_group
from fsdp_sim.engine.run import OpTimes
from fsdp_sim.engine.seconds import OpCosts, Seconds
from fsdp_sim.schedule import Kind, Program
from fsdp_sim.timeline import Lane


def many_ranks(program: Program, costs: OpCosts, on_cpu: bool) -> OpTimes:
    """When each operation is issued, starts and ends on each rank, by one pass in issue order."""
    issue_s: list[Seconds] = []
    clock_s: list[Seconds] = []
    start_s: list[Seconds] = []
    end_s: list[Seconds] = []
    blocks: dict[int, tuple[Seconds, Seconds]] = {}
    late: dict[int, Seconds] = {}
    cpu: Seconds = 0.0
    tails: dict[Lane, Seconds] = dict.fromkeys(Lane, 0.0)
    free: dict[str, Seconds] = {}
    recorded: dict[int, Seconds] = {}
    k = 0
    for number, i in enumerate(program.instructions):
        if i.kind is Kind.OP:
            assert i.lane is not None
            duration, cost = costs.seconds[k], costs.issue_s[k]
            issued = cpu + (cost if i.communicator else earlier(cost, costs.launch_s))
            cpu = cpu + cost
            start = later(issued, tails[i.lane])
            if i.communicator:
                start = later(start, free.get(i.communicator, 0.0))
                start = over_group(start, i, program.world_size, costs.ranks)
                duration = over_group(duration, i, program.world_size, costs.ranks)
            end = start + duration
            if not i.communicator and np.any(cost > costs.launch_s):
                last = np.where(
                    cost > costs.launch_s, cpu + duration * costs.launch_s / later(cost, costs.launch_s), 0.0
                )
                if np.any(last > end):
                    late[k] = np.where(last > end, cpu, np.nan)
                    end = np.maximum(last, end)
            if i.communicator:
                free[i.communicator] = end
            elif on_cpu:
                cpu = end
            if i.async_op:
                recorded[i.event] = end
            else:
                tails[i.lane] = end
            issue_s.append(issued)
            clock_s.append(cpu)
            start_s.append(start)
            end_s.append(end)
            k += 1
        elif i.kind is Kind.WAIT or i.kind is Kind.WAIT_STREAM:
            assert i.lane is not None
            until = recorded[i.event] if i.kind is Kind.WAIT else tails[i.other]  # type: ignore[index]
            tails[i.lane] = later(tails[i.lane], until)
            if on_cpu and i.lane is Lane.COMPUTE:
                until = tails[i.lane]
                if np.any(until > cpu):
                    blocks[number] = (cpu, later(cpu, until))
                    cpu = later(cpu, until)
        elif i.kind is Kind.RECORD:
            recorded[i.event] = tails[i.lane]  # type: ignore[index]
        elif i.kind is Kind.CPU_SYNC or i.kind is Kind.CPU_BLOCK:
            if i.event:
                until = recorded[i.event]
            elif i.lane is not None:
                until = tails[i.lane]
            else:
                until = 0.0
                for tail in (*tails.values(), *free.values()):
                    until = later(until, tail)
            if np.any(until > cpu):
                blocks[number] = (cpu, later(cpu, until))
                cpu = later(cpu, until)
    return OpTimes(issue_s, clock_s, start_s, end_s, blocks, late)


def later(one: Seconds, other: Seconds) -> Seconds:
    """The later of two times on each rank; a number if both are."""
    if type(one) is float and type(other) is float:
        return one if one >= other else other
    return np.maximum(one, other)


def earlier(one: Seconds, other: Seconds) -> Seconds:
    if type(one) is float and type(other) is float:
        return one if one <= other else other
    return np.minimum(one, other)
