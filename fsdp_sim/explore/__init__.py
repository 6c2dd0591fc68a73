"""Many simulations for one question: what would make a plan fit, the largest that fits, the best of many, the
fastest plan."""

from fsdp_sim.explore.answer import Advice, advice, answer, to_fit
from fsdp_sim.explore.changes import changes_that_fit, changes_that_help
from fsdp_sim.explore.explain_run import Account, Measured, RunExplained, explain_run
from fsdp_sim.explore.largest import LARGEST_OF, LargestFit, largest
from fsdp_sim.explore.pareto import MAY_FIT, MODEL_NAMES, RUNS, front_of, pareto
from fsdp_sim.explore.processes import HERE, Processes
from fsdp_sim.explore.space import LEVERS, Space, space_of
from fsdp_sim.explore.suspects import Suspect
from fsdp_sim.explore.sweep import (
    Sweep,
    combinations,
    counted,
    notes_of,
    played_front,
    read_rows,
    results,
    row_of,
    table,
    write_rows,
)
from fsdp_sim.explore.tune import Candidate, Tuned, Worth, tune

__all__ = [
    "HERE",
    "LARGEST_OF",
    "LEVERS",
    "MAY_FIT",
    "MODEL_NAMES",
    "RUNS",
    "Account",
    "Advice",
    "Candidate",
    "LargestFit",
    "Measured",
    "Processes",
    "RunExplained",
    "Space",
    "Suspect",
    "Sweep",
    "Tuned",
    "Worth",
    "advice",
    "answer",
    "changes_that_fit",
    "changes_that_help",
    "combinations",
    "counted",
    "explain_run",
    "front_of",
    "largest",
    "notes_of",
    "pareto",
    "played_front",
    "read_rows",
    "results",
    "row_of",
    "space_of",
    "table",
    "to_fit",
    "tune",
    "write_rows",
]
