"""What the kernels of a GPU trace do in each forward and backward of a unit: multiply, attend, or move bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fsdp_sim.timeline.analysis import total_s, uncovered
from fsdp_sim.timeline.kinds import Op
from fsdp_sim.timeline.kineto.draft import intervals
from fsdp_sim.timeline.kineto.gpu import kernel_draft, sizes_by_launch
from fsdp_sim.timeline.kineto.host import Host
from fsdp_sim.timeline.kineto.names import kernel_kind
from fsdp_sim.timeline.kineto.rows import read_rows
from fsdp_sim.timeline.limits import MAX_BYTES


class KernelSeconds(NamedTuple):
    """Kernels of one kind in one forward or backward of a unit.

    Attributes:
        kind: ``matmul``, ``attention`` (fused), or ``memory``.
        seconds: added up. ``beside_s``: of them while a collective was in flight.
    """

    op: Op
    unit: str
    step: int
    occurrence: int
    kind: str
    seconds: float
    beside_s: float


def kernel_seconds(path: str | Path, *, max_bytes: int = MAX_BYTES) -> list[KernelSeconds]:
    """The kernels of the units' own compute in a trace; none where the trace is of CPU cores.

    Raises:
        ValueError: the file is broken or no trace.
    """
    rows = read_rows(path, max_bytes=max_bytes)
    host = Host(rows)
    sizes = sizes_by_launch(rows, host)
    drafts = [kernel_draft(kernel, rows, host, sizes) for kernel in rows.kernels]
    communication = intervals(d for d in drafts if d.is_collective)
    found: dict[tuple[Op, str, int, int, str], list[float]] = {}
    for kernel, draft in zip(rows.kernels, drafts, strict=True):
        if draft.op not in (Op.FWD, Op.BWD, Op.RECOMPUTE) or draft.is_collective:
            continue
        kind = kernel_kind(kernel.name)
        took = kernel.end - kernel.start
        alone = total_s(uncovered(kernel.start, kernel.end, communication))
        of = found.setdefault((draft.op, draft.unit, draft.state.step, draft.state.occurrence, kind), [0.0, 0.0])
        of[0] += took * 1e-6
        of[1] += (took - alone) * 1e-6
    return [KernelSeconds(*key, *times) for key, times in found.items()]
