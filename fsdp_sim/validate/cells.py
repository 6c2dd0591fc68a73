"""`Cells`: the cells of one row of measurements, read with errors that say where."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class RowError(ValueError):
    """A row that cannot be understood; says which row and which column."""


class Cells:
    """The cells of one row; of blanks, what its source's configuration says."""

    def __init__(self, line: int, row: dict[str, str]) -> None:
        self.line = line
        self.row = row

    @property
    def id(self) -> str:
        return self.row.get("id") or f"line {self.line}"

    def completed(self, unsaid: Mapping[str, str]) -> Cells:
        """With the cells that are empty as they are given here."""
        return Cells(self.line, self.row | {name: text for name, text in unsaid.items() if not self.row.get(name)})

    def text(self, column: str) -> str:
        return self.row.get(column, "")

    def error(self, what: str) -> RowError:
        return RowError(f"{self._place}: {what}")

    def wrong(self, column: str, what: str) -> RowError:
        return RowError(f"{self._place}, column {column}: {self.row[column]!r} is not {what}")

    def without_place(self, error: RowError) -> str:
        """What an error of this row says, where the row is named beside it."""
        return str(error).removeprefix(self._place).lstrip(":, ")

    @property
    def _place(self) -> str:
        return f"line {self.line} (id {self.row.get('id', '?')})"

    def optional(self, column: str, read: Callable[[str], Any]) -> Any:
        return read(column) if self.text(column) else None

    def whole(self, column: str) -> int:
        try:
            value = int(self.row[column])
        except ValueError:
            value = 0
        if value < 1:
            raise self.wrong(column, "a whole number of at least 1")
        return value

    def number(self, column: str) -> float:
        try:
            value = float(self.row[column])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(column, "a number above 0")
        return value

    def flag(self, column: str, *, default: bool) -> bool:
        text = self.text(column).lower()
        if text not in ("", "true", "false"):
            raise self.wrong(column, "True or False")
        return default if not text else text == "true"

    def word(self, column: str, words: Mapping[str, Any]) -> Any:
        """What a word means; an empty cell is the word ''."""
        text = self.text(column)
        found = {word.lower(): meaning for word, meaning in words.items()}
        if text.lower() not in found and text:
            raise self.wrong(column, f"a word that is known; write one of {', '.join(filter(None, words))}")
        return found.get(text.lower())
