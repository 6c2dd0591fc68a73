"""What the ranks printed, kept apart and folded, and the progress bar while they run."""

from __future__ import annotations

import html
import sys
from pathlib import Path

from tqdm import tqdm

from fsdp_sim.ranks.board import BoardView

SHOWN_BYTES = 200_000  # of each rank's output; the rest is cut from the front


def read(folder: Path, rank: int) -> str:
    """What a rank has printed so far."""
    path = folder / f"rank{rank}.out"
    if not path.exists():
        return ""
    with path.open("rb") as file:
        cut_bytes = max(0, path.stat().st_size - SHOWN_BYTES)
        file.seek(cut_bytes)
        text = file.read(SHOWN_BYTES).decode("utf-8", "replace")
    return f"... {cut_bytes:,} bytes cut ...\n{text}" if cut_bytes else text


class Output(list[str]):
    """One text per rank. Shown in a notebook as one fold per rank, in a terminal with ``[rank r]`` before each line."""

    def __str__(self) -> str:
        return "\n".join(f"[rank {rank}] {line}" for rank, text in enumerate(self) for line in text.splitlines())

    def _repr_html_(self) -> str:
        folds = [
            f"<details><summary>rank {rank}: {len(text.splitlines())} lines</summary>"
            f"<pre>{html.escape(text)}</pre></details>"
            for rank, text in enumerate(self)
            if text.strip()
        ]
        return "".join(folds)

    def show(self) -> None:
        """Display it where the caller is: a notebook or a terminal."""
        if not any(text.strip() for text in self):
            return
        if in_notebook():
            from IPython.display import display

            display({"text/html": self._repr_html_(), "text/plain": str(self)}, raw=True)
        else:
            print(self)


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


class ProgressBar:
    """A progress bar fed from the board: steps if the ranks `track` them, collectives otherwise."""

    def __init__(self, board: BoardView, title: str, shown: bool) -> None:
        self.board = board
        shown = shown and (in_notebook() or sys.stdout.isatty())  # no bar in a log file
        pace = {"delay": 0.3, "mininterval": 0.25}  # seconds
        self.bar = tqdm(desc=title, file=sys.stdout, leave=False, disable=not shown, unit=" collectives", **pace)

    def update(self) -> None:
        total, done = int(self.board.status["total"][0]), int(self.board.status["progress"][0])
        if total and self.bar.total != total:
            self.bar.total, self.bar.unit = total, " steps"
        self.bar.n = done if total else self.board.issued(0)
        self.bar.update(0)

    def close(self) -> None:
        self.bar.close()
