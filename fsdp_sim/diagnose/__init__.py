"""Why a step takes as long as it does: what compute waits for, what that costs, and what to try."""

from fsdp_sim.diagnose.advice import BUSY, TIPS
from fsdp_sim.diagnose.against import Against, OperationChange, Part, against
from fsdp_sim.diagnose.causes import Cause, Key, PathPiece
from fsdp_sim.diagnose.critical_path import RunCauses, critical_path_of_run
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.diagnosis import diagnose, diagnosis_of
from fsdp_sim.diagnose.explained_run import explain
from fsdp_sim.diagnose.explanation import Explanation, between_steps
from fsdp_sim.diagnose.findings import Blame, CollectiveCost, Diagnosis, Lateness, PathShare, RankTimes, Straggler
from fsdp_sim.diagnose.links import Chain, Links, chain, critical_path
from fsdp_sim.diagnose.look import StepObservation, look
from fsdp_sim.diagnose.memory import MemoryFound, beside_prediction, memory_found
from fsdp_sim.diagnose.ranks_in_words import RANK_COLUMNS, path_sentence, rank_cells, ranks_sentence, ranks_to_show
from fsdp_sim.diagnose.shown import COLUMNS, cells, main_blames, shown, totals

__all__ = [
    "BUSY",
    "COLUMNS",
    "RANK_COLUMNS",
    "TIPS",
    "Against",
    "Blame",
    "Cause",
    "Chain",
    "CollectiveCost",
    "Culprit",
    "Diagnosis",
    "Explanation",
    "Key",
    "Lateness",
    "Links",
    "MemoryFound",
    "OperationChange",
    "Part",
    "PathPiece",
    "PathShare",
    "RankTimes",
    "RunCauses",
    "StepObservation",
    "Straggler",
    "against",
    "beside_prediction",
    "between_steps",
    "cells",
    "chain",
    "critical_path",
    "critical_path_of_run",
    "diagnose",
    "diagnosis_of",
    "explain",
    "look",
    "main_blames",
    "memory_found",
    "path_sentence",
    "rank_cells",
    "ranks_sentence",
    "ranks_to_show",
    "shown",
    "totals",
]
