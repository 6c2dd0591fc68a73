"""`workload`: a transformer cut into FSDP units, with the work of every segment, from its dimensions alone."""

from __future__ import annotations

from dataclasses import replace
from types import EllipsisType

from fsdp_sim.cost import kernels_of as kernels
from fsdp_sim.cost.activations import Activations, block_activations, embed_activations, head_activations
from fsdp_sim.cost.work import Kernel, Work, Workload
from fsdp_sim.schedule import Param, Unit
from fsdp_sim.spec import Model, Plan, block_shapes, param_shapes, root_shapes


def workload(model: Model, plan: Plan) -> Workload:
    """The units and the work of one micro-batch on one rank.

    The segments are ``embed``, the blocks (``layers.0`` ..., of an encoder-decoder ``encoder.0`` ... and
    ``decoder.0`` ...) and ``head``, which holds the last norm, the logits and the loss.

    Raises:
        ValueError: ``plan.seq_len`` is longer than the model's table of learned positions, or ``plan.wrap`` names
            modules that the model does not have.
    """
    if model.positions == "learned" and model.max_seq_len is not None and plan.seq_len > model.max_seq_len:
        raise ValueError(
            f"Plan.seq_len is {plan.seq_len}, but {model.name} has learned positions for {model.max_seq_len} tokens; "
            f"make it at most {model.max_seq_len}, or give Model.max_seq_len"
        )
    dtype = plan.param_dtype or model.dtype
    batch, tokens = plan.micro_batch, plan.micro_batch * plan.seq_len
    encoder = _block(model, plan, dtype, causal=False, cross=False) if model.n_encoder_layer else None
    decoder = _block(model, plan, dtype, causal=model.causal, cross=encoder is not None)
    prefix = "decoder" if encoder else "layers"
    blocks = [(f"encoder.{i}", encoder) for i in range(model.n_encoder_layer)]
    blocks += [(f"{prefix}.{i}", decoder) for i in range(model.n_layer)]
    streams = 2 if encoder else 1  # source and target tokens are both embedded
    embed = _work(*kernels.embedding(model, streams * tokens, dtype), embed_activations(model, plan))
    head_kernels = kernels.head(
        model, tokens, dtype, fused_loss=plan.cross_entropy == "fused", metrics=plan.loss_metrics
    )
    head = _work(*head_kernels, head_activations(model, plan))
    work = {"embed": embed, **{name: part.work for name, part in blocks if part}, "head": head}
    param_count = sum(rows * columns for _, rows, columns in param_shapes(model, plan.seq_len))
    return Workload(
        name=model.name,
        units=_units(model, plan, [(name, part.shapes) for name, part in blocks if part]),
        work=work,
        param_count=param_count,
        model_flops_per_token=6.0 * param_count + 12.0 * len(blocks) * model.n_head * model.d_head * plan.seq_len,
        tokens=tokens,
        dtype=dtype,
    )


class _Block:
    def __init__(self, work: Work, shapes: list[tuple[str, int, int]]) -> None:
        self.work = work
        self.shapes = shapes


def _block(model: Model, plan: Plan, dtype: str, *, causal: bool, cross: bool) -> _Block:
    batch, seq, tokens, d = plan.micro_batch, plan.seq_len, plan.micro_batch * plan.seq_len, model.d_model
    parts = [kernels.norm(model.norm, tokens, d, dtype), kernels.attention_layer(model, batch, seq, seq, dtype, causal)]
    parts += [kernels.residual(tokens, d, dtype)]
    if cross:
        parts += [kernels.norm(model.norm, tokens, d, dtype)]
        parts += [kernels.attention_layer(model, batch, seq, seq, dtype, causal=False, own_keys=False)]
        parts += [kernels.residual(tokens, d, dtype)]
    parts += [kernels.norm(model.norm, tokens, d, dtype), kernels.feed_forward(model, tokens, dtype)]
    parts += [kernels.residual(tokens, d, dtype)]
    forward = [k for part, _ in parts for k in part]
    backward = [k for _, part in reversed(parts) for k in part]
    activations = block_activations(model, plan, cross_attention=cross)
    return _Block(
        replace(_work(forward, backward, activations), is_block=True), block_shapes(model, cross_attention=cross)
    )


def _work(forward: list[Kernel], backward: list[Kernel], activations: Activations) -> Work:
    return Work(tuple(forward), tuple(backward), **activations._asdict())


def _units(model: Model, plan: Plan, blocks: list[tuple[str, list[tuple[str, int, int]]]]) -> tuple[Unit, ...]:
    """Cut the model as ``plan.wrap`` says."""
    names = [name for name, _ in blocks]
    wrap = plan.wrap
    if wrap == "block":
        wrapped = set(names)
    elif wrap == "root":
        wrapped = set()
    elif isinstance(wrap, int):  # torch's size_based_auto_wrap_policy, of modules no smaller than a block
        wrapped = {name for name, shapes in blocks if sum(r * c for _, r, c in shapes) >= wrap}
    else:
        wrapped = set(wrap)
        if unknown := sorted(wrapped - set(names)):
            raise ValueError(f"Plan.wrap names {unknown[0]!r}; {model.name} has the blocks {names[0]} to {names[-1]}")
    inside = [i for i, name in enumerate(names) if name in wrapped]
    first, last = (inside[0], inside[-1]) if inside else (len(names), len(names) - 1)
    if len(inside) != last - first + 1:
        hole = next(name for i, name in enumerate(names) if first < i < last and name not in wrapped)
        raise ValueError(
            f"Plan.wrap leaves out {hole}, which runs between blocks that it names; the root's own blocks must come "
            f"before or after all wrapped ones"
        )
    cache: dict[int, tuple[Param, ...]] = {}

    def params(shapes: list[tuple[str, int, int]], prefix: str = "") -> tuple[Param, ...]:
        return tuple(
            Param(prefix + name, (rows,) if columns == 1 else (rows, columns), model.dtype)
            for name, rows, columns in shapes
        )

    layers = []
    for name, shapes in blocks[first : last + 1]:
        own = cache.setdefault(id(shapes), params(shapes))
        layers.append(Unit(name, own))
    rest = blocks[:first] + blocks[last + 1 :]
    root_params = params(root_shapes(model, plan.seq_len))
    for name, shapes in rest:
        root_params += params(shapes, f"{name}.")
    segments: tuple[str | EllipsisType, ...] = ("embed", *names[:first], ..., *names[last + 1 :], "head")
    return (Unit("root", root_params, segments), *layers)
