"""Tables in HTML: `Table` is one of text beside a figure, `table_html` puts any together, of cells that are HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
        head = row(
            cell(escape(text), f' scope="col"{how}', "th") for text, how in zip(self.header, styles, strict=True)
        )
        rows = []
        for first, *rest in self.rows:
            cells = [cell(escape(text), how) for text, how in zip(rest, styles[1:], strict=True)]
            rows.append(row([cell(escape(first), ' scope="row"', "th"), *cells]))
        return table_html(rows, head, f"<caption>{escape(self.caption)}</caption>", newline="\n")

    def _repr_html_(self) -> str:
        return self.to_html()

    def _is_text(self, column: int) -> bool:
        """Whether most of a column reads as words: numbers line up at the right, words at the left."""
        texts = [texts[column] for texts in self.rows if column < len(texts)]
        return sum(bool(NUMBER.match(text)) for text in texts) * 2 < len(texts)


def cell(html: str, attributes: str = "", tag: str = "td") -> str:
    """A cell; ``attributes`` of its tag begin with a space, as in ``' class="number"'``."""
    return f"<{tag}{attributes}>{html}</{tag}>"


def row(cells: Iterable[str], attributes: str = "") -> str:
    return f"<tr{attributes}>{''.join(cells)}</tr>"


def table_html(rows: Iterable[str], head: str = "", caption: str = "", newline: str = "") -> str:
    """A table of rows, with a row of headers and a ``<caption>`` where there are some: all of them HTML already.

    Args:
        newline: between the parts, for pages that people read as source.
    """
    parts = [caption, f"<thead>{head}</thead>" if head else "", "<tbody>", *rows, "</tbody>"]
    return newline.join(["<table>", *filter(None, parts), "</table>"])
