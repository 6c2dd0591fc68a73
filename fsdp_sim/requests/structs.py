"""The JSON of the simulator: `Request`, `Result` and what they consist of.

The fields of models, clusters and plans are taken from `fsdp_sim.spec`, so that a new one is there at once.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fsdp_sim.spec import Cluster, Model, Plan


def _fields_of(name: str, spec: type, skip: tuple[str, ...] = ()) -> Any:
    """A struct with the fields of a spec, all optional: which are needed depends on the rest of the request."""
    hints = get_type_hints(spec)
    hints |= {key: str | None for key in ("intra", "inter", "host") if key in hints}  # in JSON a link is its name
    if "gpu" in hints:
        hints["gpu"] = str
    fields = [
        (f.name, Annotated[hints[f.name], Meta(description=f.metadata["allowed"].words)] | UnsetType, UNSET)
        for f in dataclasses.fields(spec)
        if f.name not in skip
    ]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, kw_only=True)


_Plan: Any = _fields_of("PlanFields", Plan)
_Cluster: Any = _fields_of("ClusterFields", Cluster)
_Model: Any = _fields_of("ModelFields", Model)


class PlanFields(_Plan, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """Fields of `Plan`."""


class ModelFields(_Model, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """A model by its dimensions. ``preset`` starts from a published model, of which the other fields replace theirs."""

    preset: str | UnsetType = UNSET


class Request(_Cluster, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """One training step to predict.

    Attributes:
        model: a name of the catalogue, or dimensions.
        cluster: a cluster file, as ``fsdp-sim calibrate`` writes it; other fields of the cluster replace its own.
        plan: fields of `Plan`. What is not given has torch's default; but FSDP without dtypes, on GPUs that have bf16,
            gathers and computes in bf16 and reduces in fp32.
        notes: what whoever made the request has to say of it; among the result's.
        id: anything; comes back with the result.
    """

    model: str | ModelFields | UnsetType = UNSET
    cluster: str | UnsetType = UNSET
    plan: PlanFields | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
    id: str | int | UnsetType = UNSET


class FitRequest(Request, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """A search for the largest that fits: a request without the field that is searched for.

    Attributes:
        largest: model, layers, micro-batch or seq-len.
        multiple_of: the answer is a multiple of it.
        family: of a model: how its name begins.
    """

    largest: str = "micro-batch"
    multiple_of: int | UnsetType = UNSET
    family: str = ""


class Alive(msgspec.Struct, frozen=True):
    """Part of the memory that is alive at the peak."""

    category: str
    unit: str
    bytes: int


class Peak(msgspec.Struct, frozen=True):
    """The moment at which most memory is alive.

    Attributes:
        phase, operation: what was being issued.
        seconds: when, from the start of the step.
        by_category: bytes, largest first.
        largest: the largest parts by category and unit, largest first.
    """

    phase: str
    operation: str
    seconds: float | None
    by_category: dict[str, int]
    largest: list[Alive]


class Change(msgspec.Struct, frozen=True):
    """A change to the request; it has been simulated, and there is room for it.

    Attributes:
        set: fields of the cluster and the plan and their new values.
        what: the same in words.
        step_time_s, tokens_per_s_per_gpu, peak_memory_bytes: with it.
        fit: "fits" or "on the edge" of memory.
    """

    set: dict[str, Any]
    what: str
    step_time_s: float
    tokens_per_s_per_gpu: float
    peak_memory_bytes: int
    fit: str


class Result(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The predicted cost of one training step. Seconds and bytes, per rank; ``mfu`` is a fraction.

    Attributes:
        id: the request's.
        model, parameters, gpu, gpus, nodes: what it was for.
        plan: every field, defaults included.
        tokens_per_step: over all GPUs.
        step_time_interval_s: between which seconds ``step_time_s`` lies, four times in five.
        between_steps_s: of ``step_time_s``, what is no operation of the program: data, clipping and logging, fitted,
            and checkpoints.
        checkpoint_s: of it, what checkpoints take, on average.
        exposed_comm_s: communication while nothing is computed.
        fits: it runs; ``fit`` says whether it fits, is on the edge of memory, or does not fit.
        peak_memory_bytes: allocated. ``reserved_memory_bytes``: held by the caching allocator.
        memory_limit_bytes: what a process can use of the GPU's memory.
        host_memory_bytes: what a rank offloads to its CPU's memory.
        notes: what was chosen because the request does not say, what is unverified, which settings change nothing.
        explanation: why the step takes as long as it does.
        error: why the request cannot be carried out: it does not fit.
        would_fit: if it does not fit or is on the edge: changes that make it fit, the fastest first.
        would_help: if it runs and is explained: advice against what compute waits for that was simulated and makes
            training faster, the best first.
    """

    id: str | int | UnsetType = UNSET
    model: str
    parameters: int
    gpu: str
    gpus: int
    nodes: int
    plan: dict[str, Any]
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    tokens_per_step: int
    tokens_per_s_per_gpu: float
    mfu: float
    between_steps_s: float
    checkpoint_s: float = 0.0
    exposed_comm_s: float
    fits: bool
    fit: str
    peak_memory_bytes: int
    reserved_memory_bytes: int
    memory_limit_bytes: int
    host_memory_bytes: int
    peak: Peak
    notes: list[str]
    explanation: list[str] | UnsetType = UNSET
    error: str | UnsetType = UNSET
    would_fit: list[Change] | UnsetType = UNSET
    would_help: list[Change] | UnsetType = UNSET


class FitResult(msgspec.Struct, omit_defaults=True):
    """The largest that fits. Both ``fits`` and ``too_large`` were simulated.

    Attributes:
        largest: what was asked for: model, layers, micro-batch or seq-len.
        value: the answer; null if none fits.
        answer, limit: the answer and what limits it, in words.
        fits: the result at ``value``.
        next: the next larger one, which does not fit; null if something else than memory ends the search.
        too_large: the result at ``next``, with the changes that would make it fit.
        notes: what was chosen because the request does not say, what is unverified, which settings change nothing.
    """

    largest: str
    value: int | str | None
    answer: str
    limit: str
    notes: list[str]
    fits: Result | None = None
    next: int | str | None = None
    too_large: Result | None = None


class RunAccount(msgspec.Struct, frozen=True):
    """One way to account for what a log says: the run with some settings unlike its configuration, simulated.

    Attributes:
        names: of what differs; none is the run as its configuration says.
        check: how to see each.
        likelihood: the share among all that were simulated.
        off: of each measured number, by how many standard deviations the prediction is off.
    """

    what: str
    names: list[str]
    check: list[str]
    likelihood: float
    step_time_s: float
    peak_memory_bytes: int
    reserved_memory_bytes: int
    off: dict[str, float]


class ExplainResult(msgspec.Struct, kw_only=True):
    """Accounts of a run, the likeliest first.

    Attributes:
        measured: what the log says, in seconds and bytes.
        is_explained: whether one that is at all likely predicts each number to within two standard deviations.
        decides: the measurement that tells the first two apart best: ``what``, what either predicts (``first``,
            ``second``), and by how many standard deviations they are ``apart``, null where it is a look that says it
            outright; null where there is one account alone.
        simulations: how many accounts were simulated.
    """

    measured: dict[str, float]
    is_explained: bool
    accounts: list[RunAccount]
    decides: dict[str, str | float | None] | None
    simulations: int
    notes: list[str]


class TunedPlan(msgspec.Struct, frozen=True):
    """A plan that was simulated.

    Attributes:
        set: fields in which it differs from the start, with their values.
        fits: with a margin; on the edge of memory does not count. ``fit`` tells that from what does not fit.
    """

    set: dict[str, Any]
    step_time_s: float
    tokens_per_s_per_gpu: float
    peak_memory_bytes: int
    fits: bool
    fit: str


class PricedChange(msgspec.Struct, frozen=True):
    """One change in the best plan, and the best plan without it, simulated."""

    before: dict[str, Any]
    after: dict[str, Any]
    without: TunedPlan


class TuneResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The fastest plan that fits.

    Attributes:
        start: the plan as it was. best: null if none fits; then ``nearest`` is what needs least memory.
        step_time_interval_s: of the best: where its step time lies, four times in five.
        worth: of each change from the start to the best, what matters most first.
        front: plans that no other simulated one beats in both time and memory, fastest first.
        would_fit: where none fits: changes of the nearest with which it does.
        simulations: how many plans were simulated.
        interrupted: Ctrl-C ended the search.
        state: the best plan in words, as the explorer and every command take them.
        forms: the best plan as python, torch, torchtitan and accelerate; where one has no such plan, the reason is in
            ``not_as``.
        notes: what was chosen because the request does not say, what is unverified, which settings change nothing.
    """

    start: TunedPlan
    best: TunedPlan | None
    step_time_interval_s: list[float] = []
    worth: list[PricedChange] = []
    front: list[TunedPlan] = []
    nearest: TunedPlan | None = None
    would_fit: list[Change] = []
    simulations: int
    memory_limit_bytes: int
    interrupted: bool = False
    state: str = ""
    forms: dict[str, str] = {}
    not_as: dict[str, str] = {}
    notes: list[str] = []


class Failure(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Takes the place of a result that could not be computed, and says why."""

    error: str
    id: str | int | UnsetType = UNSET


MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(Model))
CLUSTER_FIELDS = tuple(f.name for f in dataclasses.fields(Cluster))
PLAN_FIELDS = tuple(f.name for f in dataclasses.fields(Plan))
ALIASES = {  # names of options, where the field's own is short or means something else beside a plan's
    "layers": "n_layer", "heads": "n_head", "kv_heads": "n_kv_head", "encoder_layers": "n_encoder_layer",
    "model_dtype": "dtype", "model_name": "name",
}  # fmt: skip
DIMENSIONS = {ALIASES.get(key, key): key for key in (*ALIASES, *MODEL_FIELDS) if ALIASES.get(key, key) in MODEL_FIELDS}
FILES = ("model_file", "torchtitan", "config", "config_format")
NAMES = ("model", *FILES, "cluster", *CLUSTER_FIELDS, *PLAN_FIELDS, *ALIASES, *MODEL_FIELDS)


def given(fields: Any) -> dict[str, Any]:
    """The fields that were given."""
    return {f: getattr(fields, f) for f in fields.__struct_fields__ if getattr(fields, f) is not UNSET}
