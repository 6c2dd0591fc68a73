"""The replay with contention in which one rank stands for all: plain numbers, one loop, no object for an event.

The CPU issues until it has to wait. Then the clock goes from moment to moment: some operations end, others, for which
these were the last to wait for, start, and those in flight, a handful at most, go on at new rates until the next
moment. Where that repeats itself, layer after layer, the rest of the layers are played at once: see
`fsdp_sim.engine.repetition`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import cast

from fsdp_sim.engine.contention import Contention, rates_of
from fsdp_sim.engine.dependencies import Dependencies, Stop, dependencies
from fsdp_sim.engine.kinds import marks_in
from fsdp_sim.engine.repetition import Flight, Repetition
from fsdp_sim.engine.run import OpTimes, at_rank
from fsdp_sim.engine.seconds import OpCosts, Seconds
from fsdp_sim.schedule import Program

_ALONE = [1.0]


def contended_rank(program: Program, costs: OpCosts, on_cpu: bool, contention: Contention) -> OpTimes:
    """When each operation is issued, starts and ends, where operations slow each other down."""
    order, launch_s, inf = dependencies(program, on_cpu), costs.launch_s, math.inf
    seconds, issue_of = _numbers(costs.seconds, costs), _numbers(costs.issue_of, costs)
    issuing = program.once_for_all(
        ("issuing", on_cpu, costs.kinds.shape, issue_of, launch_s),
        lambda _: _Issuing(order, costs.kinds.spread(issue_of), launch_s),
    )
    issue_s = issuing.issue_s
    rates = rates_of(program, contention, costs.kinds)
    kind_of, known_rates = rates.kind_of, rates.known
    flight = Flight.before(order, seconds)
    left, since, rate, floor, until = flight.left, flight.since, flight.rate, flight.floor, flight.until
    done, missing, issued, clocks = flight.done, flight.missing, flight.issued, flight.clocks
    starts, late, due, flying = flight.starts, flight.late, flight.due, flight.flying
    repetition = Repetition(order, {} if rates.per_unit else marks_in(program, costs.kinds), flight)
    marks, awaited_by = repetition.marks, order.awaited_by
    blocks: dict[int, tuple[float, float]] = {}
    now = cpu = 0.0
    reached = 0  # so many operations have been issued
    stops = program.once_for_all(("stops of a loop over time", on_cpu), lambda _: _stops(order, on_cpu))
    for stop in stops:
        if stop.issued > reached:  # the CPU issues
            some = slice(reached, stop.issued)
            issued[some], clocks[some] = issuing.issued(reached, stop.issued, cpu)
            cpu = clocks[stop.issued - 1]
            for k in issuing.several(reached, stop.issued):
                floor[k] = clocks[k] + seconds[k] * launch_s / issue_s[k]
            k = missing.find(0, reached, stop.issued)
            while k >= 0:
                heappush(due, (issued[k], k))
                k = missing.find(0, k + 1, stop.issued)
        reached = stop.issued
        on, waits_for, mark = stop.on, _undone(stop, done), -1
        while waits_for:
            # what waited for nothing but its issue, and has been issued by now, starts
            while due and due[0][0] <= now:
                _, one = heappop(due)
                starts[one] = now
                flying.append(one)
            # who is in flight has changed: new rates
            if len(flying) == 1:
                new_rates = _ALONE
            else:
                running = tuple([kind_of[one] for one in flying])
                new_rates = known_rates.get(running) or rates.of(running)
            soonest, first = inf, -1
            for one, new in zip(flying, new_rates):  # noqa: B905
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
            if mark >= 0 and soonest > now:
                then, mark = repetition.move_on(mark, now, reached), -1
                if then > now:
                    now, waits_for = then, _undone(stop, done)
                    continue
            # the next moment: the CPU has issued something, or something ends
            if due and due[0][0] < soonest:
                now = due[0][0]
                continue
            now = soonest
            while first >= 0:  # what ends now; others start
                done[first] = 1
                flying.remove(first)
                if first in on:
                    waits_for -= 1
                if first in marks:
                    mark = first
                for one in awaited_by[first]:
                    missing[one] = waits = missing[one] - 1
                    if not waits and one < reached:
                        if issued[one] <= now:
                            starts[one] = now
                            flying.append(one)
                        else:
                            heappush(due, (issued[one], one))
                first = -1
                for one in flying:
                    if until[one] <= now:
                        first = one
                        break
        # the CPU waits no longer; it goes on, at the earliest now
        if now > cpu and stop is not stops[-1]:
            if stop.number >= 0:
                blocks[stop.number] = (cpu, now)
            else:
                clocks[reached - 1] = now
            cpu = now
    return OpTimes(issued, clocks, starts, until, blocks, late)


def _numbers(given: Sequence[Seconds], costs: OpCosts) -> Sequence[float]:
    """Costs per rank are arrays, here of one entry."""
    return tuple([at_rank(value, 0) for value in given]) if costs.per_rank else cast(Sequence[float], given)


class _Issuing:
    """How the CPU issues the operations of a program.

    Attributes:
        issue_s: how long it issues each.
    """

    def __init__(self, order: Dependencies, issue_s: list[float], launch_s: float) -> None:
        self.issue_s, self._launch_s = issue_s, launch_s
        self._several = [k for k in order.computes if issue_s[k] > launch_s]
        self._at_once = self._issued(0, len(issue_s), 0.0)

    def several(self, first: int, end: int) -> list[int]:
        """The operations of several kernels."""
        return self._several[bisect_left(self._several, first) : bisect_left(self._several, end)]

    def issued(self, first: int, end: int, cpu: float) -> tuple[list[float], list[float]]:
        """When some operations are issued, one after the other, and the CPU's clock after each."""
        if not first and not cpu:
            return self._at_once[0][:end], self._at_once[1][:end]
        return self._issued(first, end, cpu)

    def _issued(self, first: int, end: int, cpu: float) -> tuple[list[float], list[float]]:
        began = list(accumulate(self.issue_s[first:end], initial=cpu))
        issued = began[1:]
        for k in self.several(first, end):
            issued[k - first] = began[k - first] + self._launch_s
        return issued, began[1:]


def _stops(order: Dependencies, on_cpu: bool) -> list[Stop]:
    """Where the CPU waits, on a CPU also for each computation, and at last for everything."""
    n = len(order.ops)
    stops = [stop._replace(on=frozenset(stop.on)) for stop in order.stops]
    if on_cpu:
        stops += [Stop(-1, k + 1, (k,)) for k in order.computes]
    return [*sorted(stops, key=lambda stop: (stop.issued, stop.number)), Stop(-1, n, range(n))]


def _undone(stop: Stop, done: bytearray) -> int:
    """How many operations the CPU still waits for."""
    return done.count(0) if len(stop.on) == len(done) else sum([not done[before] for before in stop.on])
