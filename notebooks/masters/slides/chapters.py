"""A chapter as a deck: which cells become slides, and what of their prose is said.

A great lecturer does not read out. So a slide holds a question, a figure, a short piece of code with what it printed, a
table or an exercise; paragraphs are in the notes of what they explain. A cell of a master may overrule this by
``slideshow={"slide_type": ...}``: ``skip`` shows nothing of it, ``notes`` says it, ``slide`` shows it as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat

from fsdp_sim.learn.predictions import load as load_prediction
from notebooks.masters import build, exercise_cells
from notebooks.masters.slides import words
from notebooks.masters.slides.cells import shown
from notebooks.masters.slides.deck import Deck, Slide

LONGEST_HEADLINE, LONGEST_LEAD = 88, 240  # characters
REMEMBER = "What you have seen"
WAIT = "Let everybody write down an answer first. Half a minute, then a show of hands; do not tell yet."
RESTLESS = (
    "Now", "Below", "Here", "Next", "With ", "Look", "Then", "So ", "And ", "But ", "In ", "On ", "Your", "What",
    "This", "That", "These", "It ", "They", "Above",
)  # fmt: skip
"""How sentences begin that lead on: no headlines."""


def chapter(master: Path) -> Deck:
    """The deck of a chapter.

    Raises:
        ValueError: the code of the saved notebook is not that of its master.
    """
    try:
        notebook = build.with_outputs(edition(master.stem), build.told(master.stem), f"{master.stem}.ipynb")
    except ValueError as error:
        raise ValueError(f"{error} (make notebooks), then make its slides") from None
    slides = slides_of(notebook.cells, master.stem.split("_")[0])
    return Deck(master.stem, words.plain(slides[0].title), slides)


def slides_of(cells: Sequence[nbformat.NotebookNode], chapter: str) -> tuple[Slide, ...]:
    """The slides of the cells of a notebook, in order.

    Args:
        chapter: its number, two digits.
    """
    maker = _Maker(chapter)
    for index, cell in enumerate(cells):
        maker.take(index, cell)
    return tuple(with_something_to_say(slide) for slide in maker.slides)


@functools.cache
def edition(name: str) -> nbformat.NotebookNode:
    """The students' edition of a master, with all its answers, without outputs."""
    return build.edition(build.MASTERS / f"{name}.py", solutions=False, folds=False)


def with_something_to_say(slide: Slide) -> Slide:
    """The slide, with notes even where the chapter says nothing about it."""
    if slide.notes:
        return slide
    return slide.with_notes(slide.alt or "Let them read it before you go on.")


class _Maker:
    """Goes through the cells of a notebook, and keeps the slides so far and where it is."""

    def __init__(self, chapter: str) -> None:
        self.chapter = chapter
        self.section, self.heading = chapter, ""
        self.slides: list[Slide] = []
        self.headline = True  # whether the next sentence of prose may become that of the slide before

    def take(self, index: int, cell: nbformat.NotebookNode) -> None:
        how = cell.metadata.get("slideshow", {}).get("slide_type", "")
        if how == "skip" or cell.source.startswith("### Exercise:"):
            return
        if cell.cell_type == "markdown":
            for block in words.blocks(cell.source):
                self._prose(index, block, how)
        elif "predict" in cell.metadata:
            self._choices(load_prediction(cell.metadata["predict"]).choices)
        elif how != "notes":
            made = list(shown(cell, self.heading, as_it_is=how == "slide"))
            for slide in made:
                self._show_slide(replace(slide, cell=index))
            self.headline = bool(made) and made[-1].kind == "output"

    def _show_slide(self, slide: Slide) -> None:
        """A slide of the section, with where one is above its headline."""
        number = self.section.removeprefix(f"{self.chapter}.")
        where = f"{int(self.chapter)}.{number} · {self.heading}" if number.isdigit() else self.heading
        self._add(replace(slide, section=self.section, over=slide.over or where))

    def _prose(self, index: int, block: str, how: str) -> None:
        level, heading = words.heading(block)
        if level == 1:
            over = f"Learn FSDP · chapter {int(self.chapter)}"
            self._add(Slide("title", words.inline(heading), over=over, cell=index))
        elif level == 2:
            self._begin(heading, index)
        elif level or (not self.slides):
            return
        elif how == "slide" or words.is_code(block) or words.is_table(block):
            self._show(block, index)
        elif self.slides[-1].kind == "list" and words.is_list(block) and not self.slides[-1].body:
            self._change(body=f'<div class="fit">{words.html(block)}</div>')
            self._say(block)
        else:
            self._paragraph(block, index)

    def _begin(self, heading: str, index: int) -> None:
        """A section: its slide waits for a question, or for what is to be remembered."""
        numbered = re.match(r"(\d+)\. (.+)", heading)
        name = numbered[1] if numbered else "lab" if heading.startswith("Lab") else ""
        self.section = f"{self.chapter}.{name}" if name else self.chapter
        self.heading = words.inline(numbered[2] if numbered else heading)
        kind = "list" if heading == REMEMBER else "section"
        over = "To remember" if kind == "list" else f"{int(self.chapter)}.{name}" if numbered else "Lab"
        title = re.sub(r"^Lab: (\w)", lambda m: m[1].upper(), self.heading)
        self._add(Slide(kind, title, over=over, section=self.section, cell=index))

    def _show(self, block: str, index: int) -> None:
        """A drawing in letters, a table or a paragraph, on a slide of its own."""
        if words.is_code(block):
            lines = [line for line in block.splitlines() if not line.startswith("```")]
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            body = words.preformatted("\n".join(line[indent:] for line in lines), "drawing")
        else:
            body = f'<div class="fit">{words.html(block)}</div>'
        kind = "table" if words.is_table(block) else "text"
        self._show_slide(Slide(kind, self.heading, body, cell=index))

    def _choices(self, choices: Sequence[str]) -> None:
        """Between what to choose, below the question that was asked last."""
        if choices:
            items = "".join(f"<li>{words.inline(choice)}</li>" for choice in choices)
            self._change(body=f'{self.slides[-1].body}<ol class="choices">{items}</ol>')

    def _paragraph(self, block: str, index: int) -> None:
        last = self.slides[-1]
        if block.startswith(exercise_cells.PREDICT):
            body = f'<p class="question">{words.inline(block.removeprefix(exercise_cells.PREDICT))}</p>'
            self._show_slide(Slide("question", "Predict", body, cell=index))
            self._say(WAIT)
            return
        if last.kind in ("title", "section") and not last.body and not last.notes:
            first = words.sentences(block)[0]
            if len(first) <= LONGEST_LEAD:
                self._change(body=f"<p>{words.inline(first)}</p>")
        elif self.headline and last.kind == "output" and (sentence := headline(block)):
            self._change(title=words.inline(sentence))
        self.headline = False
        self._say(block)

    def _add(self, slide: Slide) -> None:
        self.slides.append(slide)
        self.headline = False

    def _change(self, **fields: Any) -> None:
        self.slides[-1] = replace(self.slides[-1], **fields)

    def _say(self, text: str) -> None:
        if text:
            self._change(notes=(*self.slides[-1].notes, text))


def headline(paragraph: str) -> str:
    """The first sentence, if it says what was seen and is short enough to stand above it."""
    if words.is_list(paragraph):
        return ""
    sentence = words.sentences(paragraph)[0]
    fits = 12 <= len(sentence) <= LONGEST_HEADLINE and not sentence.lstrip("*_").startswith(RESTLESS)
    return re.sub(r"\.(\*{0,2})$", r"\1", sentence) if fits and not sentence.endswith((":", "?")) else ""
