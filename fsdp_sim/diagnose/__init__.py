"""Why a step takes as long as it does: what compute waits for, what that costs, and what to try."""

from fsdp_sim.diagnose.advice import TIPS
from fsdp_sim.diagnose.causes import Cause, Key, PathPiece
from fsdp_sim.diagnose.critical_path import RunCauses, critical_path_of_run
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.diagnosis import diagnose
from fsdp_sim.diagnose.explanation import Explanation, explain
from fsdp_sim.diagnose.findings import Blame, CollectiveCost, Diagnosis
from fsdp_sim.diagnose.links import Chain, Links, chain, critical_path
from fsdp_sim.diagnose.shown import COLUMNS, cells, main_blames, shown, totals

__all__ = [
    "COLUMNS",
    "TIPS",
    "Blame",
    "Cause",
    "Chain",
    "CollectiveCost",
    "Culprit",
    "Diagnosis",
    "Explanation",
    "Key",
    "Links",
    "PathPiece",
    "RunCauses",
    "cells",
    "chain",
    "critical_path",
    "critical_path_of_run",
    "diagnose",
    "explain",
    "main_blames",
    "shown",
    "totals",
]
