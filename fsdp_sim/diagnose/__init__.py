"""Why communication is not overlapped, found in a timeline: the culprits, what they cost, and what to try."""

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.diagnosis import diagnose
from fsdp_sim.diagnose.findings import Blame, Collective, Diagnosis

__all__ = ["Blame", "Collective", "Culprit", "Diagnosis", "diagnose"]
