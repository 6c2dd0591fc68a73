"""`best_order`: the fastest legal order of a level's lines, by a search through all of them.

An arithmetic of its own: what may come next, and when it runs, is written here from the rules of the puzzle and not
with the package. Lines are issued one by one; of two ways to have issued the same lines, one that is nowhere later is
kept (how many units are whole depends on the lines alone, and no time ever shrinks by starting later). So the search
leaves out no order that could be faster.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fsdp_sim.learn.puzzle import Level


class Lines(NamedTuple):
    """What has been issued: all that decides which line may come next."""

    computed: int
    left: tuple[tuple[str, int], ...]
    whole: frozenset[str]
    unused: frozenset[str]


class Times(NamedTuple):
    """When all that later lines may wait for is over, ms: the thread, the queues, what is under way by line."""

    thread: float
    queues: tuple[float, float, float]
    under_way: tuple[tuple[str, float], ...]
    order: tuple[str, ...]

    def no_later(self, other: Times) -> bool:
        mine, its = dict(self.under_way), dict(other.under_way)
        return (
            self.thread <= other.thread
            and all(a <= b for a, b in zip(self.queues, other.queues, strict=True))
            and all(mine[key] <= its[key] for key in its)
        )


def best_order(level: Level) -> tuple[float, tuple[str, ...]]:
    """The least step time, ms, and an order that has it."""
    lines = Lines(0, tuple(sorted(Counter(level.start).items())), frozenset(), frozenset())
    layer: dict[Lines, list[Times]] = {lines: [Times(0.0, (0.0, 0.0, 0.0), (), ())]}
    for _ in level.start:
        following: dict[Lines, list[Times]] = {}
        for state, some in layer.items():
            for line, n in state.left:
                after = _after(level, state, line) if n else None
                if after is None:
                    continue
                kept = following.setdefault(after, [])
                for times in some:
                    new = _issued(level, state, times, line)
                    if not any(old.no_later(new) for old in kept):
                        kept[:] = [old for old in kept if not new.no_later(old)] + [new]
        layer = following
    ends = [(max(t.thread, *t.queues), t.order) for state, some in layer.items() if not state.whole for t in some]
    return min(ends)


def _after(level: Level, state: Lines, line: str) -> Lines | None:
    """What has been issued after one more line; None where the line may not come here."""
    kind, n = line.split()
    left = dict(state.left)
    computed, whole, unused = state.computed, state.whole, state.unused
    if kind == "AG" and n not in whole:
        if not left.get(f"FWD {n}") and not left.get(f"BWD {n}"):
            return None
        whole, unused = whole | {n}, unused | {n}
        if level.whole is not None and len(whole) > level.whole:
            return None
    elif kind in ("FWD", "BWD"):
        if n not in whole or level.compute[computed] != line:
            return None
        computed, unused = computed + 1, unused - {n}
        if not level.reshards(n):
            whole = whole - {n}
    elif kind == "RESHARD":
        if n in unused:
            return None
        whole = whole - {n}
    elif (kind == "RS" and left.get(f"BWD {n}")) or (kind == "AR" and left[f"RS {n}"]):
        return None
    left[line] -= 1
    return Lines(computed, tuple(left.items()), whole, unused)


def _issued(level: Level, state: Lines, times: Times, line: str) -> Times:
    kind, n = line.split()
    thread, queues, under_way = times.thread, list(times.queues), dict(times.under_way)
    number = int(n)
    if kind in ("FWD", "BWD"):
        thread = max(thread, under_way.pop(f"AG {n}", 0.0))
        thread += (level.forward_ms if kind == "FWD" else level.backward_ms)[number]
    elif kind != "RESHARD" and not (kind == "AG" and n in state.whole):
        queue = {"AG": 0, "RS": 0 if level.communicators == 1 else 1, "AR": 2}[kind]
        lasts = {"AG": level.gather_ms, "RS": level.reduce_ms, "AR": level.all_reduce_ms}[kind][number]
        ready = under_way.pop(f"RS {n}", 0.0) if kind == "AR" else 0.0
        queues[queue] = max(thread, queues[queue], ready) + lasts
        if kind == "AG" or (kind == "RS" and level.all_reduce_ms):
            under_way[line] = queues[queue]
    return Times(thread, (queues[0], queues[1], queues[2]), tuple(sorted(under_way.items())), (*times.order, line))
