"""`Unit` and `Param`: what one ``fully_shard`` call manages, and the pieces of compute it wraps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import EllipsisType

from fsdp_sim.spec import DTYPE_BYTES, Allowed, field, one_of, spec, text, whole

_SHAPE = Allowed(
    "a tuple of at least one whole number >= 1 (fully_shard rejects scalar parameters: make it 1-D)",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(type(n) is int and n >= 1 for n in value),
)


@spec
class Param:
    """One parameter of a unit, sharded on dimension 0.

    Attributes:
        name: dotted name; a first part equal to a segment of the unit says which segment uses it.
        shape: of the whole, unsharded parameter.
        dtype: of the shards.
        requires_grad: False for a frozen parameter: gathered, never reduced.
        used_by: segments of the unit that use it, where its name does not say: a tied parameter has several.
        gather_dtype: what its shards are cast to for the all-gather, where that is not the plan's ``param_dtype``.

    Example:
        >>> Param("w", (15, 4)).padded_bytes(world_size=2)  # 8 rows on each of 2 ranks
        256
    """

    name: str = field(text())
    shape: tuple[int, ...] = field(_SHAPE)
    dtype: str = field(one_of(*(name for name in DTYPE_BYTES if name != "fp8")), default="fp32")
    requires_grad: bool = field(one_of(True, False), default=True)
    used_by: tuple[str, ...] = ()
    gather_dtype: str | None = field(one_of(None, *DTYPE_BYTES), default=None)

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter, and of its whole gradient."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def padded_bytes(self, world_size: int) -> int:
        """Bytes of all ranks' shards, each of ceil(rows / world_size) rows, the last ones padded."""
        return padded_numel(self.shape, world_size) * DTYPE_BYTES[self.dtype]


@functools.lru_cache(maxsize=4096)
def padded_numel(shape: tuple[int, ...], world_size: int) -> int:
    """Elements of all ranks' shards of a parameter."""
    return -(-shape[0] // world_size) * world_size * math.prod(shape[1:])


@spec
class Exchange:
    """Tokens that travel to the ranks of their experts and back, around the compute of a unit of experts.

    Attributes:
        bytes: of the tokens that a rank sends; as many arrive, for experts are taken to get equally many tokens.
        dtype: of the tokens.
        count_bytes: of the numbers of tokens for each expert, which are exchanged first.
        needed_by: the segment, after the unit's, that is the first to need what comes back.

    Example:
        >>> Exchange(bytes=4096, needed_by="layers.0.sum").dtype
        'fp32'
    """

    bytes: int = field(whole(0))
    needed_by: str = field(text())
    dtype: str = field(one_of("fp32", "bf16", "fp16"), default="fp32")
    count_bytes: int = field(whole(0), default=0)


@spec
class Unit:
    """One communication group (one ``fully_shard`` call) and the compute its module runs.

    Attributes:
        name: the module's name, as torch prints it.
        params: the parameters it manages: those of the module without those of nested units.
        segments: pieces of compute in forward order; ``...`` marks where the units inside run: in the root all that
            are in no other, elsewhere those whose names begin with this unit's and a dot. The default is one segment
            with the unit's name.
        blocks: those of its segments that are blocks of the model; activation checkpointing recomputes each by itself.
            A unit other than the root that lists none is itself a block (``is_block``).
        buffer_bytes: what every rank holds whole beside the parameters, such as the scales of quantised weights.
        is_block: whether it is a block of the model where it lists none; embedding and head are not.
        reshard_after_forward: ``fully_shard``'s argument for this unit, where the plan's is None.
        exchange: its parameters are experts, which dimension 0 counts: ranks share them out (``Plan.expert_parallel``)
            before FSDP shards what each has, and exchange tokens.

    Example:
        >>> root = Unit("root", (Param("embed", (4, 4)), Param("head", (4, 4))), segments=("embed", ..., "head"))
        >>> root.is_root, [p.name for p in root.params_of("head")]
        (True, ['head'])
    """

    name: str = field(text())
    params: tuple[Param, ...] = ()
    segments: tuple[str | EllipsisType, ...] = ()
    blocks: tuple[str, ...] = ()
    buffer_bytes: int = field(whole(0), default=0)
    is_block: bool = field(one_of(True, False), default=True)
    reshard_after_forward: bool | None = field(one_of(True, False, None), default=None)
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        if not self.segments:
            object.__setattr__(self, "segments", (self.name,))
        names: dict[str, list[object]] = {"parameter": [p.name for p in self.params], "segment": list(self.segments)}
        for what, given in names.items():
            twice = [name for name in given if given.count(name) > 1] if len(set(given)) < len(given) else []
            if twice:
                raise ValueError(f"unit {self.name} names the {what} {twice[0]!r} twice; each needs its own name")
        for p in self.params:
            unknown = [s for s in p.used_by if s not in self.segments]
            if unknown:
                raise ValueError(
                    f"parameter {p.name!r} of unit {self.name} is used_by {unknown[0]!r}, which is no segment of it; "
                    f"it has {', '.join(self.names_of_segments) or 'none'}"
                )
        if unknown_blocks := [block for block in self.blocks if block not in self.segments]:
            raise ValueError(
                f"unit {self.name} has the block {unknown_blocks[0]!r}, which is no segment of it; "
                f"it has {', '.join(self.names_of_segments) or 'none'}"
            )
        if self.params and not self.names_of_segments:
            raise ValueError(
                f"unit {self.name} has {len(self.params)} parameters and no segment that uses them; "
                f"name its compute, for example segments=({self.name!r}, ...)"
            )

    @property
    def is_root(self) -> bool:
        """Whether units run inside this one; in a model of one level that is the root alone."""
        return ... in self.segments

    @functools.cached_property
    def names_of_segments(self) -> tuple[str, ...]:
        return tuple(s for s in self.segments if isinstance(s, str))

    @functools.cached_property
    def uses(self) -> tuple[tuple[str, ...], ...]:
        """For each parameter the segments that use it."""
        return tuple(self.segments_of(p) for p in self.params)

    def before_children(self) -> tuple[str, ...]:
        """Segments that run before the child units; all of them where there are no children."""
        return self.names_of_segments[: self.segments.index(...)] if self.is_root else self.names_of_segments

    def after_children(self) -> tuple[str, ...]:
        return self.names_of_segments[len(self.before_children()) :]

    def segments_of(self, param: Param) -> tuple[str, ...]:
        """Segments that use a parameter, in order: ``used_by``, or the one it is named after, or else the first."""
        segments = self.names_of_segments
        if param.used_by:
            return tuple(s for s in segments if s in param.used_by)
        if len(segments) == 1:
            return segments
        named = [s for s in segments if param.name == s or param.name.startswith(f"{s}.")]
        return (max(named, key=len),) if named else segments[:1]

    def params_of(self, segment: str) -> tuple[Param, ...]:
        """Parameters a segment uses: those named after it; the first segment also has those named after none."""
        return tuple(p for p, segments in zip(self.params, self.uses, strict=True) if segment in segments)

    def trains(self, segment: str) -> bool:
        """Whether a segment has a parameter that requires gradients."""
        return segment in self._trained_segments

    @functools.cached_property
    def _trained_segments(self) -> frozenset[str]:
        trained = [uses for p, uses in zip(self.params, self.uses, strict=True) if p.requires_grad]
        return frozenset(segment for uses in trained for segment in uses)

    @functools.cached_property
    def trained_count(self) -> int:
        """Elements of the parameters that require gradients."""
        return sum(math.prod(p.shape) for p in self.params if p.requires_grad)


def root_of(units: Sequence[Unit]) -> Unit:
    """The unit that all others run inside: the first with ``...`` in its segments, or the only unit.

    Raises:
        ValueError: there is none.
    """
    for unit in units:
        if unit.is_root or len(units) == 1:
            return unit
    raise ValueError(
        f"0 of {len(units)} units are roots (none has ... in its segments); the root must have it, to mark where the "
        f"layers run, for example Unit('root', segments=('embed', ..., 'head'))"
    )
