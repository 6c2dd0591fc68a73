"""Why a step takes as long as it does: what compute waits for, what that costs, and what to try."""

from fsdp_sim.diagnose.advice import TIPS
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.diagnosis import diagnose
from fsdp_sim.diagnose.explanation import Explanation, explain
from fsdp_sim.diagnose.findings import Blame, Collective, Diagnosis

__all__ = ["TIPS", "Blame", "Collective", "Culprit", "Diagnosis", "Explanation", "diagnose", "explain"]
