"""Is the simulator true? Published measurements in, errors and fitted numbers out."""

from fsdp_sim.validate.errors import PredictedRow, Summary, summaries, summary
from fsdp_sim.validate.fitting import FREE
from fsdp_sim.validate.leave_out import GROUPS, HeldOut, fitting_rows, leave_out, refit
from fsdp_sim.validate.predict import compare, prediction
from fsdp_sim.validate.published import FITTED_SOURCE, PublishedRun, RowError, read_csv

__all__ = [
    "FITTED_SOURCE",
    "FREE",
    "GROUPS",
    "HeldOut",
    "PredictedRow",
    "PublishedRun",
    "RowError",
    "Summary",
    "compare",
    "fitting_rows",
    "leave_out",
    "prediction",
    "read_csv",
    "refit",
    "summaries",
    "summary",
]
