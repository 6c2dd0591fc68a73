"""The pass in which every rank has a column: times are arrays of shape (ranks,).

Streams and communicators are FIFO and nothing contends for anything else, so an operation starts at the latest of a
few earlier times and ends a duration later: a recurrence in (max, +) that one pass in issue order solves (Baccelli,
Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992).

A time that is the same on every rank stays a plain number, and arrays are never written to, so they are shared: the
end of an all-gather over all ranks is one float, whatever the ranks are.
"""

from __future__ import annotations

import numpy as np

from fsdp_sim.engine.dependencies import dependencies
from fsdp_sim.engine.groups import over_group
from fsdp_sim.engine.run import OpTimes
from fsdp_sim.engine.seconds import OpCosts, Seconds, later
from fsdp_sim.schedule import Program


def many_ranks(program: Program, costs: OpCosts, on_cpu: bool) -> OpTimes:
    """When each operation is issued, starts and ends on each rank, by one pass in issue order."""
    order, world_size = dependencies(program, on_cpu), program.world_size
    issue_s: list[Seconds] = []
    clock_s: list[Seconds] = []
    start_s: list[Seconds] = []
    end_s: list[Seconds] = []
    blocks: dict[int, tuple[Seconds, Seconds]] = {}
    late: dict[int, Seconds] = {}
    cpu: Seconds = 0.0

    def stand_still(cpu: Seconds, k: int) -> Seconds:
        """What makes the CPUs wait before they issue an operation."""
        for stop in order.stops_at.get(k, ()):
            until = cpu
            for before in stop.on:
                until = later(until, end_s[before])
            if np.any(until > cpu):
                blocks[stop.number] = (cpu, until)
                cpu = until
        return cpu

    for k, i in enumerate(program.ops):
        cpu = stand_still(cpu, k)
        duration, cost = costs.seconds[k], costs.issue_s[k]
        start = cpu + (cost if i.communicator else earlier(cost, costs.launch_s))
        issue_s.append(start)
        cpu = cpu + cost
        for before in order.after[k]:
            start = later(start, end_s[before])
        if i.communicator:
            start = over_group(start, i, world_size, costs.ranks)
            duration = over_group(duration, i, world_size, costs.ranks)
        end = start + duration
        if not i.communicator and np.any(cost > costs.launch_s):
            last = cpu + duration * costs.launch_s / later(cost, costs.launch_s)
            goes_on = (cost > costs.launch_s) & (last > end)
            if np.any(goes_on):
                late[k] = either(goes_on, cpu, np.nan)
                end = either(goes_on, last, end)
        if on_cpu and not i.communicator:
            cpu = end
        clock_s.append(cpu)
        start_s.append(start)
        end_s.append(end)
    stand_still(cpu, len(end_s))
    return OpTimes(issue_s, clock_s, start_s, end_s, blocks, late)


def either(which: bool | np.bool_ | np.ndarray, one: Seconds, other: Seconds) -> Seconds:
    """One of two times on each rank; a number if it is one for all."""
    found = np.where(which, one, other)
    return found if found.ndim else float(found)


def earlier(one: Seconds, other: Seconds) -> Seconds:
    if type(one) is float and type(other) is float:
        return one if one <= other else other
    return np.minimum(one, other)
