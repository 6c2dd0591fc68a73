"""Requests, drawn: any GPU and link of the catalogue, any way to train, transformers of a few layers."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from hypothesis import strategies as st

from fsdp_sim.cost.collectives import family_of
from fsdp_sim.spec import ONLY_WITH_ACCUMULATION, Cluster, Link, Model, Plan, gpu_names, link, link_names, takes
from tests.laws.law import Change, Request, simulated

POOL: tuple[Any, ...] = (None, True, False, 1, 2, 3, "last", 0.5, 4.0, 25.0)
BATCH = ("micro_batch", "seq_len", "grad_accum")
BETWEEN_NODES = [name for name in link_names() if link(name).kind == "inter"]


def values_of(api: str, name: str) -> list[Any]:
    """Some of what a field of `Plan` takes."""
    allowed = takes(api, name)
    names = Plan.__dataclass_fields__[name].metadata["allowed"].names
    return [value for value in (*POOL, *(n for n in names if n not in POOL)) if allowed.test(value)]


@st.composite
def models(draw: st.DrawFn) -> Model:
    heads, head_dim = draw(st.sampled_from([(2, 64), (8, 16), (6, 32), (16, 128), (32, 128), (64, 128)]))
    return Model(
        "drawn",
        n_layer=draw(st.integers(1, 4)),
        d_model=heads * head_dim,
        n_head=heads,
        d_ffn=draw(st.sampled_from([64, 1408, 14_336, 28_672])),
        vocab=draw(st.sampled_from([500, 1001, 50_304, 128_256])),
        n_kv_head=draw(st.sampled_from([None, 1, 2, heads])),
        ffn_type=draw(st.sampled_from(["gelu", "swiglu", "relu"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        bias=draw(st.booleans()),
        positions=draw(st.sampled_from(["learned", "rope", "none"])),
        tied_embeddings=draw(st.booleans()),
        causal=draw(st.booleans()),
        n_encoder_layer=draw(st.sampled_from([0, 0, 0, 1, 2])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    gpu = draw(st.sampled_from(gpu_names()))
    node = Cluster(gpu, gpus=1).node_size
    inside = [n for n in (1, 2, 4, 8, 16, 32) if n <= node]
    gpus = draw(st.sampled_from([*inside, *(n * node for n in (1, 2, 3, 4, 8))]))
    return Cluster(gpu, gpus=gpus, inter=draw(st.sampled_from([None, *BETWEEN_NODES])))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    model, cluster = draw(models()), draw(clusters())
    if cluster.gpu.fp32_flops is None:
        model = dataclasses.replace(model, dtype="bf16")
    api = draw(st.sampled_from(["fsdp2", "fsdp2", "fsdp2", "fsdp1", "ddp", "zero1", "zero2"]))
    batch = {"seq_len": draw(st.sampled_from([64, 512, 2048, 8192])), "grad_accum": draw(st.sampled_from([1, 1, 2, 3]))}
    fields = {"api": api, "micro_batch": draw(st.integers(1, 4)), **batch}
    for f in dataclasses.fields(Plan):
        if f.name not in (*fields, *LEFT) and draw(st.integers(0, 3)) == 0:
            fields[f.name] = draw(st.sampled_from(values_of(api, f.name)))
    return Request(model, cluster, together(fields, model, cluster))


LEFT = ("torch", "activation_offload", "use_reentrant")  # as the default says: other laws and tests speak of these
NEVER = ONLY_WITH_ACCUMULATION  # False: it trains wrongly, and torch too fails for some


def together(fields: dict[str, Any], model: Model, cluster: Cluster) -> Plan:
    """A plan of these fields, without those that are refused beside the ones before them."""
    fields = {name: value for name, value in fields.items() if not (value is False and name in NEVER)}

    def of(some: dict[str, Any]) -> Plan:
        plan = Plan(**some)
        simulated(Request(model, cluster, plan)).program  # noqa: B018
        return plan

    with contextlib.suppress(ValueError):
        return of(fields)
    taken: dict[str, Any] = {}
    for name, value in fields.items():
        with contextlib.suppress(ValueError):
            of(taken | {name: value})
            taken[name] = value
    return of(taken)


def fitted_to(request: Request, cluster: Cluster) -> Request:
    """On another cluster; of the plan, what is refused there is left out."""
    fields = {f.name: getattr(request.plan, f.name) for f in dataclasses.fields(Plan)}
    return request._replace(cluster=cluster, plan=together(fields, request.model, cluster))


# -- what laws speak of


def by(api: str, **fields: Any) -> Change:
    """Trained in this way; what only others take is left out."""

    def change(request: Request) -> Request:
        model, cluster, old = request.model, request.cluster, request.plan
        asked = {"api": api} | fields
        rest = {f.name: getattr(old, f.name) for f in dataclasses.fields(Plan) if f.name not in asked}
        return request._replace(plan=together(asked | rest, model, cluster))

    return change


PLAIN = (
    "api", "reshard_after_forward", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "sharding_strategy",
    "param_dtype", "reduce_dtype", "cpu_offload", "activation_checkpointing", "shard_size", "grad_accum", "micro_batch",
    "seq_len", "wrap", "compile", "attention_impl", "cross_entropy", "loss_metrics",
    "reduce_scatter_max_input_buffers", "separate_reduce_scatter_group", "post_optim_event", "unshard_async_op",
    "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "is_last_backward",
    "gradient_divide_factor", "torch", "bucket_cap_mb",
)  # fmt: skip


def whole(request: Request) -> Request:
    """Without adapters, quantised weights, clipping and what else is no part of FSDP: laws of exact bytes."""
    rest = {f.name: f.default for f in dataclasses.fields(Plan) if f.name not in PLAIN}
    return request._replace(plan=dataclasses.replace(request.plan, **rest))


def over_nodes(request: Request) -> Request:
    """On two nodes or more."""
    cluster = request.cluster
    return request if cluster.nodes > 1 else _resized(request, 2 * cluster.node_size)


def in_a_node(request: Request) -> Request:
    """On one node, full."""
    return _resized(request, request.cluster.node_size)


def on(gpus: int) -> Change:
    """On so many nodes."""
    return lambda request: _resized(request, gpus * request.cluster.node_size)


def alone(request: Request) -> Request:
    """On one GPU."""
    return _resized(request, 1)


def of_several(request: Request) -> Request:
    """On two GPUs or more."""
    return request if request.cluster.gpus > 1 else over_nodes(request)


def _resized(request: Request, gpus: int) -> Request:
    return fitted_to(request, dataclasses.replace(request.cluster, gpus=gpus))


def linked(**links: dict[str, Any]) -> Change:
    """Links (``intra``, ``inter``, ``host``) are others; a value that is a function makes it of the old one."""

    def change(request: Request) -> Request:
        cluster = request.cluster
        others = {which: _other(getattr(cluster, f"{which}_link"), fields) for which, fields in links.items()}
        return request._replace(cluster=dataclasses.replace(cluster, **others))

    return change


def _other(old: Link, fields: dict[str, Any]) -> Link:
    family = family_of(old)
    known = {name: getattr(family, name, getattr(old, name)) for name in fields}
    return dataclasses.replace(old, **{name: v(known[name]) if callable(v) else v for name, v in fields.items()})
