"""`units_of`: a transformer's blocks as FSDP units, cut as ``Plan.wrap`` says."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import EllipsisType

from fsdp_sim.schedule import Param, Unit
from fsdp_sim.spec import Model, block_shapes, root_shapes

Shapes = Sequence[tuple[str, int, int]]
Wrap = str | int | tuple[str, ...]


def block_names(model: Model) -> tuple[list[str], list[str]]:
    """The blocks of the encoder (none as a rule), and those of the decoder, in order."""
    encoder = [f"encoder.{i}" for i in range(model.n_encoder_layer)]
    return encoder, [f"{'decoder' if encoder else 'layers'}.{i}" for i in range(model.n_layer)]


def units_of(model: Model, wrap: Wrap, seq_len: int) -> tuple[Unit, ...]:
    """The root, which holds the embedding, the head and the blocks that are no units, and the wrapped blocks.

    Args:
        wrap: ``block``, ``root``, a number (the blocks of at least that many parameters), or names of blocks.
        seq_len: rows of learned positions where the model does not say.

    Raises:
        ValueError: ``wrap`` names a block that is not there, or leaves one out between wrapped ones.
    """
    return _units_of(model, wrap, tuple(root_shapes(model, seq_len)))


@functools.lru_cache(maxsize=64)
def _units_of(model: Model, wrap: Wrap, shapes_of_root: tuple[tuple[str, int, int], ...]) -> tuple[Unit, ...]:
    encoder, decoder = block_names(model)
    shapes_of = dict.fromkeys(encoder, block_shapes(model))
    shapes_of |= dict.fromkeys(decoder, block_shapes(model, cross_attention=bool(encoder)))
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

    def params(shapes: Shapes, prefix: str = "") -> tuple[Param, ...]:
        used_by = {"embed.weight": ("embed", "head")} if model.tied_embeddings else {}
        return tuple(
            Param(
                prefix + name, (rows,) if columns == 1 else (rows, columns), model.dtype,
                used_by=used_by.get(prefix + name, ()),
            )
            for name, rows, columns in shapes
        )  # fmt: skip

    alike = {id(shapes): shapes for shapes in shapes_of.values()}
    own = {key: params(shapes) for key, shapes in alike.items()}  # blocks alike share their parameters' specs
    layers = [Unit(name, own[id(shapes_of[name])]) for name in names[first : last + 1]]
    rest = names[:first] + names[last + 1 :]
    of_root = params(shapes_of_root)
    of_root += tuple(p for name in rest for p in params(shapes_of[name], f"{name}."))
    segments: tuple[str | EllipsisType, ...] = ("embed", *names[:first], ..., *names[last + 1 :], "head")
    return (Unit("root", of_root, segments, blocks=tuple(rest)), *layers)


def _wrapped(model: Model, wrap: Wrap, shapes_of: Mapping[str, Shapes]) -> set[str]:
    if wrap == "block":
        return set(shapes_of)
    if wrap == "root":
        return set()
    if isinstance(wrap, int):
        return {name for name, shapes in shapes_of.items() if sum(r * c for _, r, c in shapes) >= wrap}
    if unknown := sorted(set(wrap) - set(shapes_of)):
        names = list(shapes_of)
        raise ValueError(f"Plan.wrap names {unknown[0]!r}; {model.name} has the blocks {names[0]} to {names[-1]}")
    return set(wrap)
