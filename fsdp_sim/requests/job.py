"""`resolve`: turns a request into a `Job`, that is a model, a cluster and a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from fsdp_sim.cost import Workload, numbers_of_file
from fsdp_sim.requests.structs import CLUSTER_FIELDS, Request, given
from fsdp_sim.simulation import Simulation, check_blocks, simulate
from fsdp_sim.spec import Cluster, Model, Plan, shards_of


class Job(msgspec.Struct, frozen=True):
    """A training job: the model, the cluster and the plan that a request describes.

    Attributes:
        model: its dimensions, or what was traced of it.
        numbers: of the stack, where the cluster's file has a calibration: fields of `fsdp_sim.cost.Calibration`.
        chosen: fields of the plan that the request does not name, or whose effect is in what was traced.
        notes: what was chosen because the request does not say, and what experts cost, in sentences.
    """

    model: Model | Workload
    cluster: Cluster
    plan: Plan
    notes: list[str]
    numbers: dict[str, float] = {}
    chosen: tuple[str, ...] = ()

    @property
    def dimensions(self) -> Model:
        """The model, where it is not traced: of what is, nothing can be varied."""
        assert isinstance(self.model, Model)
        return self.model

    def notes_of(self, simulation: Simulation) -> list[str]:
        """The notes and those of a simulation of the job, but for what was chosen and changes nothing."""
        chosen = {sentence for name, sentence in simulation.without_effect.items() if name in self.chosen}
        return [*self.notes, *(note for note in simulation.notes if note not in chosen)]

    def simulate(self, **options: Any) -> Simulation:
        return simulate(self.model, self.cluster, self.plan, **self.options, **options)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `simulate` that its own node asks for."""
        if not self.numbers:
            return {}
        default = simulate(self.model, self.cluster, self.plan).costs.calibration
        return {"calibration": dataclasses.replace(default, **self.numbers)}


def resolve(request: Request, trace: Callable[[Plan], Workload] | None = None) -> Job:
    """Work out the model, the cluster and the plan of a request.

    Args:
        trace: the model's work under a plan, for a request that names no model.

    Raises:
        ValueError: something is missing, unknown or impossible.
    """
    model = _model(request) if trace is None else None
    if model is None:
        _refuse_dimensions(request)
    cluster = _cluster(request)
    fields: dict[str, Any] = {} if request.plan is UNSET else given(request.plan)
    chosen, notes = choose_dtypes(fields, cluster)
    notes = [*([] if request.notes is UNSET else request.notes), *notes]
    if model and (sees := model.seq_len_of_image) is not None and "seq_len" not in fields:
        chosen["seq_len"] = sees
        notes.append(f"An image is {sees} tokens to {model.name} (seq_len={sees}).")
    values = fields | chosen
    plan = _known_plan(tuple(values.items()), tuple(map(type, values.values())))
    if model is not None:
        check_blocks(model.n_layer + model.n_encoder_layer, plan)
        notes += _about_experts(model, plan, cluster)
    numbers = {} if request.cluster is UNSET else numbers_of_file(request.cluster)
    if model is not None:
        return Job(model, cluster, plan, notes, numbers, tuple(chosen))
    assert trace is not None
    return Job(trace(plan), cluster, plan, notes, numbers, (*chosen, "micro_batch", "seq_len", "wrap"))


PADDING_SAID = 1.5  # times as many bytes
UNNAMED = "model"  # the name of a model that is given by its dimensions alone


def _about_experts(model: Model, plan: Plan, cluster: Cluster) -> list[str]:
    """That fully_shard pads experts where they are fewer than the ranks: it cuts dimension 0, which counts them. Where
    ranks share them out, what is not known of that.
    """
    if plan.expert_parallel > 1:
        return [
            "How long all-to-alls take is unverified: none is among the measurements, so links are taken to reach what "
            "they reach in rings. Experts are taken to get equally many tokens."
        ]
    if model.n_expert is None or plan.api != "fsdp2" or plan.loops_experts:  # which are cut by their own rows
        return []
    shards = shards_of(plan, cluster.gpus)
    times = -(-model.n_expert // shards) * shards / model.n_expert
    if times < PADDING_SAID:
        return []
    return [
        f"{model.n_expert} experts are cut into {shards} shards along dimension 0, as fully_shard does by default: "
        f"padding makes their all-gathers and reduce-scatters {times:.3g} times as large (shard_placement_fn, which "
        f"is simulated with expert_parallel alone, can cut another dimension; a shard_size of {model.n_expert} or "
        f"less pads nothing)."
    ]


def choose_dtypes(fields: Mapping[str, Any], cluster: Cluster) -> tuple[dict[str, Any], list[str]]:
    """Dtypes for a plan that names neither, where FSDP trains on GPUs that have bf16.

    torch computes in the dtype of the parameters, fp32, which nobody does on such a GPU. So gathers and compute are
    bf16 and reductions fp32, as in torch's own FSDP2 tutorial. ``param_dtype=none`` gives torch's default.

    Returns:
        fields of the plan, and a sentence about them, or about what DDP makes of what is named.
    """
    asked = {"param_dtype", "reduce_dtype"} & set(fields)
    half = fields.get("param_dtype")
    if asked == {"param_dtype"} and fields.get("api") == "ddp" and half in ("bf16", "fp16") and cluster.gpus > 1:
        return {}, [
            f"Gradients are reduced in {half}, as with DDP's own mixed precision; under autocast they are of the dtype "
            f"of the parameters (reduce_dtype=fp32)."
        ]
    if asked or cluster.kind == "cpu" or not cluster.gpu.supports_bf16:
        return {}, []
    if (api := fields.get("api", "fsdp2")) not in ("fsdp2", "fsdp1"):
        return {}, [
            f"Compute is in the dtype of the parameters: the request names none, and {api} has no policy of its own. "
            f"param_dtype=bf16 computes in bf16 and reduces gradients in it; reduce_dtype=fp32 beside it is autocast, "
            f"which leaves gradients in the dtype of the parameters."
        ]
    beside = " beside fp8" if fields.get("fp8") else " beside quantised weights" * bool(fields.get("base_quantization"))
    note = (
        f"Gathers and compute{beside} in bf16, reductions in fp32, as in torch's FSDP2 tutorial: the request names no "
        "dtype. torch's own default is fp32 (param_dtype=none)."
    )
    return {"param_dtype": "bf16", "reduce_dtype": "fp32"}, [note]


def _model(request: Request) -> Model:
    asked = request.model
    if asked is UNSET:
        raise ValueError(f"no model is named; take a name such as {', '.join(Model.presets()[:3])}, or dimensions")
    if isinstance(asked, str):
        return Model.preset(asked)
    dims = given(asked)
    if "preset" not in dims:
        needed = [f.name for f in dataclasses.fields(Model) if f.default is dataclasses.MISSING and f.name != "name"]
        if missing := [name for name in needed if name not in dims]:
            raise ValueError(
                f"the model has no {missing[0]}; it needs {', '.join(needed)}, or the name of a published model"
            )
        return Model(**{"name": UNNAMED} | dims)
    base = Model.preset(dims.pop("preset"))
    changed = ", ".join(f"{key}={value}" for key, value in dims.items())
    return dataclasses.replace(base, **{"name": f"{base.name} with {changed}"} | dims)


def _refuse_dimensions(request: Request) -> None:
    """Refuse what says of a traced model what its own file says."""
    asked = request.model
    dims = {} if asked is UNSET else {"model": asked} if isinstance(asked, str) else given(asked)
    usual = {field.name: field.default for field in dataclasses.fields(Model)}
    for name, value in dims.items():
        if name not in usual or usual[name] != value:
            raise ValueError(
                f"{name}={value} stands beside a model that is traced as its file has it; write it into that file, or "
                f"leave it out"
            )


def _cluster(request: Request) -> Cluster:
    fields = {name: getattr(request, name) for name in CLUSTER_FIELDS if getattr(request, name) is not UNSET}
    if request.cluster is not UNSET:
        found = _cluster_file(request.cluster)
        return dataclasses.replace(found, **fields) if fields else found
    for name, remedy in (("gpu", "take a name such as H100-SXM-80GB"), ("gpus", "take the number of GPUs")):
        if name not in fields:
            raise ValueError(f"no {name} is given; {remedy}, or a cluster file")
    return _known_cluster(tuple(fields.items()))


@functools.lru_cache(maxsize=1024)
def _known_cluster(fields: tuple[tuple[str, Any], ...]) -> Cluster:
    return Cluster(**dict(fields))


@functools.lru_cache(maxsize=4096)
def _known_plan(fields: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> Plan:
    """Types, because 1 is not True."""
    return Plan(**dict(fields))


@functools.lru_cache(maxsize=16)
def _cluster_file(path: str) -> Cluster:
    return Cluster.from_file(path)
