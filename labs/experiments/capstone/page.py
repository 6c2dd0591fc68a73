"""The report: one page that opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_sim import viz
from fsdp_sim.viz import Picture, Section, Table
from labs.experiments.capstone.scores import path as scores_path


def report(
    words: str, pictures: Sequence[Picture], tables: Sequence[Table], *, title: str, to: str | Path | None = None
) -> Path:
    """Write the report: the learner's words first, then the tables, then the figures with their numbers.

    Args:
        words: the learner's; plain text, paragraphs separated by blank lines.
        to: by default a file beside the scoreboard.

    Returns:
        where it is.
    """
    target = Path(to) if to else scores_path().with_name("capstone.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    sections = [Section.of(picture) for picture in pictures]
    return viz.save_html(target, sections, title=title, intro=words, tables=tables)
