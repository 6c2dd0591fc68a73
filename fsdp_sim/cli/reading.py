"""A bar on stderr while large files are read, in a terminal; it disappears when they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """Gives what readers take as their ``progress``."""
    console = Console(stderr=True)
    columns = (TextColumn("Reading"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def read(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        yield read
