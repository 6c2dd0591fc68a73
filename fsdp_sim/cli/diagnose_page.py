"""The page that ``fsdp-sim diagnose --html`` writes: the step, what it waits for, its ranks and its memory."""

from __future__ import annotations

from itertools import repeat

from fsdp_sim.cli.memory import tables
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
from fsdp_sim.packages import missing
from fsdp_sim.timeline import Timeline
from fsdp_sim.words import human_ms, percent

MOST_ROWS = 40  # of a table


def write_page(path: str, timeline: Timeline, found: Diagnosis, memory: MemoryFound | None = None) -> None:
    """Write the page.

    Raises:
        ValueError: a package that draws is missing.
    """
    try:
        from fsdp_sim import viz
    except ModuleNotFoundError as error:
        raise ValueError(missing(error.name or "", "--html")) from error
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
        said = [*memory.sentences, *(memory.predicted.sentences if memory.predicted else ()), *memory.notes]
        shown = tuple(viz.Table(title, columns, tuple(rows)) for title, columns, rows in tables(memory, timeline.api))
        sections.append(viz.Section("Memory", "\n\n".join(said), tables=shown))
    viz.save_html(
        path, sections, title="Why is my communication not overlapped?", intro=found.headline, tables=(numbers,)
    )


def _rank(row: RankTimes, found: Diagnosis) -> tuple[str, ...]:
    """A rank as texts; the straggler says that it is."""
    rank, *others = rank_cells(row)
    straggles = found.straggler is not None and found.straggler.rank == row.rank
    return (f"{rank}, the straggler" if straggles else rank, *others)
