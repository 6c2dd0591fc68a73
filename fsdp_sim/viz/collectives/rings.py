"""`collective`: a ring all-gather, reduce-scatter or all-reduce, chunk by chunk, with the numbers in the chunks.

The numbers are what the algorithm computes: it is executed on arrays (`ring_steps`), and the picture shows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdp_sim.viz.collectives.figures import film_strip, moving_figure
from fsdp_sim.viz.collectives.grid import TWICE_UP_TO, numbers_of
from fsdp_sim.viz.collectives.scenes import CollectiveFrame, formula, scenes_of, seconds, share
from fsdp_sim.viz.collectives.steps import ALGORITHMS, MAX_RANKS, Array, CollectiveRun, execute
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.words import human_bytes, human_ms


def collective(
    name: str = "all-gather",
    ranks: int = 4,
    algorithm: str | None = None,
    data: Sequence[Sequence[float]] | None = None,
    *,
    root: int = 0,
    message_bytes: float = 2**26,
    latency_s: float = 10e-6,
    bytes_per_s: float = 25e9,
) -> Picture:
    """A collective step by step: who sends which chunk to whom, what is added, and what it costs.

    Args:
        name: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``broadcast`` or ``all-to-all``; underscores will do.
        ranks: 1 to 16; where data is given, as many as it has arrays.
        algorithm: ``ring``; of an all-to-all ``pairwise``; by default the one there is.
        data: one array per rank: of an all-gather its chunk, of the others the whole. Small numbers by default.
        root: who has the data of a broadcast.
        message_bytes, latency_s, bytes_per_s: for the time by alpha and beta that the finding states.

    Raises:
        ValueError: an unknown name or algorithm, or data that does not fit (the message says what would).

    Example:
        >>> collective("all-gather", ranks=4).finding.partition(".")[0]
        'A ring all-gather over 4 ranks takes 3 steps'
    """
    name = str(name).lower().replace("_", "-")
    if data is None and (type(ranks) is not int or not 1 <= ranks <= MAX_RANKS):
        raise ValueError(f"ranks is {ranks!r}; draw 1 to {MAX_RANKS} ranks")
    run = execute(name, _small_numbers(name, ranks) if data is None else data, root)
    if algorithm not in (None, ALGORITHMS[name]):
        raise ValueError(f"algorithm is {algorithm!r}; {name} is drawn as {ALGORITHMS[name]!r}")
    reel = scenes_of(run, each_twice=run.ranks <= TWICE_UP_TO)
    title = _title(run)
    finding = _finding(run, message_bytes, latency_s, bytes_per_s)
    return Picture(moving_figure(run, reel, title), finding, (_table(run, reel),), film_strip(run, reel, title))


def _small_numbers(name: str, ranks: int) -> list[Array]:
    """Digits, the same for everyone who looks."""
    each = 2 if ranks <= 4 else 1
    size = each if name == "all-gather" else each * ranks
    return list(np.random.default_rng(11).integers(1, 10, (ranks, size)))


# Words and numbers


def _title(run: CollectiveRun) -> str:
    kind = "Ring " if ALGORITHMS[run.collective] == "ring" else "Pairwise "
    if run.ranks == 1:
        return f"{kind}{run.collective} of one rank: nothing to send"
    steps = len(run.steps) - 1
    return f"{kind}{run.collective}, {run.ranks} ranks: {steps} step{'s' * (steps != 1)}, {share(run)}"


def _finding(run: CollectiveRun, message_bytes: float, latency_s: float, bytes_per_s: float) -> str:
    n, steps = run.ranks, len(run.steps) - 1
    if n == 1:
        return f"{run.collective.capitalize()} of one rank: nothing is sent."
    sent = run.steps[-1].sent
    mean = sum(sent) / n
    same = "exactly" if len(set(sent)) == 1 else f"on average ({min(sent)} to {max(sent)})"
    agrees = "as" if abs(mean - run.sent_by_formula) < 1e-9 else "not as"
    time_s = seconds(run, message_bytes, latency_s, bytes_per_s)
    sentence = (
        f"A {ALGORITHMS[run.collective]} {run.collective} over {n} ranks takes {steps} step{'s' * (steps != 1)}. "
        f"The message S is {run.message} numbers, and each rank sends {mean:g} {same}, {agrees} {formula(run)} says. "
        f"A message of {human_bytes(message_bytes)} over links of {bytes_per_s / 1e9:g} GB/s takes {human_ms(time_s)}: "
        f"{steps} latencies of {latency_s * 1e6:g} us, and the bytes."
    )
    if run.collective == "all-reduce":
        sentence += f" Its first {n - 1} steps are a reduce-scatter, its last {n - 1} an all-gather."
    return sentence


def _table(run: CollectiveRun, reel: Sequence[CollectiveFrame]) -> Table:
    rows = []
    for number, scene in enumerate(reel, 1):
        moved = "; ".join(
            f"{t.source} to {t.target}: {numbers_of(t.payload)}" for t in scene.step.transfers if scene.moving
        )
        rows.append((str(number), scene.label, scene.text, moved or "-", ", ".join(map(str, scene.sent))))
    header = ("picture", "step", "what happens", "on the way (from rank to rank: numbers)", "numbers sent by each rank")
    return Table(f"{run.collective} of {run.ranks} ranks, step by step", header, tuple(rows))
