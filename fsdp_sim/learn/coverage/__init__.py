"""What the course sets out to teach, row by row, and where it does.

The rows come from what learners read about FSDP elsewhere: five long texts, section by section (``coverage 000.1`` to
``004.131``), 54 problems that people have met (``pitfall 1``), 37 claims heard in public (``misconception 1``) and the
statements of the five texts that are wrong, outdated or half the truth (``misconception 0.1`` to ``4.145``).

A row has its place where a notebook's master names it: in the ``covers`` of a markdown cell, of an exercise that stands
in it, or of a statement of `fsdp_sim.learn.statements` that is shown in it.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
SHOWN = re.compile(r"""\bmisconceptions\(["'](\w+)["']\)""")
KINDS = ("coverage", "pitfall", "misconception")


class Topic(NamedTuple):
    """Something to be taught.

    Attributes:
        name: ``coverage 000.1``, ``pitfall 1``, ``misconception 13`` or ``misconception 3.6``.
        heading: of the section that it is about, in the text that it is from.
        covers: what it is about; empty for a misconception, whose words are in `fsdp_sim.learn.statements`.
        status: whether what the text says is ``true``, ``partly true``, ``false``, ``outdated`` or ``unsourced``.
        teach_in: the chapter to which it belongs; empty where that follows from the statement.
    """

    name: str
    heading: str
    covers: str
    status: str
    teach_in: str

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


class Lesson(NamedTuple):
    """Where a row is taught: a notebook, its section, and by what."""

    row: str
    notebook: str
    section: str
    by: str

    def __str__(self) -> str:
        return f"{self.notebook}, {self.section} ({self.by})" if self.section else f"{self.notebook} ({self.by})"


@functools.cache
def rows() -> tuple[Topic, ...]:
    """All rows, in order."""
    text = files("fsdp_sim.learn.coverage").joinpath("rows.csv").read_text(encoding="utf-8")
    return tuple(Topic(**row) for row in csv.DictReader(text.splitlines()))


def masters() -> Path:
    """The folder of the notebooks' masters, which are part of a checkout and not of the installed package.

    Raises:
        ValueError: this is no checkout.
    """
    folder = Path(__file__).parents[3] / "notebooks" / "masters"
    if not folder.is_dir():
        raise ValueError(f"there are no notebooks at {folder}: where rows are taught can be read in a checkout only")
    return folder


def notebooks(folder: Path) -> list[Path]:
    """The masters in a folder, in the order of the course: what has jupytext's header. Beside them stand tools."""
    return sorted(path for path in folder.glob("*.py") if path.read_text().startswith("# ---"))


def lessons(folder: Path) -> list[Lesson]:
    """Where rows are taught, in the order of the notebooks.

    Args:
        folder: of the masters.

    Raises:
        ValueError: a cell names an exercise or a chapter that does not exist.
    """
    return [place for master in notebooks(folder) for place in _lessons(master)]


def _lessons(master: Path) -> Iterator[Lesson]:
    import jupytext  # type: ignore[import-untyped]

    from fsdp_sim.learn.find import load
    from fsdp_sim.learn.statements import misconceptions

    section = ""
    for cell in jupytext.read(master).cells:
        if cell.cell_type == "markdown":
            section = (HEADING.findall(cell.source) or [section])[-1]
            yield from _at(master, section, "text", cell.metadata.get("covers", ()))
        elif name := cell.metadata.get("exercise"):
            yield from _at(master, section, f"exercise {name}", load(name).covers)
        for chapter in SHOWN.findall(cell.source) if cell.cell_type == "code" else ():
            for entry in misconceptions(chapter).entries:
                yield from _at(master, section, "what people say", entry.covers)


def _at(master: Path, section: str, by: str, covers: Iterable[str]) -> Iterator[Lesson]:
    for row in covers:
        yield Lesson(row, master.stem, section, by)
