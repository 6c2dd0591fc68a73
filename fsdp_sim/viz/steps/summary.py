"""The numbers behind a figure told in sentences and in a table, for those who cannot see it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from fsdp_sim.timeline import Event, Timeline, communicates, computes, exposure_of, total_s
from fsdp_sim.viz.steps.step_view import StepView, Timelines, step_views
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import OP_NAMES
from fsdp_sim.words import human_bytes, human_ms

SMALL = 0.02  # of a step: exposed communication below this is not its story
ROOMY = 1.6  # a memory limit this many times the peak is far away


def headline(views: Sequence[StepView]) -> str:
    """The finding in one plain sentence; of several timelines their step times and exposed communication."""
    if len(views) == 1:
        return exposure_sentence(views[0])
    sentences = [
        f"{v.name}: {human_ms(v.step_s)} a step, {human_ms(v.mean_exposed_s)} exposed communication" for v in views
    ]
    sentence = "; ".join(sentences) + "."
    return sentence[0].upper() + sentence[1:]


def exposure_sentence(view: StepView) -> str:
    """What computing waited for longest, on a rank that is drawn if any of these waits; or that it did not wait."""
    if not view.communicates:
        return "The step communicates nothing."
    exposed = {rank: parts for rank in view.timeline.ranks if (parts := exposed_parts(view, rank))}
    if not exposed:
        return "All communication is hidden behind computing."
    comm_s, exposed_s = view.mean_comm_s, view.mean_exposed_s
    found = exposure_of(comm_s, exposed_s, view.step_s, SMALL)
    if found == "next to none":
        return (
            f"The step communicates next to nothing: {human_ms(comm_s)} ({comm_s / view.step_s:.1%}), of which "
            f"{human_ms(exposed_s)} exposed."
        )
    if found == "hidden":
        return f"Nearly all communication is hidden: {human_ms(exposed_s)} of {human_ms(comm_s)} is exposed."
    drawn = [rank for rank in view.ranks if rank in exposed] or list(exposed)
    rank = max(drawn, key=lambda rank: max(seconds for _, seconds in exposed[rank]))
    event, longest_s = max(exposed[rank], key=lambda part: part[1])
    count, together_s = len(exposed[rank]), total_s(view.exposed(rank))
    others = f"the longest of {count} ({human_ms(together_s)} together)" if count > 1 else "and nothing else"
    where = f" on rank {rank}" if len(view.timeline.ranks) > 1 else ""
    return f"The {name_of(event)} is exposed for {human_ms(longest_s)}{where}, {others}."


def exposed_parts(view: StepView, rank: int) -> list[tuple[Event, float]]:
    """The communication of a rank that nothing hid, and for how many seconds each."""
    waits = view.exposed(rank)  # disjoint and ascending
    ends = [end_s for _, end_s in waits]
    found = []
    for e in view.communication(rank):
        seconds = 0.0
        for start_s, end_s in waits[bisect_right(ends, e.start_s) :]:
            if start_s >= e.end_s:
                break
            seconds += min(end_s, e.end_s) - max(start_s, e.start_s)
        if seconds > 0:
            found.append((e, seconds))
    return found


def subtitle(view: StepView) -> str:
    """How long the step takes, how much of its communication is hidden, and whose step it is."""
    parts = [f"A step takes {human_ms(view.step_s)}"]
    if view.communicates:
        parts.append(f"{view.mean_overlap:.0%} of the communication is hidden behind computing")
    ranks, recorded, world_size = len(view.ranks), len(view.timeline.ranks), view.timeline.header.world_size
    if recorded == 1 < world_size:
        parts.append(f"one of {world_size} ranks is drawn for all")
    elif ranks < recorded:
        parts.append(f"{ranks} of {recorded} ranks {'is' if ranks == 1 else 'are'} drawn")
    return "; ".join(parts) + "."


def blame(view: StepView, rank: int, start_s: float, end_s: float) -> list[Event]:
    """The communication that ran on a rank in an interval, the longest in it first."""
    running = [e for e in view.communication(rank) if e.start_s < end_s and e.end_s > start_s]
    return sorted(running, key=lambda e: max(e.start_s, start_s) - min(e.end_s, end_s))


def name_of(event: Event) -> str:
    """An operation in words: ``all-gather of layers.3``."""
    return f"{OP_NAMES[event.op]} of {event.unit}" if event.unit else OP_NAMES[event.op]


def memory_sentence(view: StepView, rank: int) -> str:
    """The peak of a rank and how far the device's limit is from it; empty when it recorded no memory."""
    peak, limit = view.peak_bytes(rank), view.timeline.header.memory_limit_bytes
    if not peak:
        return ""
    text = f"peak {human_bytes(peak)}"
    if not limit:
        return text
    if peak > limit:
        return f"{text}, {human_bytes(peak - limit)} more than the {human_bytes(limit)} there are"
    return f"{text}, {peak / limit:.0%} of the {human_bytes(limit)} there are"


def describe(timeline: Timeline, *, step: int | None = None) -> str:
    """The finding first, then how long a step takes, how much communication nothing hides, how much memory is alive.

    Args:
        timeline: a timeline with at least one operation.
        step: the step to tell of; by default the one of median duration, the first left out.

    Raises:
        ValueError: the timeline is empty or lacks the step.
    """
    (view,) = step_views(timeline, step=step)
    return words_of(view)


def words_of(view: StepView) -> str:
    """`describe` for a view; it tells of all ranks, whichever are drawn."""
    n_ranks, world_size = len(view.timeline.ranks), view.timeline.header.world_size
    who = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
    if n_ranks == 1 < world_size:
        who = f"{world_size} ranks (one of them recorded)"
    parts = [f"Step {view.step} on {who} takes {human_ms(view.step_s)}"]
    if view.communicates and view.mean_exposed_s:
        share = view.mean_exposed_s / view.step_s
        parts.append(
            f"{human_ms(view.mean_exposed_s)} of it ({share:.1%}{', mean of the ranks' * (n_ranks > 1)}) is exposed "
            f"communication, during which nothing computes; {view.mean_overlap:.0%} of the communication is hidden "
            "behind computing"
        )
    peaks = {rank: view.peak_bytes(rank) for rank in view.timeline.ranks}
    fullest = max(peaks, key=lambda rank: peaks[rank])
    if sentence := memory_sentence(view, fullest):
        parts.append(f"live memory of rank {fullest}: {sentence}")
    return f"{exposure_sentence(view)} {'; '.join(parts)}."


def summary_table(
    timelines: Timelines,
    *,
    ranks: Iterable[int] | None = None,
    step: int | None = None,
    titles: Sequence[str] | None = None,
) -> Table:
    """The numbers of `timeline_figure` with the same arguments: one row for each timeline and rank."""
    return table_of(step_views(timelines, ranks=ranks, step=step, titles=titles))


def table_of(views: Sequence[StepView]) -> Table:
    """The numbers of views: one row for each view and rank."""
    rows = []
    for view in views:
        for rank in view.ranks:
            exposed_s, peak = total_s(view.exposed(rank)), view.peak_bytes(rank)
            comm_s = view.busy_s(rank, communicates)
            rows.append(
                (
                    view.name,
                    str(rank),
                    str(view.step),
                    human_ms(view.step_s),
                    human_ms(view.busy_s(rank, computes)),
                    human_ms(comm_s),
                    human_ms(exposed_s),
                    f"{view.overlap(rank):.0%}" if comm_s else "none",
                    human_bytes(peak) if peak else "not recorded",
                )
            )
    header = (
        "timeline",
        "rank",
        "step",
        "step time",
        "computing",
        "communicating",
        "exposed communication",
        "communication hidden",
        "peak live memory",
    )
    return Table("Where the time of one training step goes", header, tuple(rows))
