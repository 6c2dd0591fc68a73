"""A small table of text, for those who would rather read the numbers of a figure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

NUMBER = re.compile(r"[-+−]?[\d.]|$")  # with a unit after it, or nothing at all
LEFT = ' style="text-align:left"'


@dataclass(frozen=True)
class Table:
    """A small table of text; nothing in it is taken for HTML."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_html(self) -> str:
        """The table with a caption and scoped headers, every text escaped; the first cell of a row is its header."""
        styles = [LEFT if self._is_text(column) else "" for column in range(len(self.header))]
        head = "".join(
            f'<th scope="col"{how}>{escape(cell)}</th>' for cell, how in zip(self.header, styles, strict=True)
        )
        body = "\n".join(
            f'<tr><th scope="row">{escape(first)}</th>'
            + "".join(f"<td{how}>{escape(cell)}</td>" for cell, how in zip(rest, styles[1:], strict=True))
            + "</tr>"
            for first, *rest in self.rows
        )
        return (
            f"<table>\n<caption>{escape(self.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody>\n</table>"
        )

    def _is_text(self, column: int) -> bool:
        """Whether most of a column reads as words: numbers line up at the right, words at the left."""
        cells = [row[column] for row in self.rows if column < len(row)]
        return sum(bool(NUMBER.match(cell)) for cell in cells) * 2 < len(cells)
