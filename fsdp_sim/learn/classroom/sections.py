"""The course's notebooks by chapter and section: ``05.3`` is the heading "## 3." of notebook 05.

``05.lab`` is its lab, ``05`` the whole notebook, ``lab_04`` the notebook of lab 4. Read from the masters, as text.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from fsdp_sim.learn.coverage import masters, notebooks

TITLE = re.compile(r"^# # (.+)$", re.MULTILINE)
HEADING = re.compile(r"^# ## (?:(\d+)\. )?(.+)$", re.MULTILINE)
EXERCISE = re.compile(r'^# %% .*exercise="(\w+)"', re.MULTILINE)


class NotebookSection(NamedTuple):
    """A part of a notebook.

    Attributes:
        name: ``05.3``, ``05.lab``, ``05`` or ``lab_04``.
        notebook: the file's name, without its ending.
        heading: as it stands there, with its number.
        text: of the master: words and code.
    """

    name: str
    notebook: str
    heading: str
    text: str

    @property
    def exercises(self) -> tuple[str, ...]:
        """The exercises that stand in it, in order."""
        return tuple(EXERCISE.findall(self.text))

    def link(self, root: str) -> str:
        """It as a link of Markdown, for a page from which ``root`` leads to the notebooks."""
        return f"[{self.name} {self.heading}]({root}/{self.notebook}.ipynb)"


def sections_of(master: Path) -> list[NotebookSection]:
    """The sections of one master: the whole first, then those with a number, and the lab."""
    text, notebook = master.read_text(encoding="utf-8"), master.stem
    chapter = "_".join(notebook.split("_")[: 2 if notebook.startswith("lab_") else 1])
    title = TITLE.search(text)
    found = [NotebookSection(chapter, notebook, title[1] if title else notebook, text)]
    headings = list(HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    for heading, end in zip(headings, ends, strict=False):
        body = text[heading.start() : end]
        number, words = heading.groups()
        if number:
            found.append(NotebookSection(f"{chapter}.{number}", notebook, words, body))
        if words.startswith("Lab:"):
            found.append(NotebookSection(f"{chapter}.lab", notebook, words, body))
    return found


@functools.cache
def sections() -> dict[str, NotebookSection]:
    """All sections by name, in the order of the course.

    Raises:
        ValueError: this is no checkout.
    """
    return {section.name: section for master in notebooks(masters()) for section in sections_of(master)}


@functools.cache
def section_of_exercises() -> dict[str, NotebookSection]:
    """The section in which each exercise stands; the notebook's where it stands before the first heading."""
    return {name: section for section in sections().values() for name in section.exercises}


def instructor() -> Path:
    """The folder of the instructor's kit.

    Raises:
        ValueError: this is no checkout.
    """
    return masters().parent / "instructor"
