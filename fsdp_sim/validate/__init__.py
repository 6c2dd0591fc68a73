"""Is the simulator true? Published measurements in, errors and fitted numbers out."""

from fsdp_sim.validate.cells import RowError
from fsdp_sim.validate.errors import PredictedRow, Summary, summaries, summary
from fsdp_sim.validate.leave_out import FREE, GROUPS, HeldOut, fitting_rows, leave_out, other_rows
from fsdp_sim.validate.predict import compare, prediction
from fsdp_sim.validate.published import FITTED_SOURCE, PublishedRun, Refused, published, read_csv
from fsdp_sim.validate.refit import refit_all

__all__ = [
    "FITTED_SOURCE",
    "FREE",
    "GROUPS",
    "HeldOut",
    "PredictedRow",
    "PublishedRun",
    "Refused",
    "RowError",
    "Summary",
    "compare",
    "fitting_rows",
    "leave_out",
    "other_rows",
    "prediction",
    "published",
    "read_csv",
    "refit_all",
    "summaries",
    "summary",
]
