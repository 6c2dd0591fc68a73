"""Counts what a learner meets in each chapter: ``python -m notebooks.masters.counts [NAME ...] [--run]``.

Words, cells, lines of code that are seen at once, figures (of the solutions, whole and on the core path), and minutes:
words at 200 a minute, exercises as their estimates say, and with ``--run`` the cells, executed once.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from fsdp_sim.learn.find import CORE, load
from notebooks.masters.build import FOLDED_CODE, IMAGES, SOLUTIONS, STUDENTS, exercises, masters

WORDS_PER_MINUTE = 200
OF_CORE = {name for names in CORE.values() for name in names}
OPENING = re.compile(r"\*\*Core path[^:]*:\*\* sections ([^a-z]*(?:(?:to|and) \d+[, ]*)*)")
HEADING = re.compile(r"^## (?:(\d+)\. )?|^### Optional\b", re.MULTILINE)


def core_sections(cells: list[Any]) -> set[str]:
    """The numbers of the sections that a chapter's opening names."""
    found = OPENING.search("\n".join(cell.source for cell in cells))
    parts = re.findall(r"(\d+)(?: to (\d+))?", found[1]) if found else []
    return {str(n) for a, b in parts for n in range(int(a), int(b or a) + 1)}


def with_sections(cells: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each cell with the number of its section, or nothing where it has none or is optional."""
    here = ""
    for cell in cells:
        if cell.cell_type == "markdown":
            for heading in HEADING.finditer(cell.source):
                here = heading[1] or ""
        yield here, cell


def counts(master: Path) -> dict[str, int]:
    """What stands in a chapter; minutes without those of its cells."""
    learners, solved = (
        nbformat.read(folder / f"{master.stem}.ipynb", as_version=4) for folder in (STUDENTS, SOLUTIONS)
    )
    code = [cell for cell in learners.cells if cell.cell_type == "code"]
    seen = [
        cell for cell in code if FOLDED_CODE not in cell.metadata.get("tags", []) and "exercise" not in cell.metadata
    ]
    lines = [line for cell in seen for line in cell.source.splitlines() if line.strip()]
    words = sum(len(cell.source.split()) for cell in learners.cells if cell.cell_type == "markdown")
    core = core_sections(solved.cells)
    drawn = [
        here
        for here, cell in with_sections(solved.cells)
        for output in cell.get("outputs", [])
        if IMAGES & output.get("data", {}).keys()
    ]
    asked = exercises(master)
    return {
        "words": words,
        "cells": len(learners.cells),
        "lines of code": len(lines),
        "of imports": sum(line.startswith(("import ", "from ")) for line in lines),
        "figures": len(drawn),
        "of the core path": sum(here in core for here in drawn),
        "minutes to read": round(words / WORDS_PER_MINUTE),
        "exercises": len(asked),
        "minutes for them": sum(load(name).minutes for name in asked),
        "minutes for the core ones": sum(load(name).minutes for name in asked if name in OF_CORE),
    }


def seconds_of_cells(master: Path) -> float:
    """How long the learners' edition runs, everything in it once, its exercises unsolved."""
    kept = tempfile.mkdtemp()
    os.environ |= {"FSDP_SIM_PROGRESS": f"{kept}/progress.json", "FSDP_SIM_MINE": f"{kept}/my_fsdp.py"}
    notebook = nbformat.read(STUDENTS / f"{master.stem}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(STUDENTS)}}).execute()
    runs = [cell.metadata.execution for cell in notebook.cells if cell.cell_type == "code"]
    return sum(at(run["shell.execute_reply"]) - at(run["iopub.status.busy"]) for run in runs)


def at(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="chapters, for example 05_overlap  [default: all]")
    parser.add_argument("--run", action="store_true", help="execute each, and add the minutes of its cells")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for master in masters():
        if master.stem[:2].isdigit() and (not arguments.names or master.stem in arguments.names):
            ran = {"minutes of its cells": f"{seconds_of_cells(master) / 60:.1f}"} if arguments.run else {}
            rows.append({"chapter": master.stem, **counts(master), **ran})
    total = {name: sum(float(row[name]) for row in rows) for name in rows[0] if name != "chapter"}
    rows.append({"chapter": "all", **{name: f"{number:.0f}" for name, number in total.items()}})
    print(*("| " + " | ".join(map(str, line)) + " |" for line in (rows[0], ["---"] * len(rows[0]))), sep="\n")
    print(*("| " + " | ".join(map(str, row.values())) + " |" for row in rows), sep="\n")


if __name__ == "__main__":
    main()
