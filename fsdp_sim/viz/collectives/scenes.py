"""A collective told: a sentence for each step, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from fsdp_sim.viz.collectives.steps import Chunk, CollectiveRun, CollectiveStep


class Cell(IntEnum):
    """What a rank holds in one place."""

    GAP, NOTHING, OWN, COPY, PARTIAL, SUM, SUM_COPY = range(7)


@dataclass(frozen=True)
class CollectiveFrame:
    """One frame.

    Attributes:
        held: what is drawn: before the step while its chunks are on the way, else after it.
        step: whose transfers are drawn as arrows if ``moving``, else outlined where they have arrived.
    """

    text: str
    label: str
    held: tuple[tuple[Chunk | None, ...], ...]
    step: CollectiveStep
    sent: tuple[int, ...]
    moving: bool = False
    arrived: bool = False


def scenes_of(run: CollectiveRun, each_twice: bool) -> list[CollectiveFrame]:
    """The beginning, and for each step one scene in which chunks are on the way and one in which they have arrived; or
    one for both."""
    first = run.steps[0]
    found = [CollectiveFrame(_beginning(run), "before", first.held, first, first.sent)]
    before = first
    for number, step in enumerate(run.steps[1:], 1):
        label = f"step {number} of {len(run.steps) - 1}, {step.part}"
        if each_twice:
            found.append(CollectiveFrame(_sending(run, number), label, before.held, step, before.sent, moving=True))
        text = _arrived(run, number) if each_twice else f"{_sending(run, number)} {_arrived(run, number)}"
        found.append(CollectiveFrame(text, label, step.held, step, step.sent, moving=not each_twice, arrived=True))
        before = step
    return found


def cell_of(run: CollectiveRun, rank: int, place: int, chunk: Chunk | None) -> Cell:
    """How what a rank holds in a place is shown."""
    if chunk is None:
        return Cell.NOTHING
    match run.collective:
        case "all-gather":
            return Cell.OWN if place == rank else Cell.COPY
        case "broadcast":
            return Cell.OWN if rank == run.root else Cell.COPY
        case "all-to-all":
            return Cell.COPY if place < run.ranks else Cell.OWN
    if len(chunk.of) < run.ranks:
        return Cell.PARTIAL
    return Cell.SUM if place == rank else Cell.SUM_COPY


def _beginning(run: CollectiveRun) -> str:
    n = run.ranks
    if n == 1:
        return "One rank: it holds everything already, and nothing is sent."
    return {
        "all-gather": f"Each of {n} ranks holds one chunk, its shard. In the end all hold all {n}.",
        "reduce-scatter": f"Each of {n} ranks holds a whole gradient of its own data, cut into {n} chunks. In the end "
        "each holds one chunk of their sum.",
        "all-reduce": f"Each of {n} ranks holds a whole gradient of its own data, cut into {n} chunks. In the end all "
        "hold their whole sum.",
        "broadcast": f"Rank {run.root} holds all {n} chunks. In the end all ranks do.",
        "all-to-all": f"Each of {n} ranks holds one chunk for every other. In the end each has what was meant for it.",
    }[run.collective]


def _sending(run: CollectiveRun, number: int) -> str:
    n, step = run.ranks, run.steps[number]
    within = _within(run, number)
    match step.part:
        case "reduce-scatter":
            what = "its numbers of one chunk" if within == 1 else "the sum it has just made"
            return f"Every rank sends {what} to the next rank."
        case "all-gather":
            own = "its finished sum" if run.collective == "all-reduce" else "its own chunk"
            what = own if within == 1 else "the chunk it has just received"
            sends, on = ("sends", "") if within == 1 else ("passes", "on ")
            return f"Every rank {sends} {what} {on}to the next rank."
        case "broadcast":
            senders = [t.source for t in step.transfers]
            return f"{len(senders)} of {n} ranks send{'s' if len(senders) == 1 else ''} a chunk to the next rank."
    return f"Every rank sends a chunk directly to the rank {number} further on."


def _arrived(run: CollectiveRun, number: int) -> str:
    n, step = run.ranks, run.steps[number]
    within = _within(run, number)
    match step.part:
        case "reduce-scatter":
            if within < n - 1:
                sums = f"each chunk that moved is now a sum over {within + 1} of {n} ranks"
                return f"The next rank has added its own numbers: {sums}."
            done = "Every rank holds one finished chunk, the sum over all ranks: its shard."
            return done + (" The reduce-scatter is done; now the all-gather." if run.collective == "all-reduce" else "")
        case "all-gather":
            if within < n - 1:
                return f"Every rank now holds {within + 1} of {n} chunks."
            if run.collective == "all-reduce":
                return (
                    "All hold the whole sum. An all-reduce is a reduce-scatter and an all-gather; FSDP runs them apart."
                )
            return f"Every rank holds all {n} chunks: the whole."
        case "broadcast":
            full = sum(all(chunk is not None for chunk in row) for row in step.held)
            return f"{full} of {n} ranks hold{'s' if full == 1 else ''} everything."
    return f"Every rank now has {within + 1} of the {n} chunks meant for it."


def _within(run: CollectiveRun, number: int) -> int:
    """The number of a step within its part."""
    return number - (run.ranks - 1 if run.collective == "all-reduce" and number >= run.ranks else 0)


# Costs


def seconds(run: CollectiveRun, message_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """By alpha and beta: each step costs a latency, and the time its largest chunk takes on a link."""
    if not run.message:
        return (len(run.steps) - 1) * latency_s
    per_number = message_bytes / run.message
    largest = [max(t.payload.values.size for t in step.transfers) for step in run.steps[1:]]
    return sum(latency_s + n * per_number / bytes_per_s for n in largest)


def formula(run: CollectiveRun) -> str:
    """Numbers each rank sends, of a message of S."""
    return f"{'2' * (run.collective == 'all-reduce')}(n-1)/n x S"


def share(run: CollectiveRun) -> str:
    """How much of the message a rank sends, in words."""
    of = f"{run.ranks - 1}/{run.ranks} of the message"
    if run.collective == "broadcast":
        return f"a rank sends {of} on average"
    return f"each sends {'2 x ' * (run.collective == 'all-reduce')}{of}"
