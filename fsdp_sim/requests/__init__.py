"""What the simulator is asked and what it answers, as JSON, and as words of a command line."""

from fsdp_sim.requests.from_json import read_requests
from fsdp_sim.requests.from_texts import request_of_texts
from fsdp_sim.requests.job import MOST_BLOCKS, Asked, check_blocks, choose, understand
from fsdp_sim.requests.results import answer, does_not_fit, said
from fsdp_sim.requests.structs import (
    ALIASES,
    CLUSTER_FIELDS,
    MODEL_FIELDS,
    NAMES,
    PLAN_FIELDS,
    Alive,
    Change,
    Failure,
    Peak,
    Request,
    Result,
    given,
)

__all__ = [
    "ALIASES",
    "CLUSTER_FIELDS",
    "MODEL_FIELDS",
    "MOST_BLOCKS",
    "NAMES",
    "PLAN_FIELDS",
    "Alive",
    "Asked",
    "Change",
    "Failure",
    "Peak",
    "Request",
    "Result",
    "answer",
    "check_blocks",
    "choose",
    "does_not_fit",
    "given",
    "read_requests",
    "request_of_texts",
    "said",
    "understand",
]
