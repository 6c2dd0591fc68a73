"""What may vary in a plan: a `Lever` is one decision with the values worth trying, a `Space` every combination of them.

Values that mean nothing beside others (a prefetch depth with DDP, when to reduce where there is one micro-batch) fall
back on torch's default, so that one plan has one name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fsdp_sim.cost import workload
from fsdp_sim.schedule import SDPA
from fsdp_sim.spec import ONLY_WITH_ACCUMULATION, OPERATORS, SETTINGS_OF, Cluster, Model, Plan, shards_of, takes
from fsdp_sim.spec.fields import check
from fsdp_sim.words import did_you_mean

Point = tuple[int, ...]
Values = tuple[tuple[Any, ...], ...]
LEARNS = (
    "seq_len", "param_dtype", "reduce_dtype", "float32_matmul_precision", "fp8", "fp8_all_gather",
    "fp8_precompute_scale", "freeze", "lora_rank", "lora_targets", "base_quantization", "optimizer", "clip_grad_norm",
    "gradient_divide_factor",
)  # fmt: skip
"""Fields of `Plan` that change what is learnt by more than the order of sums; they vary where that is allowed."""


class Lever(NamedTuple):
    """One decision.

    Attributes:
        fields: of `Plan`, that it sets; the first is its name.
        values: what is worth trying for a model on a cluster from a start, each a value for every field.
    """

    fields: tuple[str, ...]
    values: Callable[[Model, Cluster, Plan], Iterable[tuple[Any, ...]]]


def _each(*values: Any) -> Callable[[Model, Cluster, Plan], Iterable[tuple[Any, ...]]]:
    return lambda model, cluster, plan: ((value,) for value in values)


def _shard_sizes(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[int | None]]:
    """All ranks; else by doubling from half a node to half of the cluster."""
    yield (None,)
    size = max(2, cluster.node_size // 2)
    while size < cluster.gpus:
        if cluster.gpus % size == 0:
            yield (size,)
        size *= 2


def _expert_ranks(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[int]]:
    """Nobody, two ranks, four, ..., as many as shard, where a model has so many experts."""
    ranks, experts = 1, model.n_expert or 1
    while ranks <= shards_of(plan, cluster.gpus) and experts % ranks == 0:
        yield (ranks,)
        ranks *= 2


def _reshard(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[bool | int | None]]:
    yield from ((None,), (False,), (True,))
    if cluster.nodes > 1:
        yield (cluster.node_size,)  # gathered again in backward within a node


def _micro_batches(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[int, int]]:
    """A rank's sequences of a step, in every way that they can be cut into equal micro-batches."""
    sequences = plan.micro_batch * plan.grad_accum
    return ((size, sequences // size) for size in range(1, sequences + 1) if sequences % size == 0)


def _kept(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[Any]]:
    """No block, each, or every second; and each but for what torchtitan keeps, for attention, or all matmuls too."""
    yield from ((None,), ("selective",), (2,), ("full",))
    blocks = [work for work in workload(model, plan).work.values() if work.is_block]
    there = {output.op for work in blocks for output in work.outputs}
    yield from ((kept,) for kept in ((SDPA,), tuple(op for op in OPERATORS if op in there)) if SDPA in there)


def _precisions(model: Model, cluster: Cluster, plan: Plan) -> Iterator[tuple[str, str]]:
    if cluster.kind == "gpu" and cluster.gpu.supports_bf16:
        yield from (("bf16", "fp32"), ("bf16", "bf16"))


LEVERS = {
    lever.fields[0]: lever
    for lever in (
        Lever(("api",), _each("fsdp2", "ddp")),
        Lever(("shard_size",), _shard_sizes),
        Lever(("expert_parallel",), _expert_ranks),
        Lever(("reshard_after_forward",), _reshard),
        Lever(("sharding_strategy",), _each("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")),
        Lever(("activation_checkpointing",), _kept),
        Lever(("micro_batch", "grad_accum"), _micro_batches),
        Lever(("activation_offload",), _each(None, "streams", "save_on_cpu")),
        Lever(("cpu_offload",), _each(False, True)),
        Lever(("compile",), _each(False, True)),
        Lever(("wrap",), _each("block", "embed_block_head", "root")),
        Lever(("forward_prefetch",), _each(None, 1, 2, True)),
        Lever(("backward_prefetch",), _each(None, 2, "BACKWARD_POST")),
        Lever(("requires_gradient_sync",), _each(True, "last")),
        Lever(("reshard_after_backward",), _each(True, "last")),
        Lever(("separate_reduce_scatter_group",), _each(False, True)),
        Lever(("reduce_scatter_max_input_buffers",), _each(1, 2)),
        Lever(("post_optim_event",), _each(False, True)),
        Lever(("limit_all_gathers",), _each(True, False)),
        Lever(("bucket_cap_mb",), _each(None, 100.0)),
        Lever(("loss_chunks",), _each(1, 8)),
        Lever(("expandable_segments",), _each(False, True)),
        Lever(("optimizer_impl",), _each("fused", "foreach")),
        Lever(("param_dtype", "reduce_dtype"), _precisions),
        Lever(("fp8",), _each(None, "tensorwise", "rowwise")),
        Lever(("fp8_all_gather",), _each(False, True)),
        Lever(("optimizer",), _each("adamw", "adamw_8bit", "muon", "sgd_momentum", "sgd")),
    )
}


@dataclass(frozen=True)
class Space:
    """The plans that a search may choose from: a value of each lever.

    Attributes:
        start: what everything else is a change of.
        levers: by name, with the values of each; the first value is the start's.
    """

    cluster: Cluster
    start: Plan
    levers: Mapping[str, tuple[Lever, Values]]

    def __len__(self) -> int:
        """Points; several may be one plan, and settings may contradict one another."""
        size = 1
        for _, values in self.levers.values():
            size *= len(values)
        return size

    @cached_property
    def sizes(self) -> Point:
        return tuple(len(values) for _, values in self.levers.values())

    def plan(self, point: Sequence[int]) -> Plan | None:
        """The plan at a point; None where the settings contradict one another."""
        fields: dict[str, Any] = {}
        for (lever, values), place in zip(self.levers.values(), point, strict=True):
            fields |= dict(zip(lever.fields, values[place], strict=True))
        return self.with_fields(self.start, fields)

    def with_fields(self, plan: Plan, fields: Mapping[str, Any]) -> Plan | None:
        """A plan with other values; None where they contradict the rest."""
        values = _meaningful({**_values_of(plan), **fields}, self.cluster)
        key = (*values.values(), *map(type, values.values()))  # True is not 1
        if key not in self._plans:
            try:
                self._plans[key] = replace(plan, **values)
            except ValueError:
                self._plans[key] = None
        return self._plans[key]

    @cached_property
    def _plans(self) -> dict[tuple[Any, ...], Plan | None]:
        return {}


def space_of(
    model: Model,
    cluster: Cluster,
    start: Plan,
    *,
    vary: Iterable[str] | Mapping[str, Sequence[Any] | None] | None = None,
    hold: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> Space:
    """The space around a plan.

    Args:
        vary: names of levers, or other fields of `Plan`, maybe with their values; by default every lever that leaves
            what is learnt the same.
        hold: names of what does not vary.
        allow: names of what may vary though it changes what is learnt, such as ``param_dtype``.

    Raises:
        ValueError: a name that does not exist, a field that nobody knows values for, one that changes what is learnt
            and is not allowed, a value that its field does not take.
    """
    allowed, held = set(allow), set(hold)
    asked: Mapping[str, Sequence[Any] | None]
    if vary is None:
        asked = dict.fromkeys(name for name in LEVERS if name not in LEARNS or name in allowed)
    else:
        asked = vary if isinstance(vary, Mapping) else dict.fromkeys(vary)
    for name in (*asked, *held, *allowed):
        if name not in Plan.__dataclass_fields__:
            raise ValueError(f"a plan has no {name} to vary or hold; {did_you_mean(name, Plan.__dataclass_fields__)}")
    found: dict[str, tuple[Lever, Values]] = {}
    places = {field: place for place, lever in enumerate(LEVERS.values()) for field in lever.fields}
    for name, given in sorted(asked.items(), key=lambda one: places.get(one[0], len(places))):
        lever = _lever(name, given)
        if loss := [field for field in lever.fields if field in LEARNS and not {name, field} & allowed]:
            raise ValueError(f"{loss[0]} changes what is learnt; to vary it all the same, allow it: allow {name}")
        if held.isdisjoint(lever.fields):
            values = _values(lever, model, cluster, start)
            if len(values) > 1:
                found[lever.fields[0]] = (lever, values)
    kept = _taken(found, cluster, start)
    if not kept:
        raise ValueError(
            f"nothing varies: from this plan {', '.join(asked)} can take one value each; vary something else"
        )
    return Space(cluster, start, kept)


def _lever(name: str, given: Sequence[Any] | None) -> Lever:
    known = next((lever for lever in LEVERS.values() if name in lever.fields), None)
    if known is None and given is None:
        raise ValueError(f"{name} has no values of its own to try; give them, for example {name}=a,b")
    if given is None:
        assert known is not None
        return known
    for value in given:
        check("Plan", name, value, Plan.__dataclass_fields__[name].metadata["allowed"])
    if known is None or len(known.fields) == 1:
        return Lever((name,), _each(*given))
    places = set(given)  # of two fields the one that is named chooses
    at = known.fields.index(name)
    return known._replace(
        values=lambda model, cluster, plan: (v for v in known.values(model, cluster, plan) if v[at] in places)
    )


def _values(lever: Lever, model: Model, cluster: Cluster, start: Plan) -> Values:
    """The start's value and the others, each once; True is not 1."""
    own = tuple(getattr(start, field) for field in lever.fields)
    return tuple({repr(value): value for value in (own, *lever.values(model, cluster, start))}.values())


def _taken(found: Mapping[str, tuple[Lever, Values]], cluster: Cluster, start: Plan) -> dict[str, tuple[Lever, Values]]:
    """Without the values that no API on offer takes."""
    apis = [value for (value,) in found["api"][1]] if "api" in found else [start.api]
    kept = {}
    for name, (lever, values) in found.items():
        takers = [
            value for api in apis for value in values[1:]
            if all(takes(api, name).test(part) for name, part in zip(lever.fields, value, strict=True))
        ]  # fmt: skip
        of_some = tuple(v for n, v in enumerate(values) if n == 0 or v in takers)
        if len(of_some) > 1:
            kept[name] = (lever, of_some)
    return kept


def _values_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


@functools.lru_cache(maxsize=None, typed=True)  # True is not 1
def _is_taken(api: str, name: str, value: Any) -> bool:
    return takes(api, name).test(value)


def _meaningful(values: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """The values of a plan, with torch's default where one means nothing beside the others."""
    every = dict(values)
    for name in SETTINGS_OF:
        if not _is_taken(every["api"], name, values[name]):
            every[name] = Plan.__dataclass_fields__[name].default
    if every["api"] != "fsdp2" and every["wrap"] == "embed_block_head":
        every["wrap"] = "block"
    if every["grad_accum"] == 1:
        every |= dict.fromkeys(ONLY_WITH_ACCUMULATION, True)
    if every["api"] == "fsdp1" and "HYBRID" not in every["sharding_strategy"]:
        every["shard_size"] = None
    if not every["fp8"]:
        every |= {"fp8_all_gather": False, "fp8_precompute_scale": False}
    if every["shard_size"] == cluster.gpus:
        every["shard_size"] = None
    return every
