"""The command: see ``python -m notebooks.masters.slides --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fsdp_sim.learn.classroom.plans import plans
from fsdp_sim.words import nearest
from notebooks.masters import build
from notebooks.masters.slides import chapters, page, pdf
from notebooks.masters.slides import plans as of_plans
from notebooks.masters.slides.deck import Deck

OUT = build.STUDENTS.parent / "build" / "slides"
EXAMPLES = """\
examples:
  python -m notebooks.masters.slides                      every chapter and every plan
  python -m notebooks.masters.slides 05_overlap           one chapter
  python -m notebooks.masters.slides 45-minutes --pdf     a plan, also as PDF

Open a deck in a browser; no network is needed. Space goes on, S opens the notes, F fills the screen.
"""


def chapter_names() -> list[str]:
    """The notebooks of the course that are chapters: 00 to 13."""
    return [master.stem for master in build.masters() if master.stem[:2].isdigit()]


def chosen(names: Sequence[str]) -> list[str]:
    """The decks to make: those named, or all.

    Raises:
        ValueError: there is no deck of a name; the message has the nearest.
    """
    known = [*chapter_names(), *plans()]
    for name in names:
        if name not in known:
            near = nearest(name, known, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"there is no chapter or plan {name!r}; {hint}")
    return [name for name in known if name in names] if names else known


def make(names: Sequence[str], out: Path, *, with_pdf: bool = False) -> list[Deck]:
    """Write the decks of these names.

    Raises:
        ValueError: there is no deck of a name, or a saved notebook is not what its master says.
        RuntimeError: a PDF was asked for, and there is no browser.
        OSError: the folder cannot be written to.
    """
    wanted = chosen(names)
    if with_pdf:
        pdf.browser_path()
    of = {name: plans()[name] for name in wanted if name in plans()}
    needed = dict.fromkeys([name for name in wanted if name not in of])
    needed |= dict.fromkeys(chapter for plan in of.values() for chapter in of_plans.chapters_of(plan))
    total = len(needed) + len(of) + (len(wanted) if with_pdf else 0)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("slides", total=total)
        made: dict[str, Deck] = {}
        for name in sorted(needed):
            progress.update(task, description=name)
            made[name] = chapters.chapter(build.MASTERS / f"{name}.py")
            progress.advance(task)
        for name, plan in of.items():
            progress.update(task, description=name)
            made[name] = of_plans.deck(plan, made)
            progress.advance(task)
        decks = [made[name] for name in wanted]
        pages = page.write(decks, out)
        if with_pdf:
            progress.update(task, description="printing")
            for _ in pdf.write_pdfs(pages):
                progress.advance(task)
    page.write_index(out, decks)
    return decks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m notebooks.masters.slides",
        description="The course as slides with speaker notes. Nothing is executed: outputs are those of the notebooks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="chapters and plans  [default: all]")
    parser.add_argument("--out", type=Path, default=OUT, help="where the decks go  [default: build/slides]")
    parser.add_argument("--pdf", action="store_true", help="print each deck too, with Chromium")
    asked = parser.parse_args(arguments)
    try:
        decks = make(asked.names, asked.out, with_pdf=asked.pdf)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    slides = sum(len(deck.slides) for deck in decks)
    first = asked.out / (f"{decks[0].name}.html" if len(decks) == 1 else "index.html")
    print(f"{len(decks)} {'deck' if len(decks) == 1 else 'decks'}, {slides} slides; open {first}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
