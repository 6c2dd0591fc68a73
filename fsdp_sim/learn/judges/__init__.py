"""The judges, one for each kind of exercise: data that says what is asked, and how what comes back is graded."""

from fsdp_sim.learn.judges.account import Busiest, Holds, Issues, Sends, Uses
from fsdp_sim.learn.judges.answers import Numbers, Order
from fsdp_sim.learn.judges.claims import Claim
from fsdp_sim.learn.judges.exposure import Hides
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.learn.judges.ranks import Inputs, OnRanks

__all__ = [
    "BestPlan",
    "Busiest",
    "Claim",
    "Hides",
    "Holds",
    "Inputs",
    "Issues",
    "Numbers",
    "OnRanks",
    "Order",
    "Sends",
    "Uses",
]
