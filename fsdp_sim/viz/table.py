"""A small table of text, for those who would rather read the numbers of a figure."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """A small table of text; nothing in it is taken for HTML."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_html(self) -> str:
        """The table with a caption and scoped headers, every text escaped; the first cell of a row is its header."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        body = "\n".join(
            f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
            for first, *rest in self.rows
        )
        return (
            f"<table>\n<caption>{escape(self.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody>\n</table>"
        )
