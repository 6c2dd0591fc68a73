"""What a deck is: slides with notes, each of a section of the course."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

WIDTH_PX, HEIGHT_PX = 1920, 1080
"""The size slides are laid out in; a browser scales it to its screen."""


@dataclass(frozen=True)
class Slide:
    """One slide.

    Attributes:
        kind: how it is laid out: title, section, question, figure, output, table, exercise, list, text or break.
        title: its headline, in Markdown.
        body: what is below it, as HTML.
        over: a few words above the headline: where one is.
        figure: as plotly's JSON, laid out for a slide.
        alt: the figure in words, for those who cannot see it.
        notes: what is said, as paragraphs of Markdown.
        section: where the course has it, such as ``05.3``; empty for what no section has.
        cell: the number of the cell of the notebook that it shows, -1 if it shows none.
    """

    kind: str
    title: str
    body: str = ""
    over: str = ""
    figure: dict[str, Any] | None = field(default=None, repr=False)
    alt: str = ""
    notes: tuple[str, ...] = ()
    section: str = ""
    cell: int = -1

    @property
    def asks(self) -> bool:
        """Whether the room is to do something before it is shown more."""
        return self.kind in ("section", "question", "exercise")

    def with_notes(self, *before: str) -> Slide:
        """The slide with more to say, before what there is."""
        return replace(self, notes=(*(text for text in before if text), *self.notes))


@dataclass(frozen=True)
class Deck:
    """Slides in order; the name is that of the files it is written to."""

    name: str
    title: str
    slides: tuple[Slide, ...]
