"""Collectives step by step, executed on real arrays: who sends which chunk to whom, and what every rank holds then.

A ring: rank r sends to rank r+1, and the last to the first, so that in every step every link carries one chunk.

    all-gather      step s: rank r passes on chunk r-s. After n-1 steps all have all.
    reduce-scatter  step s: rank r sends chunk r-s-1, and the next rank adds its own numbers. After n-1 steps rank r
                    has the sum of chunk r.
    all-reduce      a reduce-scatter, then an all-gather of the sums
    broadcast       the root's chunks follow one another around the ring
    all-to-all      no ring: in step s rank r sends chunk r+s directly to rank r+s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_sim.timeline import ring_share

Array = NDArray[np.generic]
ALGORITHMS = {
    "all-gather": "ring",
    "reduce-scatter": "ring",
    "all-reduce": "ring",
    "broadcast": "ring",
    "all-to-all": "pairwise",
}
MAX_RANKS = 16


@dataclass(frozen=True)
class Chunk:
    """What a rank holds of one chunk.

    Attributes:
        values: the numbers.
        of: the ranks whose data are in it.
    """

    values: Array
    of: frozenset[int]

    def __add__(self, other: Chunk) -> Chunk:
        return Chunk(self.values + other.values, self.of | other.of)  # type: ignore[operator]


@dataclass(frozen=True)
class Transfer:
    """One rank sends one chunk to another, into its place there, where it is added to what is there.

    Attributes:
        moves: the sender does not keep it.
        place: of the chunk at the target; another than `chunk` in an all-to-all alone.
    """

    source: int
    target: int
    chunk: int
    payload: Chunk
    moves: bool
    place: int


@dataclass(frozen=True)
class CollectiveStep:
    """All transfers of one step, and what every rank holds after them.

    Attributes:
        part: the collective that this is a step of: of an all-reduce first reduce-scatter, then all-gather.
        held: by rank and place: the number of the chunk; in an all-to-all what is for rank p, then what is from it.
        sent: numbers each rank has sent since the beginning.
    """

    part: str
    transfers: tuple[Transfer, ...]
    held: tuple[tuple[Chunk | None, ...], ...]
    sent: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveRun:
    """A collective from its beginning to its end.

    Attributes:
        steps: the first has no transfers: what ranks hold before.
        message: numbers in the whole message (an all-gather's output, the others' input).
    """

    collective: str
    ranks: int
    steps: tuple[CollectiveStep, ...]
    message: int
    root: int = 0

    @property
    def sent_by_formula(self) -> float:
        """Numbers a rank sends, by the formula of the textbooks, on average over the ranks."""
        of = "all-gather" if self.collective == "broadcast" else self.collective  # its root sends all, the last nothing
        return self.message * ring_share(of, self.ranks)

    def result(self, rank: int) -> list[Array | None]:
        """What a rank holds at the end, by place."""
        held = self.steps[-1].held[rank]
        own = held[self.ranks :] if self.collective == "all-to-all" else held
        return [None if chunk is None else chunk.values for chunk in own]


def execute(collective: str, data: Sequence[Sequence[float] | Array], root: int = 0) -> CollectiveRun:
    """Run a collective on one array per rank.

    Args:
        data: of an all-gather each rank's own chunk, of any size; of a broadcast each rank's array, of which the root's
            counts; of the others each rank's whole array, of equal sizes, which is cut into one chunk per rank as
            evenly as can be.

    Raises:
        ValueError: a collective that is not known, no rank or more than 16, or arrays that do not fit together.
    """
    arrays = [np.asarray(one) for one in data]
    n = len(arrays)
    _check(collective, arrays, root)
    run = _Ring(n)
    if collective == "all-gather":
        run.held = [[Chunk(arrays[r], frozenset({r})) if c == r else None for c in range(n)] for r in range(n)]
    elif collective == "broadcast":
        chunks = np.array_split(arrays[root], n)
        run.held = [[Chunk(part, frozenset({root})) if r == root else None for part in chunks] for r in range(n)]
    else:
        run.held = [[Chunk(part, frozenset({r})) for part in np.array_split(arrays[r], n)] for r in range(n)]
    if collective == "all-to-all":
        apart: list[list[Chunk | None]] = [[None] * n for _ in range(n)]
        for r, row in enumerate(run.held):
            row[r], apart[r][r] = None, row[r]
        run.held = [row + kept for row, kept in zip(run.held, apart, strict=True)]
    run.close(collective, ())
    if collective == "broadcast":
        run.broadcast(root)
    elif collective == "all-to-all":
        run.all_to_all()
    else:
        if collective != "all-gather":
            run.around("reduce-scatter", lambda r, s: r - s - 1, adds=True)
        if collective != "reduce-scatter":
            run.around("all-gather", lambda r, s: r - s, adds=False)
    message = sum(one.size for one in arrays) if collective == "all-gather" else int(arrays[root].size)
    return CollectiveRun(collective, n, tuple(run.steps), message, root)


class _Ring:
    """What ranks hold, and the steps so far."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.held: list[list[Chunk | None]] = []
        self.sent = [0] * n
        self.steps: list[CollectiveStep] = []

    def close(self, part: str, transfers: Sequence[Transfer]) -> None:
        """Carry out a step: all send what they held before it. What goes to be added, or away, is not kept."""
        for t in transfers:
            if t.moves:
                self.held[t.source][t.chunk] = None
        for t in transfers:
            before = self.held[t.target][t.place]
            self.held[t.target][t.place] = t.payload if before is None else before + t.payload
            self.sent[t.source] += t.payload.values.size
        self.steps.append(CollectiveStep(part, tuple(transfers), tuple(map(tuple, self.held)), tuple(self.sent)))

    def send(self, source: int, target: int, chunk: int, *, moves: bool = False, place: int | None = None) -> Transfer:
        payload = self.held[source][chunk]
        assert payload is not None, f"rank {source} has no chunk {chunk} to send"
        return Transfer(source, target, chunk, payload, moves, chunk if place is None else place)

    def around(self, part: str, which: Callable[[int, int], int], *, adds: bool) -> None:
        """n-1 steps in which every rank sends one chunk to the next rank."""
        n = self.n
        for s in range(n - 1):
            self.close(part, [self.send(r, (r + 1) % n, which(r, s) % n, moves=adds) for r in range(n)])

    def broadcast(self, root: int) -> None:
        """Chunk c leaves the root in step c, and is one rank further in each step."""
        n = self.n
        for s in range(2 * n - 2 if n > 1 else 0):
            moving = [(d, s - d) for d in range(n - 1) if 0 <= s - d < n]
            self.close("broadcast", [self.send((root + d) % n, (root + d + 1) % n, c) for d, c in moving])

    def all_to_all(self) -> None:
        """Places up to n are what a rank has for others, those from n what it has from them."""
        n = self.n
        for s in range(1, n):
            pairs = [(r, (r + s) % n) for r in range(n)]
            self.close("all-to-all", [self.send(r, to, to, moves=True, place=n + r) for r, to in pairs])


def _check(collective: str, arrays: Sequence[Array], root: int) -> None:
    if collective not in ALGORITHMS:
        raise ValueError(f"there is no collective {collective!r} here; there are {', '.join(ALGORITHMS)}")
    if not 1 <= len(arrays) <= MAX_RANKS:
        raise ValueError(f"data has {len(arrays)} arrays, one for each rank; draw 1 to {MAX_RANKS} ranks")
    flat = [one.ndim == 1 for one in arrays]
    if not all(flat):
        bad = flat.index(False)
        raise ValueError(f"data[{bad}] has the shape {arrays[bad].shape}; each rank's array has one dimension")
    if not 0 <= root < len(arrays):
        raise ValueError(f"root is {root}; there are ranks 0 to {len(arrays) - 1}")
    sizes = [one.size for one in arrays]
    if collective in ("reduce-scatter", "all-reduce") and len(set(sizes)) > 1:
        raise ValueError(f"data has arrays of {sizes} numbers; they are added, so they must have equal sizes")
