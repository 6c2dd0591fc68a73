"""`units_of`: a transformer's blocks as FSDP units, cut as ``Plan.wrap`` says."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import EllipsisType

from fsdp_sim.cost.weights import Weights, check_names, weights_of
from fsdp_sim.schedule import DTYPE_BYTES, Exchange, Param, Unit
from fsdp_sim.spec import Block, Model, Plan, block_shapes, blocks, root_shapes
from fsdp_sim.words import in_brief

Shapes = Sequence[tuple[str, int, int]]
Wrap = str | int | tuple[str, ...]


def units_of(model: Model, plan: Plan) -> tuple[Unit, ...]:
    """The root, which holds what is in no other unit, the wrapped blocks, and maybe embedding and head.

    ``plan.seq_len`` decides the rows of learned positions where the model does not say.

    Raises:
        ValueError: ``plan.wrap`` names a block that is not there, or leaves one out between wrapped ones; the plan
            freezes or adapts what the model does not have.
    """
    weights = weights_of(model, plan)
    if plan.freeze or weights.lora_targets:
        _check_names(model, plan)
    units = _units_of(model, plan.wrap, weights, tuple(root_shapes(model, plan.seq_len)))
    return units if plan.expert_parallel == 1 else _shared_out(model, plan, weights, units)


def _shared_out(model: Model, plan: Plan, weights: Weights, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The same units with experts in units of their own inside of their block's.

    Raises:
        ValueError: the model has no experts, or the ranks do not divide them.
    """
    if not model.n_expert or model.n_expert % plan.expert_parallel:
        has = f"{model.n_expert} experts in a layer; take a divisor" if model.n_expert else "no experts; leave it 1"
        raise ValueError(f"Plan.expert_parallel is {plan.expert_parallel}, but {model.name} has {has}")
    dtype = weights.compute_dtype
    rows = plan.micro_batch * plan.seq_len * (model.experts_per_token or 1)
    n_bytes, count_bytes = rows * model.d_model * DTYPE_BYTES[dtype], 8 * model.n_expert
    found: list[Unit] = []
    for unit in units:
        experts = tuple(p for p in unit.params if p.name.startswith("experts."))
        if not experts:
            found.append(unit)
            continue
        name = unit.name
        after = {p.name: f"{name}.shared" for p in unit.params if p.name.startswith(("shared.", "shared_gate."))}
        after |= {p.name: f"{name}.sum" for p in unit.params if p.name.startswith("ffn_post_norm.")}
        own = tuple(
            replace(p, used_by=(after[p.name],)) if p.name in after else p for p in unit.params if p not in experts
        )
        segments: tuple[str | EllipsisType, ...] = (
            name,
            ...,
            *[f"{name}.shared"] * (model.n_shared_expert > 0),
            f"{name}.sum",
        )
        exchange = Exchange(bytes=n_bytes, needed_by=f"{name}.sum", dtype=dtype, count_bytes=count_bytes)
        found.append(replace(unit, params=own, segments=segments))
        found.append(Unit(f"{name}.experts", experts, exchange=exchange))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _units_of(
    model: Model, wrap: Wrap, weights: Weights, shapes_of_root: tuple[tuple[str, int, int], ...]
) -> tuple[Unit, ...]:
    kinds = blocks(model)
    shapes_of = {name: block_shapes(model, block) for name, block in kinds.items()}
    names = list(shapes_of)
    wrapped = _wrapped(model, wrap, shapes_of)
    inside = [i for i, name in enumerate(names) if name in wrapped]
    first, last = (inside[0], inside[-1]) if inside else (len(names), len(names) - 1)
    if len(inside) != last - first + 1:
        hole = next(name for i, name in enumerate(names) if first < i < last and name not in wrapped)
        raise ValueError(
            f"Plan.wrap leaves out {hole}, which runs between blocks that it names; the root's own blocks must come "
            f"before or after all wrapped ones"
        )

    @functools.cache
    def of(rules: Weights, block: Block) -> tuple[tuple[Param, ...], int]:
        """Parameters and buffers of a block. Blocks alike share them."""
        shapes = block_shapes(model, block)
        params = tuple(p for shape in shapes for p in rules.params_of_block(*shape, model.dtype))
        return params, sum(rules.buffer_bytes(*shape) for shape in shapes)

    own = {name: of(weights.of_block(name), block._replace(window=None)) for name, block in kinds.items()}
    layers = [Unit(name, own[name][0], buffer_bytes=own[name][1]) for name in names[first : last + 1]]
    rest = names[:first] + names[last + 1 :]
    used_by = {"embed.weight": ("embed", "head")} if model.tied_embeddings else {}
    of_root = tuple(weights.param(*shape, model.dtype, used_by.get(shape[0], ())) for shape in shapes_of_root)
    of_root += tuple(replace(p, name=f"{name}.{p.name}") for name in rest for p in own[name][0])
    buffer_bytes = sum(own[name][1] for name in rest)
    if wrap == "embed_block_head" and not model.tied_embeddings:
        embed, head = (tuple(p for p in of_root if p.name.startswith(f"{name}.")) for name in ("embed", "head"))
        ends = Unit("embed", embed, is_block=False), Unit("head", head, is_block=False, reshard_after_forward=False)
        return (Unit("root", segments=(...,)), ends[0], *layers, ends[1])
    segments: tuple[str | EllipsisType, ...] = ("embed", *names[:first], ..., *names[last + 1 :], "head")
    return (Unit("root", of_root, segments, blocks=tuple(rest), buffer_bytes=buffer_bytes), *layers)


def _check_names(model: Model, plan: Plan) -> None:
    of_blocks = {name: block_shapes(model, block) for name, block in blocks(model).items()}
    params = [name for name, *_ in root_shapes(model, plan.seq_len)]
    params += [f"{block}.{name}" for block, shapes in of_blocks.items() for name, *_ in shapes]
    shapes = itertools.chain(*of_blocks.values())
    linears = [name.removesuffix(".weight") for name, _, n in shapes if n > 1 and name.endswith(".weight")]
    linears += [f"experts.{of}" for of, *_ in weights_of(model, plan).looped]
    check_names(model.name, plan, params, linears)


def _wrapped(model: Model, wrap: Wrap, shapes_of: Mapping[str, Shapes]) -> set[str]:
    if wrap in ("block", "embed_block_head"):
        return set(shapes_of)
    if wrap == "root":
        return set()
    if isinstance(wrap, int):
        return {name for name, shapes in shapes_of.items() if sum(r * c for _, r, c in shapes) >= wrap}
    if unknown := sorted(set(wrap) - set(shapes_of)):
        names = list(shapes_of)
        raise ValueError(
            f"Plan.wrap names {in_brief(unknown[0])}; {model.name} has the blocks {names[0]} to {names[-1]}"
        )
    return set(wrap)
