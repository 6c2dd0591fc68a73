"""``board()``: where the learner stands, chapter by chapter."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from fsdp_sim.learn import progress
from fsdp_sim.learn.find import CHAPTERS, load, names
from fsdp_sim.learn.progress import Entry, State

SIGNS = {State.OPEN: "○", State.TRIED: "◐", State.PASSED: "✓", State.OPTIMAL: "★", State.SEEN: "◎"}
SOLVED = (State.PASSED, State.OPTIMAL)
LEFT = ' style="text-align:left"'
HEADER = ("Exercise", "Title", "Difficulty", "Minutes", "Tries", "Hints", "State")


@dataclass(frozen=True)
class Row:
    """One exercise on the board."""

    chapter: str
    name: str
    title: str
    difficulty: int
    minutes: int
    entry: Entry

    @property
    def cells(self) -> tuple[str, ...]:
        dots = "●" * self.difficulty + "○" * (5 - self.difficulty)
        state = f"{SIGNS[self.entry.state]} {self.entry.state}"
        return self.name, self.title, dots, str(self.minutes), str(self.entry.tries), f"{self.entry.hints}/3", state


@dataclass(frozen=True, repr=False)
class Board:
    """All exercises and their states, as a table in a notebook and in a terminal."""

    rows: tuple[Row, ...]
    file: str

    @property
    def headline(self) -> str:
        """How many are solved, and how many minutes the others will take."""
        solved = [row for row in self.rows if row.entry.state in SOLVED]
        left = sum(row.minutes for row in self.rows) - sum(row.minutes for row in solved)
        return f"{len(solved)} of {len(self.rows)} exercises solved, about {left} minutes left"

    def __str__(self) -> str:
        columns = zip(HEADER, *(row.cells for row in self.rows), strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = [self.headline]
        for chapter, rows in self._by_chapter().items():
            lines += ["", chapter, *("  ".join(map(str.ljust, row.cells, widths)).rstrip() for row in rows)]
        return "\n".join([*lines, "", f"kept in {self.file}; nothing leaves this machine"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col"{LEFT}>{cell}</th>' for cell in HEADER)
        body = ""
        for chapter, rows in self._by_chapter().items():
            body += f'<tr><th scope="rowgroup" colspan="{len(HEADER)}"{LEFT}>{escape(chapter)}</th></tr>'
            for row in rows:
                first, *rest = (escape(cell) for cell in row.cells)
                cells = "".join(f"<td{LEFT}>{cell}</td>" for cell in rest)
                body += f'<tr><th scope="row"{LEFT}><code>{first}</code></th>{cells}</tr>'
        return (
            f"<table><caption>{escape(self.headline)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
            f"<p>Kept in <code>{escape(self.file)}</code>; nothing leaves this machine.</p>"
        )

    def _by_chapter(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.chapter.replace("_", " "), []).append(row)
        return found


def board(chapter: str = "") -> Board:
    """The progress: of each exercise its difficulty, minutes, tries, hints and state.

    Args:
        chapter: only this one ("memory", "overlap", ...); else all.

    Raises:
        ValueError: there is no such chapter; the message names those that there are.
    """
    if chapter and chapter not in CHAPTERS:
        raise ValueError(f"there is no chapter {chapter!r}; there are {', '.join(CHAPTERS)}")
    kept = progress.read()
    exercises = [load(name) for name, of in names().items() if chapter in ("", of)]
    rows = (Row(e.chapter, e.name, e.title, e.difficulty, e.minutes, kept.get(e.name, Entry())) for e in exercises)
    return Board(tuple(rows), str(progress.path()))
