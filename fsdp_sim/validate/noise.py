"""How good a predictor can be: runs that were measured twice; and how good the simplest one is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from fsdp_sim.cost import workload
from fsdp_sim.validate.published import PublishedRun


def repeated(rows: Sequence[PublishedRun]) -> list[tuple[PublishedRun, PublishedRun, float]]:
    """Pairs of rows that describe the same request, and the slower one's step time over the other's, less 1."""
    same: dict[object, list[PublishedRun]] = defaultdict(list)
    for row in rows:
        if row.step_time_s is not None:
            same[row.model, row.cluster, row.plan].append(row)
    pairs = []
    for some in same.values():
        for one, other in pairwise(some):
            first, second = float(one.step_time_s or 0), float(other.step_time_s or 0)
            pairs.append((one, other, max(first, second) / min(first, second) - 1.0))
    return pairs


def constant_mfu_errors(rows: Sequence[PublishedRun], left_out: Sequence[str]) -> list[float]:
    """Errors of "the model-FLOPs utilisation is one number per GPU", taken as the median over the other groups.

    Args:
        rows: with step times.
        left_out: the group of each row; its utilisation comes from the rows of other groups.
    """
    flops = [_flops(row) for row in rows]
    used = np.array([f / float(r.step_time_s or np.nan) for f, r in zip(flops, rows, strict=True)])  # FLOP/s per GPU
    gpus = np.array([row.cluster.gpu.name for row in rows])
    groups = np.array(left_out)
    errors = []
    for i, row in enumerate(rows):
        others = used[(gpus == gpus[i]) & (groups != groups[i])]
        errors.append(float(flops[i] / np.median(others) / float(row.step_time_s or np.nan) - 1.0))
    return errors


def _flops(row: PublishedRun) -> float:
    made = workload(row.model, replace(row.plan, activation_checkpointing=None))
    return made.model_flops_per_token * made.tokens * row.plan.grad_accum
