"""The pass in which one rank stands for all: times are plain numbers.

The recurrence is the one of `fsdp_sim.engine.many_ranks`; here it is written for speed, with no call in the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fsdp_sim.engine.dependencies import dependencies
from fsdp_sim.engine.run import OpTimes
from fsdp_sim.engine.seconds import OpCosts
from fsdp_sim.schedule import Program


def one_rank(program: Program, costs: OpCosts, on_cpu: bool) -> OpTimes:
    """When each operation is issued, starts and ends, by one pass in issue order."""
    order = dependencies(program, on_cpu)
    seconds, issue_s = cast(Sequence[float], costs.seconds), cast(Sequence[float], costs.issue_s)
    launch_s, is_collective, stops_at = costs.launch_s, order.is_collective, order.stops_at
    cpu = 0.0
    issued: list[float] = []
    clocks: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    blocks: dict[int, tuple[float, float]] = {}
    late: dict[int, float] = {}

    def stand_still(cpu: float, k: int) -> float:
        """What makes the CPU wait before it issues an operation."""
        for stop in stops_at[k]:
            until = max([ends[before] for before in stop.on], default=0.0)
            if until > cpu:
                blocks[stop.number] = (cpu, until)
                cpu = until
        return cpu

    for k, after in enumerate(order.after):
        if k in stops_at:
            cpu = stand_still(cpu, k)
        cost, alone = issue_s[k], is_collective[k]
        several = cost > launch_s and not alone
        start = cpu + (launch_s if several else cost)
        issued.append(start)
        cpu += cost
        for before in after:
            if ends[before] > start:
                start = ends[before]
        end = start + seconds[k]
        if several:
            last = cpu + seconds[k] * launch_s / cost
            if last > end:
                end, late[k] = last, cpu
        starts.append(start)
        ends.append(end)
        if on_cpu and not alone:
            cpu = end
        clocks.append(cpu)
    if len(ends) in stops_at:
        stand_still(cpu, len(ends))
    return OpTimes(issued, clocks, starts, ends, blocks, late)
