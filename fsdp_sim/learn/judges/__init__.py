"""The judges, one for each kind of exercise: data that says what is asked, and how what comes back is graded.

`fsdp_sim.learn.judges.plans.BestPlan` is imported from its file: it brings the simulator, which no other judge needs.
"""

from fsdp_sim.learn.judges.account import BusiestRankBytes, BytesSent, CollectiveOrder, OnlyCollectives, PeakBytes
from fsdp_sim.learn.judges.answers import Numbers, OperationOrder
from fsdp_sim.learn.judges.claims import Claim
from fsdp_sim.learn.judges.exposure import ExposedTime
from fsdp_sim.learn.judges.files import InFiles
from fsdp_sim.learn.judges.ranks import Inputs, OnRanks

__all__ = [
    "BusiestRankBytes",
    "BytesSent",
    "Claim",
    "CollectiveOrder",
    "ExposedTime",
    "InFiles",
    "Inputs",
    "Numbers",
    "OnRanks",
    "OnlyCollectives",
    "OperationOrder",
    "PeakBytes",
]
