"""How long a cell waits for its ranks: the first `run` of a fresh interpreter, and those that follow.

Each figure comes from a fresh interpreter, which starts the ranks' server, imports torch beside it, as a command does,
and then calls `run` at once. *Ready* means: the process group is initialised and one all-reduce is done on all ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

FIRST_S, LATER_S = 1.5, 0.3  # what 4 ranks may take

IMPORT = """
import time
start_s = time.perf_counter()
import fsdp_sim
print(time.perf_counter() - start_s)
"""
RUNS = """
import json, time
start_s = time.perf_counter()
import fsdp_sim.ranks
fsdp_sim.ranks.start_server()
import torch
imported_s = time.perf_counter() - start_s
def fn():
    pass
calls = [fsdp_sim.ranks.run(fn, {ranks}, progress=False) for _ in range(1 + {later})]
ready_s, wall_s = [call.ready_s for call in calls], [call.wall_s for call in calls]
print(json.dumps({{"import_s": imported_s, "ready_s": ready_s, "wall_s": wall_s}}))
"""


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def measure(ranks: int, later: int, fresh_interpreters: int) -> dict[str, float]:
    """The median over interpreters of the first call, and median and maximum of all later calls of them, in seconds."""
    rows = [json.loads(fresh(RUNS.format(ranks=ranks, later=later))) for _ in range(fresh_interpreters)]
    after = [ready_s for row in rows for ready_s in row["ready_s"][1:]]
    return {
        "import_ranks_s": statistics.median(row["import_s"] for row in rows),
        "first_ready_s": statistics.median(row["ready_s"][0] for row in rows),
        "first_ready_max_s": max(row["ready_s"][0] for row in rows),
        "later_ready_s": statistics.median(after),
        "later_ready_max_s": max(after),
        "later_wall_s": statistics.median(wall_s for row in rows for wall_s in row["wall_s"][1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="world sizes (default: 4 8)")
    parser.add_argument("--later", type=int, default=10, help="calls after the first (default: 10)")
    parser.add_argument("--repeat", type=int, default=3, help="fresh interpreters per world size (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()

    import_s = statistics.median(float(fresh(IMPORT)) for _ in range(options.repeat))
    found = {ranks: measure(ranks, options.later, options.repeat) for ranks in options.ranks}
    if options.json:
        print(json.dumps({"import_fsdp_sim_s": import_s, "ranks": found}, indent=2))
        return
    table = Table("ranks", "import", "first ready", "(max)", "later ready", "(max)", "whole call")
    for ranks, row in found.items():
        table.add_row(str(ranks), *(f"{seconds:.2f} s" for seconds in row.values()))
    console = Console()
    console.print(f"import fsdp_sim: {import_s:.3f} s")
    console.print(table)
    console.print(f"What 4 ranks may take: {FIRST_S} s on the first call, {LATER_S} s on later ones.")


if __name__ == "__main__":
    main()
