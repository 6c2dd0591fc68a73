"""`fit_link`: the link whose collectives take as long as those that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fsdp_sim.cost import algorithms, fitted_links
from fsdp_sim.measure.fit import least_squares_above_zero, rounded
from fsdp_sim.measure.on_rank import CollectiveTime
from fsdp_sim.spec import Cluster, Gpu, Link


def fit_link(times: Sequence[CollectiveTime], start: Link, part: Gpu) -> Link:
    """The link whose collectives take nearest to the measured times: least squares of the relative error.

    The times are linear in what is sought (base, hop, fill, and seconds per byte, on CPU cores for each collective
    apart), and none of it is negative.

    Raises:
        ValueError: no link has such times.
    """
    zero = replace(start, base_s=0.0, hop_s=0.0, fill_s=0.0, fraction=1.0)
    ops = list(dict.fromkeys(time.op for time in times)) if part.arch == "CPU" else [""]
    ones = [replace(zero, base_s=1.0), replace(zero, hop_s=1.0), replace(zero, fill_s=1.0)]
    rows = []
    for time in times:
        per_byte_s = _ring_s(time, zero, part)
        latencies = [_ring_s(time, one, part) - per_byte_s for one in ones]
        rows.append([*latencies, *(per_byte_s if op in ("", time.op) else 0.0 for op in ops)])
    x = least_squares_above_zero(np.array(rows), np.array([t.seconds for t in times]), len(ones))
    base_s, hop_s, fill_s = map(rounded, x[: len(ones)])
    start = replace(start, base_s=base_s, hop_s=hop_s, fill_s=fill_s)
    slowness = dict(zip(ops, x[len(ones) :], strict=True))
    if part.arch != "CPU":
        return replace(start, fraction=min(1.0, rounded(1 / slowness[""])))
    gather = slowness.get("all_gather") or statistics.median(slowness.values())
    others = [op for op in slowness if op != "all_gather"]
    fractions: dict[str, Any] = {f"{op}_fraction": rounded(gather / slowness[op]) for op in others}
    return replace(start, bytes_per_s=rounded(start.bytes_per_s / gather), **fractions)  # no datasheet gives it a peak


def _ring_s(time: CollectiveTime, intra: Link, part: Gpu) -> float:
    """What a ring over that link takes for the same collective."""
    cluster = Cluster(part, gpus=time.group_size, intra=intra)
    found = algorithms(time.op, time.group_size, cluster, 1, fitted_links())
    return next(path for path in found if path.algorithm == "ring").seconds(time.n_bytes)
