"""`pareto`: the plans that no other plan beats in both time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_sim.requests import ALIASES, MODEL_FIELDS
from fsdp_sim.simulation import Fit

MAY_FIT = "may fit"
"""In place of a `Fit`: of a large sweep's plan whose tensors fit, over which torch's allocator was not played."""
RUNS = (Fit.FITS, Fit.EDGE, MAY_FIT)
MODEL_NAMES = (
    "model",
    "model_file",
    "torchtitan",
    *MODEL_FIELDS,
    *(name for name, key in ALIASES.items() if key in MODEL_FIELDS),
)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other point beats: none is as small in both and smaller in one; by the first number.

    Of equal points the first is taken.

    Example:
        >>> pareto([(1.0, 9.0), (2.0, 5.0), (2.0, 6.0), (3.0, 5.0), (4.0, 1.0)])
        [0, 1, 4]
    """
    best, found = float("inf"), []
    for place in sorted(range(len(points)), key=lambda n: (points[n], n)):
        if points[place][1] < best:
            best = points[place][1]
            found.append(place)
    return found


def front_of(rows: Sequence[Mapping[str, str]]) -> list[int]:
    """Places of the rows of a sweep that run (they fit, are on the edge of memory, or may fit) and that no other such
    row of the same model beats; by model, then by time.

    Time is that of a GPU per token, memory the peak.
    """
    models: dict[tuple[str | None, ...], list[int]] = {}
    names = set(MODEL_NAMES).intersection(set[str]().union(*rows))
    for place, row in enumerate(rows):
        if row["fit"] in RUNS:
            models.setdefault(tuple([row.get(name) for name in names]), []).append(place)
    found = []
    for places in models.values():
        points = [(1.0 / float(rows[p]["tokens_per_s_per_gpu"]), float(rows[p]["peak_memory_bytes"])) for p in places]
        found += [places[n] for n in pareto(points)]
    return found
