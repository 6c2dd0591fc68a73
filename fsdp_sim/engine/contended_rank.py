"""The replay with contention in which one rank stands for all: plain numbers, one loop, no object for an event.

The CPU goes through the program and makes a graph of it: an operation comes after the last one on its stream, the last
one of its communicator, and those its stream was told to wait for. It stops only where the program makes it wait.
Then the clock goes from moment to moment: some operations end, others, for which these were the last to wait for,
start, and those in flight, a handful at most, go on at new rates until the next moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import cast

from fsdp_sim.engine.contention import Contention, Rates
from fsdp_sim.engine.run import OpTimes, at_rank
from fsdp_sim.engine.seconds import OpCosts
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Lane

_OP, _WAIT, _RECORD, _WAIT_STREAM = Kind.OP, Kind.WAIT, Kind.RECORD, Kind.WAIT_STREAM
_SILENT = frozenset({Kind.HOOK, Kind.ALLOC, Kind.FREE, Kind.RECORD_STREAM})
_MANY = 6  # of so many operations that a stream waits for some are implied by others


def contended_rank(program: Program, costs: OpCosts, on_cpu: bool, contention: Contention) -> OpTimes:
    """When each operation is issued, starts and ends, where operations slow each other down."""
    ops, launch_s = costs.ops, costs.launch_s
    seconds, issue_s = cast(Sequence[float], costs.seconds), cast(Sequence[float], costs.issue_s)
    if costs.per_rank:  # arrays of one entry
        seconds, issue_s = [[at_rank(value, 0) for value in given] for given in (costs.seconds, costs.issue_s)]
    rates_of = Rates(contention)
    kind_of = rates_of.kinds(ops).__getitem__
    known: dict[tuple[int, ...], list[float]] = {}  # the rates of operations of these kinds side by side
    count, compute, inf = len(ops), Lane.COMPUTE, math.inf

    # What comes after what. Number ``count``, after the last operation, is the CPU, where it waits.
    tails: dict[Lane | None, tuple[int, ...]] = dict.fromkeys(Lane, ())  # the operations after which a lane goes on
    last: dict[str, int] = {}  # of each communicator
    recorded: dict[int, tuple[int, ...]] = {}
    after: list[list[int]] = [[] for _ in range(count)]  # those that wait for an operation
    missing = [0] * (count + 1)  # how many an operation still waits for

    # What is known of each operation: it has ``left`` seconds to go at full rate, counted from ``since``; at the
    # rate it goes at now it ends at ``until``, but not before ``floor``, as the CPU has not issued all of it before.
    left, since, rate, floor = list(seconds), [0.0] * count, [0.0] * count, [0.0] * count
    until = [inf] * count
    done = bytearray(count)
    issued: list[float] = [inf] * (count + 1)
    clocks, starts = [0.0] * count, [0.0] * count
    blocks: dict[int, tuple[float, float]] = {}
    late: dict[int, float] = {}
    due: list[tuple[float, int]] = []  # a heap of operations that wait for nothing but their issue
    flying: list[int] = []
    now = cpu = 0.0
    has_waited = False  # whether the CPU has
    k = 0
    instructions = enumerate(program.instructions)
    while True:
        waits_for: tuple[int, ...] = ()  # the operations that have to end before the CPU goes on
        stopped_at = -1  # the instruction that says so; on a CPU it may also be an operation
        for number, i in instructions:
            kind = i.kind
            if kind is _OP:
                lane, name, cost = i.lane, i.communicator, issue_s[k]
                comes_after = tails[lane]
                if name:
                    issued[k] = cpu + cost
                    cpu += cost
                    before = last.get(name, -1)
                    if before >= 0 and before not in comes_after:
                        comes_after += (before,)
                    last[name] = k
                elif cost <= launch_s:
                    issued[k] = cpu + cost
                    cpu += cost
                else:
                    issued[k] = cpu + launch_s
                    cpu += cost
                    floor[k] = cpu + seconds[k] * launch_s / cost
                clocks[k] = cpu
                if has_waited:  # then some may be done
                    comes_after = tuple([before for before in comes_after if not done[before]])
                for before in comes_after:
                    after[before].append(k)
                missing[k] = len(comes_after)
                if not comes_after:
                    heappush(due, (issued[k], k))
                if name and i.async_op:
                    recorded[i.event] = (k,)
                else:
                    tails[lane] = (k,)
                k += 1
                if on_cpu and not name:
                    waits_for = (k - 1,)
                    break
            elif kind in _SILENT:
                continue
            elif kind is _WAIT or kind is _WAIT_STREAM:
                comes_after = recorded[i.event] if kind is _WAIT else tails[i.other]
                lane = i.lane
                tail = tails[lane]
                if comes_after != tail:
                    tails[lane] = tail = _latest(ops, tail + comes_after) if len(tail) >= _MANY else tail + comes_after
                if on_cpu and lane is compute:
                    waits_for = tail
                    if waits_for:
                        stopped_at = number
                        break
            elif kind is _RECORD:
                recorded[i.event] = tails[i.lane]
            else:
                if i.event:
                    waits_for = recorded[i.event]
                elif i.lane is not None:
                    waits_for = tails[i.lane]
                else:
                    waits_for = (*last.values(), *(before for tail in tails.values() for before in tail))
                if waits_for:
                    stopped_at = number
                    break
        waits_for = tuple([before for before in waits_for if not done[before]])
        if stopped_at >= 0 and not waits_for:
            continue
        for before in waits_for:
            after[before].append(count)
        missing[count] = len(waits_for)

        waiting = True
        while waiting:
            # what waited for nothing but its issue, and has been issued by now, starts
            while due and due[0][0] <= now:
                _, one = heappop(due)
                starts[one] = now
                flying.append(one)
            # who is in flight has changed: new rates
            if len(flying) == 1:
                rates = _ALONE
            else:
                company = tuple(map(kind_of, flying))
                rates = known.get(company) or known.setdefault(company, rates_of.of([ops[one] for one in flying]))
            soonest, first = inf, -1
            for place, one in enumerate(flying):
                new = rates[place]
                if new != rate[one]:
                    rest = left[one] - (now - since[one]) * rate[one]
                    if rest < 0.0:
                        rest = 0.0
                    left[one], since[one], rate[one] = rest, now, new
                    end = now + rest / new
                    if end < floor[one]:
                        end = floor[one]
                        late[one] = clocks[one]
                    elif one in late:
                        del late[one]
                    until[one] = end
                else:
                    end = until[one]
                if end < soonest:
                    soonest, first = end, one
            # the next moment: the CPU has issued something, or something ends
            if due and due[0][0] < soonest:
                now = due[0][0]
                continue
            if first < 0:
                return OpTimes(issued[:count], clocks, starts, until, blocks, late)
            now = soonest
            while first >= 0:  # what ends now; others start
                done[first] = 1
                flying.remove(first)
                for one in after[first]:
                    waits = missing[one] - 1
                    if waits:
                        missing[one] = waits
                    elif issued[one] <= now:
                        starts[one] = now
                        flying.append(one)
                    elif one < count:
                        heappush(due, (issued[one], one))
                    else:
                        waiting = False
                first = -1
                for one in flying:
                    if until[one] <= now:
                        first = one
                        break
        # the CPU waits no longer; it goes on, at the earliest now
        has_waited = True
        if now > cpu:
            if stopped_at >= 0:
                blocks[stopped_at] = (cpu, now)
            else:
                clocks[k - 1] = now
            cpu = now


_ALONE = [1.0]


def _latest(ops: Sequence[Instruction], some: Iterable[int]) -> tuple[int, ...]:
    """Of operations those that do not come before another one: the last of each stream."""
    return tuple({(ops[k].lane, ops[k].communicator if ops[k].async_op else ""): k for k in sorted(some)}.values())
