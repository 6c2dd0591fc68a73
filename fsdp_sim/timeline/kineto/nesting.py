"""Which span of a thread a moment lies in: spans of one thread nest, as calls do."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence


class Nesting:
    """The innermost of some spans at any moment, and what it lies in.

    Spans are given as parallel sequences; those that do not nest (clocks are coarse) are cut where the outer one ends.

    Example:
        >>> calls = Nesting([0.0, 1.0], [9.0, 2.0], [7, 7])
        >>> calls.at(7, 1.5), calls.at(7, 5.0), calls.at(7, 9.5), list(calls.around(7, 1.5))
        (1, 0, -1, [1, 0])
    """

    def __init__(self, start: Sequence[float], end: Sequence[float], tid: Sequence[int]) -> None:
        self.parent = [-1] * len(start)
        self._times: dict[int, list[float]] = defaultdict(list)
        self._inner: dict[int, list[int]] = defaultdict(list)
        open_: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for i in sorted(range(len(start)), key=lambda i: (start[i], -end[i])):
            stack = open_[tid[i]]
            self._close(tid[i], stack, start[i])
            if stack:
                self.parent[i] = stack[-1][1]
            stack.append((min(end[i], stack[-1][0]) if stack else end[i], i))
            self._times[tid[i]].append(start[i])
            self._inner[tid[i]].append(i)
        for thread, stack in open_.items():
            self._close(thread, stack, float("inf"))

    def _close(self, tid: int, stack: list[tuple[float, int]], until: float) -> None:
        while stack and stack[-1][0] <= until:
            end, _ = stack.pop()
            self._times[tid].append(end)
            self._inner[tid].append(stack[-1][1] if stack else -1)

    def at(self, tid: int, time: float) -> int:
        """The innermost span at a moment, -1 where there is none."""
        times = self._times.get(tid)
        if not times:
            return -1
        index = bisect_right(times, time) - 1
        return self._inner[tid][index] if index >= 0 else -1

    def around(self, tid: int, time: float) -> Iterator[int]:
        """All spans at a moment, from the innermost outwards."""
        index = self.at(tid, time)
        while index >= 0:
            yield index
            index = self.parent[index]
