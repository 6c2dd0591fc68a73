"""The page that ``fsdp-sim diagnose --html`` writes: the step, what it waits for, its ranks and its memory."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from fsdp_sim.cli.memory import tables
from fsdp_sim.cli.written import drawn
from fsdp_sim.diagnose import (
    COLUMNS,
    RANK_COLUMNS,
    Diagnosis,
    MemoryFound,
    RankTimes,
    cells,
    main_blames,
    path_sentence,
    rank_cells,
    ranks_sentence,
    ranks_to_show,
    totals,
)
from fsdp_sim.timeline import Timeline
from fsdp_sim.words import human_ms, percent

if TYPE_CHECKING:
    from fsdp_sim.viz import Section

MOST_ROWS = 40  # of a table


def write_page(path: str, timeline: Timeline, found: Diagnosis, memory: MemoryFound | None = None) -> None:
    """Write the page.

    Raises:
        ValueError: a package that draws is missing.
    """
    viz = drawn("--html")
    numbers = viz.Table(
        "Where the time goes", ("", "time", "of the step"),
        tuple((name, human_ms(seconds), percent(seconds, found.step_s)) for name, seconds in totals(found)),
    )  # fmt: skip
    exposed = [row for row in found.collectives if row.exposed_s > 0]
    rows = viz.Table(
        f"The most exposed of {len(found.collectives)} (operation, unit, phase)", COLUMNS,
        tuple(map(cells, exposed[:MOST_ROWS])),
    )  # fmt: skip
    picture = viz.timeline(timeline, step=found.step, ranks=[found.rank])
    sections = [viz.Section.of(picture, f"Step {found.step}, rank {found.rank}")]
    for blame in main_blames(found):
        tips = "\n\n".join(f"Try: {tip}" for tip in blame.advice)
        text = f"{blame.sentence}\n\n{tips}" if tips else blame.sentence
        sections.append(viz.Section(f"{blame.culprit}: {human_ms(blame.idle_s)}", text))
    sections.append(viz.Section("Collectives", "\n\n".join(found.notes), tables=(rows,)))
    if found.rank_times:
        said = [ranks_sentence(found), path_sentence(found) if found.critical_path else ""]
        rows = viz.Table("Ranks in the step", RANK_COLUMNS, tuple(map(_rank, ranks_to_show(found), repeat(found))))
        sections.insert(1, viz.Section("Ranks", "\n\n".join(filter(None, said)), tables=(rows,)))
    if memory:
        sections += _memory(memory, timeline.api)
    viz.save_html(
        path, sections, title="Why is my communication not overlapped?", intro=found.headline, tables=(numbers,)
    )


def write_memory_page(path: str, found: MemoryFound) -> None:
    """Write the page of a snapshot of memory without a trace.

    Raises:
        ValueError: a package that draws is missing.
    """
    drawn("--html").save_html(path, _memory(found, ""), title="What stands in my GPU's memory?")


def _memory(found: MemoryFound, api: str) -> list[Section]:
    """The curve of a snapshot with its sentences below it; the tables of its peak, with the prediction's."""
    viz = drawn("--html")
    shown = tuple(viz.Table(title, columns, tuple(rows)) for title, columns, rows in tables(found, api))
    said = [*(found.predicted.sentences if found.predicted else ()), *found.notes]
    return [
        viz.Section.of(viz.memory_curve(found), "Memory"),
        viz.Section("What stands at the peak", "\n\n".join(said), tables=shown),
    ]


def _rank(row: RankTimes, found: Diagnosis) -> tuple[str, ...]:
    """A rank as texts; the straggler says that it is."""
    rank, *others = rank_cells(row)
    straggles = found.straggler is not None and found.straggler.rank == row.rank
    return (f"{rank}, the straggler" if straggles else rank, *others)
