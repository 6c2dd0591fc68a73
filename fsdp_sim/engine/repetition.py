"""Layers that are alike, played a few times and then all at once.

In a stretch of a program in which the same operations come again and again, one period after the other, a replay soon
repeats itself: what is in flight, and how far, is the same at the end of two periods, one period's operations apart.
From there on every period is like the last, as long as

    the stretch lasts: nothing that comes after it may start, and
    the CPU keeps its distance: where it issues slower than the device works, it will be caught up one day.

Then the times of the operations in between are those of the last period, moved on by its length. The moments at which
something ends and something else starts are moved as one, so that they stay equal to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_sim.engine.dependencies import Dependencies
from fsdp_sim.timeline import Op

LEAST_PERIODS = 6  # of a stretch; a replay takes about three to settle
LARGEST_PERIOD = 32  # computations
TOUCH = 2e-15  # of the time passed: what rounding makes of two equal times
COMPUTES = frozenset({Op.FWD, Op.BWD, Op.RECOMPUTE})


class Stretch(NamedTuple):
    """Operations ``first`` to ``end`` (that one left out), each like the one ``period`` before it.

    Attributes:
        reach: no operation of it comes after one that was issued so many operations before.
        outside: the operations beyond it that come after one of it.
        held: every operation beyond it comes after this one or a later one.
    """

    first: int
    end: int
    period: int
    reach: int
    outside: tuple[int, ...]
    held: int


def stretches(kinds: Sequence[int], order: Dependencies) -> list[Stretch]:
    """The stretches of a program, in order, of at least `LEAST_PERIODS` periods.

    Args:
        kinds: of each operation the number of its kind.
    """
    after = order.after
    numbers: dict[tuple[int, ...], int] = {}
    signs = [  # operations of the same sign are of one kind and come after the same, counted from them
        numbers.setdefault((kind, *[k - before for before in after[k]]), len(numbers)) for k, kind in enumerate(kinds)
    ]
    marks = [k for k, i in enumerate(order.ops) if i.op in COMPUTES]
    found: list[tuple[int, int, int]] = []
    done = 0  # up to here operations are in a stretch
    for place, k in enumerate(marks):
        if k < done:
            continue
        for mark in marks[place + 1 : place + 1 + LARGEST_PERIOD]:
            if signs[mark] != signs[k]:
                continue
            period = mark - k
            first, end = _alike(signs, k, period, done)
            if end - first >= LEAST_PERIODS * period:
                found.append((first, end, period))
                done = end
                break
    return _bounded(found, after)


def _bounded(found: Sequence[tuple[int, int, int]], after: Sequence[Sequence[int]]) -> list[Stretch]:
    """Stretches, given as first, end and period, with what bounds them; there may be thousands in a program."""
    number_of = [-1] * len(after)  # of each operation the number of the stretch that it is in
    for number, (first, end, _) in enumerate(found):
        number_of[first:end] = [number] * (end - first)
    reach = [0] * len(found)
    outside: list[list[int]] = [[] for _ in found]
    held = [len(after)] * (len(after) + 1)  # of each place: before which no operation from there on comes
    for one in reversed(range(len(after))):
        inside, least, last = number_of[one], one, -1
        for before in after[one]:
            if before < least:
                least = before
            if before > last:
                last = before
            number = number_of[before]
            if number not in (inside, -1) and outside[number][-1:] != [one]:
                outside[number].append(one)
        held[one] = last if last < held[one + 1] else held[one + 1]
        if inside >= 0 and one - least > reach[inside]:
            reach[inside] = one - least
    return [
        Stretch(first, end, period, reach[n], tuple(reversed(outside[n])), held[end] if end < len(after) else end)
        for n, (first, end, period) in enumerate(found)
    ]


def marks_of(found: Iterable[Stretch], order: Dependencies) -> dict[int, Stretch]:
    """An operation of each period, with its stretch: the first computation."""
    marks: dict[int, Stretch] = {}
    for one in found:
        period = range(one.first, one.first + one.period)
        mark = next((k for k in period if order.ops[k].op in COMPUTES), one.first)
        marks |= dict.fromkeys(range(mark, one.end, one.period), one)
    return marks


def _alike(signs: Sequence[int], k: int, period: int, least: int) -> tuple[int, int]:
    """The longest stretch around an operation in which each is like the one a period before."""
    first, end = k, k + period
    while end < len(signs) and signs[end] == signs[end - period]:
        end += 1
    while end > k + period and first > least and signs[first - 1] == signs[first - 1 + period]:
        first -= 1
    return first, end


@dataclass(slots=True)
class Flight:
    """What a replay knows of each operation at a moment.

    Attributes:
        left, since, rate: seconds it still took at full rate at the moment ``since``, and the rate it goes at.
        until: when it ends at that rate, but not before ``floor``, as the CPU has not issued all of it before.
        done: whether it has ended.
        missing: how many operations it still waits for.
        issued, clocks: when it is issued, and the CPU's clock afterwards.
        starts: when it started.
        late: see `fsdp_sim.engine.run.OpTimes`.
        due: a heap of those that wait for nothing but their issue: (when, operation).
        flying: those in flight.
    """

    left: list[float]
    since: list[float]
    rate: list[float]
    floor: list[float]
    until: list[float]
    done: bytearray
    missing: bytearray
    issued: list[float]
    clocks: list[float]
    starts: list[float]
    late: dict[int, float]
    due: list[tuple[float, int]]
    flying: list[int]

    @classmethod
    def before(cls, order: Dependencies, seconds: Sequence[float]) -> Flight:
        """Before anything has been issued."""
        n = len(seconds)
        zeros, never = [0.0] * n, [float("inf")] * n
        return cls(
            list(seconds), zeros[:], zeros[:], zeros[:], never[:], bytearray(n), bytearray(order.waits), never,
            zeros[:], zeros, {}, [], [],
        )  # fmt: skip


class _Seen(NamedTuple):
    """A moment, seen from an operation that ends then: what is equal a period later, and what is nearly so."""

    k: int
    now: float
    undone: int
    equal: tuple[object, ...]
    near: list[float]


class Repetition:
    """Looks for the moment from which a replay repeats itself, and moves it on.

    Attributes:
        marks: the operations at whose end it looks: see `marks_of`.
    """

    def __init__(self, order: Dependencies, marks: Mapping[int, Stretch], flight: Flight) -> None:
        self.after, self.marks, self.flight = order.after, marks, flight
        self._last: _Seen | None = None

    def move_on(self, k: int, now: float, reached: int) -> float:
        """Move the replay on if it repeats itself; returns the time it has then.

        Args:
            k: an operation of `marks` that has just ended.
            now: the time, at which everything that ends has ended and everything that starts has started.
            reached: how many operations have been issued.
        """
        stretch, last = self.marks[k], self._last
        here = self._last = self._see(k, now)
        if last is None or last.k != k - stretch.period or last.equal != here.equal or last.undone < stretch.first:
            return now
        for one, other in zip(last.near, here.near, strict=True):
            if abs(one - other) > TOUCH * now:
                return now
        started, ended = self._of_period(last, here)
        periods = self._periods(stretch, last, here, reached, started, ended)
        if periods < 2:
            return now
        self._last = None
        return self._moved(stretch, last, here, periods, started, ended)

    def _see(self, k: int, now: float) -> _Seen:
        f = self.flight
        left, since, rate, until, late = f.left, f.since, f.rate, f.until, f.late
        undone = f.done.find(0, self._last.undone if self._last else 0)
        due = sorted([(one - k, when - now) for when, one in f.due]) if f.due else []
        equal = (
            undone - k, f.done[undone : f.done.rfind(1) + 1], [(one - k, rate[one], one in late) for one in f.flying],
            [one for one, _ in due],
        )  # fmt: skip
        near = [left[one] - (now - since[one]) * rate[one] for one in f.flying]
        near += [until[one] - now for one in f.flying]
        near += [when for _, when in due]
        return _Seen(k, now, undone, equal, near)

    def _touched(self, here: _Seen) -> int:
        """The last operation that has started, or waits for nothing but its issue."""
        f = self.flight
        return max([f.done.rfind(1), *f.flying, *[one for _, one in f.due]])

    def _periods(
        self, stretch: Stretch, last: _Seen, here: _Seen, reached: int, started: list[int], ended: list[int]
    ) -> int:
        """How many periods will pass like the last one, of which some operations started and some ended."""
        f = self.flight
        room = (min(stretch.end, stretch.held, reached) - 1 - self._touched(here)) // stretch.period
        length_s, issue_s = here.now - last.now, f.clocks[here.k] - f.clocks[last.k]
        behind_s = issue_s - length_s
        if len(started) != stretch.period or len(ended) != stretch.period:
            return 0
        lead_s = [f.starts[k] - f.issued[k] for k in started] + [f.until[k] - f.floor[k] for k in (*ended, *f.flying)]
        if abs(behind_s) <= TOUCH * here.now:
            return room
        if min(lead_s) <= TOUCH * here.now:  # something started when it was issued, which the next will not
            return 0
        return room if behind_s < 0 else min(room, int(min(lead_s) / behind_s) - 1)

    def _of_period(self, last: _Seen, here: _Seen) -> tuple[list[int], list[int]]:
        """The operations that started in the last period, and those that ended."""
        f = self.flight
        some = range(last.undone, self._touched(here) + 1)
        ended = [k for k in some if f.done[k] and f.until[k] > last.now]
        flying = [k for k in f.flying if f.starts[k] > last.now]
        return [k for k in ended if f.starts[k] > last.now] + flying, ended

    def _moved(
        self, stretch: Stretch, last: _Seen, here: _Seen, periods: int, started: list[int], ended: list[int]
    ) -> float:
        f, period = self.flight, stretch.period
        far = periods * period
        moments: dict[float, list[float]] = {}  # by when one is in the last period, when it is in those to come

        def images(k: int) -> slice:
            return slice(k + period, k + far + 1, period)

        for times, binding, of in ((f.starts, f.issued, started), (f.until, f.floor, ended)):
            for k in of:
                if times[k] == binding[k]:  # exactly then, each time
                    moments.setdefault(times[k], binding[images(k)])
        length_s = here.now - last.now
        later_s = [length_s * number for number in range(1, periods + 1)]
        if moments:  # then the CPU sets the pace
            later_s = [clock - f.clocks[here.k] for clock in f.clocks[images(here.k)]]
        for times, of in ((f.starts, started), (f.until, ended)):
            for k in of:
                moment = times[k]
                if moment not in moments:
                    moments[moment] = [moment + one for one in later_s]
                times[images(k)] = moments[moment]
        for k in ended:
            f.done[images(k)] = b"\1" * periods
            if k in f.late:
                f.late |= {one: f.clocks[one] for one in range(k + period, k + far + 1, period)}
        now = moments[here.now][-1]
        for k in f.flying:
            one = k + far
            f.left[one], f.since[one], f.rate[one] = f.left[k] - (here.now - f.since[k]) * f.rate[k], now, f.rate[k]
            f.until[one] = max(now + (f.until[k] - here.now), f.floor[one])
            if k in f.late:
                f.late[one] = f.clocks[one]
                f.until[one] = f.floor[one]
        f.flying[:] = [k + far for k in f.flying]
        f.due[:] = sorted([(f.issued[k + far], k + far) for _, k in f.due])
        upto = min(stretch.end, self._touched(here) + stretch.reach + 1)
        done, missing = f.done, f.missing
        for k in (*range(here.undone + far, upto), *stretch.outside):
            waits = 0
            for before in self.after[k]:
                if not done[before]:
                    waits += 1
            missing[k] = waits
        return now
