"""`Unit` and `Param`: what one ``fully_shard`` call manages, and the pieces of compute it wraps."""

from __future__ import annotations

import math
from types import EllipsisType

from fsdp_sim.spec import Allowed, field, one_of, spec, text

DTYPE_BYTES = {"fp32": 4, "bf16": 2}

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

    Example:
        >>> Param("w", (15, 4)).padded_bytes(world_size=2)  # 8 rows on each of 2 ranks
        256
    """

    name: str = field(text())
    shape: tuple[int, ...] = field(_SHAPE)
    dtype: str = field(one_of(*DTYPE_BYTES), default="fp32")
    requires_grad: bool = field(one_of(True, False), default=True)

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter, and of its whole gradient."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def padded_bytes(self, world_size: int) -> int:
        """Bytes of all ranks' shards, each of ceil(rows / world_size) rows, the last ones padded."""
        rows = math.ceil(self.shape[0] / world_size) * world_size
        return rows * math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]


@spec
class Unit:
    """One communication group (one ``fully_shard`` call) and the compute its module runs.

    Attributes:
        name: the module's name, as torch prints it.
        params: the parameters it manages: those of the module less those of nested units.
        segments: pieces of compute in forward order; ``...`` marks where the child units run, and makes this unit
            the root. The default is one segment with the unit's name.

    Example:
        >>> root = Unit("root", (Param("embed", (4, 4)), Param("head", (4, 4))), segments=("embed", ..., "head"))
        >>> root.is_root, [p.name for p in root.params_of("head")]
        (True, ['head'])
    """

    name: str = field(text())
    params: tuple[Param, ...] = ()
    segments: tuple[str | EllipsisType, ...] = ()

    def __post_init__(self) -> None:
        if not self.segments:
            object.__setattr__(self, "segments", (self.name,))
        names: dict[str, list[object]] = {"parameter": [p.name for p in self.params], "segment": list(self.segments)}
        for what, given in names.items():
            twice = [name for name in given if given.count(name) > 1]
            if twice:
                raise ValueError(f"unit {self.name} names the {what} {twice[0]!r} twice; each needs its own name")
        if self.params and not self.names_of_segments:
            raise ValueError(
                f"unit {self.name} has {len(self.params)} parameters and no segment that uses them; "
                f"name its compute, for example segments=({self.name!r}, ...)"
            )

    @property
    def is_root(self) -> bool:
        return ... in self.segments

    @property
    def names_of_segments(self) -> tuple[str, ...]:
        return tuple(s for s in self.segments if isinstance(s, str))

    def before_children(self) -> tuple[str, ...]:
        """Segments that run before the child units; all of them where there are no children."""
        cut = self.segments.index(...) if self.is_root else len(self.segments)
        return tuple(s for s in self.segments[:cut] if isinstance(s, str))

    def after_children(self) -> tuple[str, ...]:
        return self.names_of_segments[len(self.before_children()) :]

    def params_of(self, segment: str) -> tuple[Param, ...]:
        """Parameters a segment uses: those named after it; the first segment also has those named after none."""

        def home(param: Param) -> str:
            named = [s for s in self.names_of_segments if param.name == s or param.name.startswith(f"{s}.")]
            return max(named, key=len) if named else self.names_of_segments[0]

        return tuple(p for p in self.params if home(p) == segment)

    def trains(self, segment: str) -> bool:
        """Whether a segment has a parameter that requires gradients."""
        return any(p.requires_grad for p in self.params_of(segment))


def toy(layers: int) -> list[Unit]:
    """The model torch was recorded with: ``embed``, layers and ``head``, each one 4 x 4 weight.

    The root owns ``embed`` and ``head``; each layer is a unit.
    """
    root = Unit("root", (Param("embed", (4, 4)), Param("head", (4, 4))), segments=("embed", ..., "head"))
    return [root, *(Unit(f"layers.{i}", (Param("weight", (4, 4)),)) for i in range(layers))]
