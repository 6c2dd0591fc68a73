"""Where two runs of the same training part: the first step, unit and tensor, bit by bit and to a tolerance.

[Note: the order of a step]  A fault is best named by the first number that it makes wrong; all later ones are wrong
too. Numbers come into being in this order: the parameters at the start (step 0), then in each step the loss, the
gradients from the head back to the embeddings, their norm, the parameters.

[Note: how far is far]  Ranks add up the same numbers in another order, so they round differently: about 1e-7 of a
tensor in fp32. The distance of two tensors is the 2-norm of their difference over the 2-norm of the first. Two rungs
that add in the same order are the same up to 1e-6. One process adds a whole batch at once where ranks add parts of it;
how far that alone leads apart depends on torch and the CPU (Adam, which divides a gradient by its own size, enlarges
it), so it is measured: one process trains on the batch in as many parts as there are ranks. A fault is far beyond ten
times that, `ORDERS`.

[Note: parameters that are noise]  Some gradients are zero in theory: a bias of the attention's keys adds the same to
every score of a row, and softmax does not see it. What is computed for it is rounding noise, different in every run.
Adam divides a gradient by its own size, so it makes full steps out of the noise. Such elements are found by computing
the gradient in double precision, where the noise is 1e9 times smaller and every true gradient is not. Their values are
not compared to a tolerance; that they do no harm shows in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from labs.model.gpt import GPT

Tensors = dict[str, torch.Tensor]
TOLERANCE = 1e-6
ORDERS = 10  # so many times what another order of the sums makes is allowed between ranks and one process
ZERO = 1e-9  # of a tensor's largest gradient, in double precision: below is a true zero


@dataclass(frozen=True)
class RankRun:
    """What one rank saw. Lists have an entry per step; ``parameters`` has one more, the start.

    Attributes:
        losses: of this rank's rows. norms: of all gradients.
        gradients, parameters: whole tensors, by name, as this rank has or gathers them.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    parameters: list[Tensors] = field(default_factory=list)


@dataclass(frozen=True)
class Divergence:
    """The first number that differs.

    Attributes:
        step: 1 is the first; 0 is before it.
        what: ``loss``, ``gradient``, ``gradient norm``, ``parameter``, ``collectives`` or ``memory``.
        unit, tensor: which gradient or parameter; the tensor's name within its unit.
        error: relative, see [Note: how far is far].
        ranks: that see it.
        rows: of the tensor, first and last; None if they are all of it or not in one piece.
        shard_of: the ranks that hold these rows and no other.
        others: gradients or parameters that differ in the same step, besides this one.
        units: of all of them.
        detail: in words, for collectives and memory.
    """

    step: int
    what: str
    unit: str = ""
    tensor: str = ""
    error: float = 0.0
    ranks: tuple[int, ...] = ()
    world_size: int = 1
    rows: tuple[int, int] | None = None
    shard_of: tuple[int, ...] = ()
    others: int = 0
    units: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step else "before the first step"
        if self.what in ("collectives", "memory"):
            return f"{when}, {f'unit {self.unit}: ' if self.unit else ''}{self.detail}"
        name = f"{self.what} of {self.tensor}" if self.tensor else self.what
        parts = [when, f"unit {self.unit}" if self.unit else "", name + self._others()]
        if self.rows is not None:
            whose = f", the shard of {_ranks(self.shard_of)}" if self.shard_of else ""
            parts.append(f"rows {self.rows[0]} to {self.rows[1]}{whose}")
        if self.world_size > 1:
            parts.append("on all ranks" if len(self.ranks) == self.world_size else f"on {_ranks(self.ranks)}")
        return ", ".join(part for part in parts if part) + f" (by {self.error:.0e})"

    def _others(self) -> str:
        if not self.others:
            return ""
        where = f"all of {self.unit}" if len(self.units) == 1 else f"in {len(self.units)} units"
        return f" and {self.others} more, {where}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def first_divergence(
    a: Sequence[RankRun],
    b: Sequence[RankRun],
    tolerance: float | None = TOLERANCE,
    noise: Tensors | None = None,
    n_shards: int | None = None,
) -> Divergence | None:
    """Compare run ``b`` with run ``a``, each a `RankRun` per rank; if not as many, the first stands for all of ``a``.

    Args:
        tolerance: see [Note: how far is far]; None: every bit must be equal, but for the norms, which each rung adds up
            in its own way.
        noise: from `noise_elements`, for each parameter a mask of what is not compared to a tolerance.
        n_shards: pieces into which ``b`` cuts dim 0 of its parameters, to say whose shard differs.

    Returns:
        the first in [Note: the order of a step], or None.
    """
    return next(_divergences(a, b, tolerance, noise or {}, n_shards), None)


def largest_error(a: Sequence[RankRun], b: Sequence[RankRun], noise: Tensors) -> float:
    """The largest relative error of any loss, gradient or parameter of two runs but noise."""
    return max((d.error for d in _divergences(a, b, 0.0, noise, None)), default=0.0)


def _divergences(
    a: Sequence[RankRun], b: Sequence[RankRun], tolerance: float | None, noise: Tensors, n_shards: int | None
) -> Iterator[Divergence]:
    pairs = [(a[rank] if len(a) == len(b) else a[0], mine) for rank, mine in enumerate(b)]
    for step in range(len(b[0].losses) + 1):
        if step:
            yield from _losses(a, b, step, tolerance)
            gradients = [(x.gradients[step - 1], y.gradients[step - 1]) for x, y in pairs]
            yield from _tensors("gradient", step, gradients, tolerance, {}, n_shards)
            if tolerance:  # each rung has its own way to add up the squares: no bits to compare
                norms = [(x.norms[step - 1], y.norms[step - 1]) for x, y in pairs]
                yield from _numbers("gradient norm", step, norms, tolerance)
        parameters = [(x.parameters[step], y.parameters[step]) for x, y in pairs]
        yield from _tensors("parameter", step, parameters, tolerance, noise, n_shards)


def _losses(a: Sequence[RankRun], b: Sequence[RankRun], step: int, tolerance: float | None) -> Iterator[Divergence]:
    if len(a) == len(b):
        yield from _numbers("loss", step, [(x.losses[step - 1], y.losses[step - 1]) for x, y in zip(a, b, strict=True)],
                            tolerance)  # fmt: skip
    else:  # ranks have equally many rows, so the mean of their losses is the loss of the batch
        x, y = (sum(run.losses[step - 1] for run in runs) / len(runs) for runs in (a, b))
        yield from _numbers("loss", step, [(x, y)] * len(b), tolerance)


def _numbers(what: str, step: int, pairs: list[tuple[float, float]], tolerance: float | None) -> Iterator[Divergence]:
    errors = [distance(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)) for x, y in pairs]
    ranks = tuple(rank for rank, error in enumerate(errors) if _is_off(error, tolerance))
    if ranks:
        yield Divergence(step, what, error=max(errors), ranks=ranks, world_size=len(pairs))


def _tensors(
    what: str,
    step: int,
    pairs: list[tuple[Tensors, Tensors]],
    tolerance: float | None,
    noise: Tensors,
    n_shards: int | None,
) -> Iterator[Divergence]:
    names = list(pairs[0][0])
    if what == "gradient":
        names.reverse()  # as backward computes them
    masks = {} if tolerance is None else noise
    errors = {name: [distance(x[name], y.get(name), masks.get(name)) for x, y in pairs] for name in names}
    off = [name for name in names if any(_is_off(error, tolerance) for error in errors[name])]
    units = tuple(dict.fromkeys(unit_of(name)[0] for name in off))
    for name in off:
        unit, tensor = unit_of(name)
        ranks = tuple(rank for rank, error in enumerate(errors[name]) if _is_off(error, tolerance))
        x, y = pairs[ranks[0]]
        rows = _rows(x[name], y.get(name), tolerance or 0.0)
        yield Divergence(
            step, what, unit, tensor, max(errors[name]), ranks, len(pairs), rows,
            _shard_of(rows, len(x[name]), n_shards, len(pairs)), len(off) - 1, units,
        )  # fmt: skip


def distance(a: torch.Tensor, b: torch.Tensor | None, ignored: torch.Tensor | None = None) -> float:
    """The 2-norm of the difference over that of ``a``, where ``ignored`` is not set; inf if ``b`` is missing or has
    another shape, or a NaN that ``a`` has not. Bits that differ never give 0 (0.0 and -0.0 count as equal)."""
    if b is None or a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    x, difference = a.double(), b.double() - a.double()
    if ignored is not None:
        x, difference = x[~ignored], difference[~ignored]
    size, error = x.norm().item(), difference.norm().item()
    if error != error:
        return float("inf")
    return error / size if size else float("inf") * error if error else 0.0


def _is_off(error: float, tolerance: float | None) -> bool:
    return error > (tolerance or 0.0)


def _rows(a: torch.Tensor, b: torch.Tensor | None, tolerance: float) -> tuple[int, int] | None:
    """First and last of the rows that differ, if they are in one piece and not all."""
    if b is None or a.shape != b.shape:
        return None
    difference = (b - a).abs().flatten(1).amax(dim=1) if a.ndim > 1 else (b - a).abs()
    rows = (~(difference <= tolerance * a.abs().max())).nonzero().flatten().tolist()
    if not rows or len(rows) == len(a) or rows[-1] - rows[0] >= len(rows):
        return None
    return rows[0], rows[-1]


def _shard_of(rows: tuple[int, int] | None, n_rows: int, n_shards: int | None, world_size: int) -> tuple[int, ...]:
    """The ranks that hold the rows and no others, as `torch.chunk` deals them out; none if it is not one piece."""
    if rows is None or n_shards is None:
        return ()
    chunk = -(-n_rows // n_shards)  # rows of a piece, rounded up
    if rows[0] // chunk != rows[1] // chunk:
        return ()
    return tuple(range(rows[0] // chunk, world_size, n_shards))  # one in each row of a 2-D mesh


def unit_of(name: str) -> tuple[str, str]:
    """The unit of a parameter, and its name in it.

    Example:
        >>> unit_of("layers.0.attn.qkv.weight"), unit_of("norm.bias")
        (('layers.0', 'attn.qkv.weight'), ('root', 'norm.bias'))
    """
    if name.startswith("layers."):
        layers, number, tensor = name.split(".", 2)
        return f"{layers}.{number}", tensor
    return "root", name


def noise_elements(build: Callable[[], GPT], x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Elements whose true gradient is zero, but not what fp32 computes for it, see [Note: parameters that are noise].

    Args:
        build: makes the model.
        x, y: tokens and targets, both (batch, seq).

    Returns:
        for each parameter that has some a bool mask of its shape.
    """
    computed = []
    for dtype in (torch.float32, torch.float64):
        model = build().to(dtype)
        model(x, y).backward()
        computed.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    singles, doubles = computed
    masks = {
        name: (double.abs() <= ZERO * double.abs().max()) & ((double != 0) | (singles[name] != 0))
        for name, double in doubles.items()
    }
    return {name: mask for name, mask in masks.items() if mask.any()}


def ranges(name: str, mask: torch.Tensor) -> str:
    """The elements of a 1-D mask as slices: ``layers.0.attn.qkv.bias[32:64]``; of another the number of elements."""
    if mask.ndim > 1:
        return f"{int(mask.sum())} elements of {name}"
    chosen = mask.nonzero().flatten().tolist()
    runs = [[i for _, i in run] for _, run in groupby(enumerate(chosen), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{name}[{run[0]}:{run[-1] + 1}]" for run in runs)
