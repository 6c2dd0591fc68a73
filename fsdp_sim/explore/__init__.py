"""Many simulations for one question: what would make a plan fit, the largest that fits, the best of many."""

from fsdp_sim.explore.changes import changes_that_fit, changes_that_help
from fsdp_sim.explore.largest import LARGEST_OF, LargestFit, largest
from fsdp_sim.explore.pareto import MODEL_NAMES, front_of, pareto
from fsdp_sim.explore.sweep import Sweep, combinations, read_rows, row_of, table

__all__ = [
    "LARGEST_OF",
    "MODEL_NAMES",
    "LargestFit",
    "Sweep",
    "changes_that_fit",
    "changes_that_help",
    "combinations",
    "front_of",
    "largest",
    "pareto",
    "read_rows",
    "row_of",
    "table",
]
