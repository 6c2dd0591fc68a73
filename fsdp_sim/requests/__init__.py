"""Requests to the simulator and its results, as JSON and as the options of a command line."""

from fsdp_sim.requests.from_json import read_requests
from fsdp_sim.requests.from_texts import request_of_texts, with_config, with_job
from fsdp_sim.requests.job import Job, choose_dtypes, resolve
from fsdp_sim.requests.results import category_name, change_in_words, does_not_fit, on_the_edge, result_of
from fsdp_sim.requests.structs import (
    ALIASES,
    CLUSTER_FIELDS,
    MODEL_FIELDS,
    NAMES,
    PLAN_FIELDS,
    Alive,
    Change,
    ExplainResult,
    Failure,
    FitResult,
    Peak,
    PricedChange,
    Request,
    Result,
    RunAccount,
    TunedPlan,
    TuneResult,
    given,
)

__all__ = [
    "ALIASES",
    "CLUSTER_FIELDS",
    "MODEL_FIELDS",
    "NAMES",
    "PLAN_FIELDS",
    "Alive",
    "Change",
    "ExplainResult",
    "Failure",
    "FitResult",
    "Job",
    "Peak",
    "PricedChange",
    "Request",
    "Result",
    "RunAccount",
    "TuneResult",
    "TunedPlan",
    "category_name",
    "change_in_words",
    "choose_dtypes",
    "does_not_fit",
    "given",
    "on_the_edge",
    "read_requests",
    "request_of_texts",
    "resolve",
    "result_of",
    "with_config",
    "with_job",
]
