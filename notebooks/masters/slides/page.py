"""A deck as files: a page that needs no network, and the notes to print beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from notebooks.masters.slides import words
from notebooks.masters.slides.cells import number_of_lines
from notebooks.masters.slides.deck import Deck

HERE = Path(__file__).parent
DARK = ("title", "section", "question", "break")
DARK_PAPER = "#0B2438"
REVEAL = ("dist/reset.css", "dist/reveal.css", "dist/reveal.js", "plugin/notes/notes.js", "LICENSE")


def write(decks: Iterable[Deck], out: Path) -> list[Path]:
    """Write decks, their notes and, once, what they share; return the pages.

    Raises:
        OSError: the folder cannot be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_assets(out / "assets")
    written = []
    for deck in decks:
        page = out / f"{deck.name}.html"
        page.write_text(html(deck), encoding="utf-8")
        (out / f"{deck.name}.notes.md").write_text(notes(deck), encoding="utf-8")
        written.append(page)
    return written


def write_assets(folder: Path) -> None:
    """reveal.js as sphinx-revealjs ships it, plotly.js as plotly does, and how slides look and are drawn."""
    folder.mkdir(exist_ok=True)
    reveal = files("sphinx_revealjs") / "_static" / "revealjs"
    for name in REVEAL:
        target = folder / ("reveal.LICENSE" if name == "LICENSE" else Path(name).name)
        target.write_bytes(reveal.joinpath(*name.split("/")).read_bytes())
    (folder / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    shutil.copy(HERE / "deck.js", folder)
    style = (HERE / "deck.css").read_text(encoding="utf-8")
    (folder / "deck.css").write_text(f"{style}\n{words.code_style()}\n", encoding="utf-8")


def html(deck: Deck) -> str:
    """The page of a deck."""
    templates = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    templates.filters |= {"content": _content, "notes": _notes, "lines": _lines}
    return templates.get_template("deck.html.j2").render(deck=deck, dark=DARK, dark_paper=DARK_PAPER)


def _content(figure: dict[str, Any]) -> Markup:
    """A figure as JSON of which no text can end the script it stands in."""
    return Markup(json.dumps(figure).replace("<", "\\u003c"))


def _lines(title: str) -> int:
    return number_of_lines(words.plain(title))


def _notes(paragraphs: Sequence[str]) -> Markup:
    return Markup("\n".join(map(words.html, paragraphs)))


def notes(deck: Deck) -> str:
    """The notes of a deck as a page of Markdown, slide by slide, to print."""
    parts = [f"# {deck.title}", "What to say, slide by slide. In the slides themselves: press S."]
    for number, slide in enumerate(deck.slides, start=1):
        asked = [f"> {words.plain(slide.body)}"] if "question" in slide.body else []
        parts += [f"## {number}. {words.plain(slide.title)}", *asked, *slide.notes]
    return "\n\n".join(parts) + "\n"


def write_index(out: Path, decks: Sequence[Deck]) -> Path:
    """A page that lists the decks."""
    rows = "\n".join(
        f'<li><a href="{deck.name}.html">{escape(deck.name)}: {escape(deck.title)}</a> '
        f'({len(deck.slides)} slides, <a href="{deck.name}.notes.md">notes</a>)</li>'
        for deck in decks
    )
    path = out / "index.html"
    path.write_text(
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Learn FSDP: slides</title>
<style>body {{ font: 18px/1.7 system-ui, sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem; }}</style>
</head><body><h1>Learn FSDP: slides</h1>
<p>Space goes on, S opens the notes, F fills the screen, Esc shows all slides, ? the other keys.</p>
<ul>{rows}</ul></body></html>
""",
        encoding="utf-8",
    )
    return path
