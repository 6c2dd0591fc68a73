"""The pass in which one rank stands for all: times are plain numbers.

The recurrence is the one of `fsdp_sim.engine.many_ranks`; here it is written for speed, with no call in the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fsdp_sim.engine.run import OpTimes
from fsdp_sim.engine.seconds import OpCosts
from fsdp_sim.schedule import Kind, Program
from fsdp_sim.timeline import Lane

_OP, _WAIT, _RECORD, _WAIT_STREAM = Kind.OP, Kind.WAIT, Kind.RECORD, Kind.WAIT_STREAM
_CPU_WAITS = frozenset({Kind.CPU_SYNC, Kind.CPU_BLOCK})


def one_rank(program: Program, costs: OpCosts, on_cpu: bool) -> OpTimes:
    """When each operation is issued, starts and ends, by one pass in issue order."""
    seconds = cast(Sequence[float], costs.seconds)
    issue_s = cast(Sequence[float], costs.issue_s)
    launch_s = costs.launch_s
    cpu = 0.0
    tails: dict[Lane | None, float] = dict.fromkeys(
        Lane, 0.0
    )  # when all issued on a lane so far is done, waits included
    free: dict[str, float] = {}  # when a communicator is free
    recorded: dict[int, float] = {}
    issued: list[float] = []
    clocks: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    blocks: dict[int, tuple[float, float]] = {}
    late: dict[int, float] = {}
    compute = Lane.COMPUTE
    k = 0
    for number, i in enumerate(program.instructions):
        kind = i.kind
        if kind is _OP:
            lane, name, cost = i.lane, i.communicator, issue_s[k]
            start = cpu + (cost if name or cost <= launch_s else launch_s)
            issued.append(start)
            cpu += cost
            if tails[lane] > start:
                start = tails[lane]
            if name and free.get(name, 0.0) > start:
                start = free[name]
            end = start + seconds[k]
            if cost > launch_s and not name:
                last = cpu + seconds[k] * launch_s / cost
                if last > end:
                    end, late[k] = last, cpu
            starts.append(start)
            ends.append(end)
            if name:
                free[name] = end
            elif on_cpu:
                cpu = end
            clocks.append(cpu)
            if i.async_op:
                recorded[i.event] = end
            else:
                tails[lane] = end
            k += 1
        elif kind is _WAIT or kind is _WAIT_STREAM:
            until = recorded[i.event] if kind is _WAIT else tails[i.other]
            lane = i.lane
            if until > tails[lane]:
                tails[lane] = until
            if on_cpu and lane is compute and tails[lane] > cpu:
                blocks[number] = (cpu, tails[lane])
                cpu = tails[lane]
        elif kind is _RECORD:
            recorded[i.event] = tails[i.lane]
        elif kind in _CPU_WAITS:
            until = (
                recorded[i.event]
                if i.event
                else max(*tails.values(), *free.values())
                if i.lane is None
                else tails[i.lane]
            )
            if until > cpu:
                blocks[number] = (cpu, until)
                cpu = until
    return OpTimes(issued, clocks, starts, ends, blocks, late)
