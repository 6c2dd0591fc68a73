"""Rows of title, text and headline, as in WikiHow: the text of an article and the summary that a model is to write.

WikiHow itself (wikihowAll.csv; Koupaee and Wang 2018) is a download of its own. Offline the same columns are filled
from what is on every machine with torch: the docstrings of `torch.distributed` (its top folder and fsdp). The first
sentence of a docstring is its headline, the rest its text, the function its title.
"""

from __future__ import annotations

import ast
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch.distributed

COLUMNS = ("headline", "title", "text")
MIN_TEXT = 80  # characters; shorter ones have nothing to summarise


@dataclass(frozen=True)
class Article:
    """One row."""

    headline: str
    title: str
    text: str


def read_csv(path: Path) -> list[Article]:
    """The rows of a file with the columns headline, title and text; rows without a headline or a text are left out.

    Raises:
        ValueError: a column is missing, or no row is left. OSError: it cannot be read.
    """
    csv.field_size_limit(sys.maxsize)  # articles are long
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
            raise ValueError(f"{path.name} has no column {missing[0]}; WikiHow's are {', '.join(COLUMNS)}")
        rows = [Article(*(" ".join((row[column] or "").split()) for column in COLUMNS)) for row in reader]
    rows = [row for row in rows if row.headline and row.text]
    if not rows:
        raise ValueError(f"{path.name} has no row with a headline and a text")
    return rows


def documentation() -> list[Article]:
    """The docstrings, in the order of files and lines."""
    return [article for article, _ in _documented()]


def code_and_prose() -> list[tuple[str, int]]:
    """The same functions in pieces, each with what it is: 0 code, 1 prose. As many of each."""
    return [piece for article, code in _documented() for piece in ((code, 0), (article.text, 1))]


@cache
def _documented() -> tuple[tuple[Article, str], ...]:
    root = Path(torch.distributed.__file__).parent
    paths = [*sorted(root.glob("*.py")), *sorted((root / "fsdp").rglob("*.py"))]
    return tuple(pair for path in paths for pair in _docstrings(path))


def _docstrings(path: Path) -> Iterator[tuple[Article, str]]:
    """Each function with a docstring worth a summary, and its code without it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)) or len(node.body) < 2:
            continue
        headline, _, text = " ".join(doc.split()).partition(". ")
        if len(text) >= MIN_TEXT:
            code = " ".join(ast.unparse(ast.Module(node.body[1:], [])).split())
            yield Article(f"{headline}.", node.name, text), code
