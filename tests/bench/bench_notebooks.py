"""What a notebook needs while it runs: seconds, and the most memory of its kernel with all ranks that it starts.

    python -m tests.bench.bench_notebooks                     three chapters, with their exercises solved
    python -m tests.bench.bench_notebooks 05_overlap lab_06_resume

Memory is the kernel's count of what processes hold, with what they share divided among them (PSS): what one learner
adds to a machine that others use too.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import psutil
import tyro
from nbclient import NotebookClient
from rich.console import Console
from rich.table import Table

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LOOK_S = 0.5


def pss_bytes() -> int:
    """Of all processes below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def measured(path: Path) -> tuple[float, int]:
    """Seconds and most bytes of a notebook that is run from its first cell to its last."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    most_bytes, done = 0, threading.Event()

    def look() -> None:
        nonlocal most_bytes
        while not done.wait(LOOK_S):
            most_bytes = max(most_bytes, pss_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    began_s = time.monotonic()
    try:
        client.execute()
    finally:
        done.set()
        thread.join()
    return time.monotonic() - began_s, most_bytes


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = ("00_start_here", "04_the_life_of_a_unit", "07_peak_memory"), /
) -> None:
    """Print seconds and memory of some notebooks, their solutions' editions where there are any."""
    os.environ["FSDP_SIM_PROGRESS"] = str(Path(tempfile.mkdtemp(), "progress.json"))
    table = Table("notebook", "seconds", "most memory, GiB")
    console = Console()
    for name in names:
        solved = NOTEBOOKS / "solutions" / f"{name}.ipynb"
        with console.status(f"running {name}"):
            seconds, most_bytes = measured(solved if solved.exists() else NOTEBOOKS / f"{name}.ipynb")
        table.add_row(name, f"{seconds:.0f}", f"{most_bytes / 2**30:.2f}")
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
