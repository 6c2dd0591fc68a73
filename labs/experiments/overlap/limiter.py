"""FSDP1's rate limiter: how far the CPU runs ahead with it, and without."""

from __future__ import annotations

from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Op, Timeline
from fsdp_sim.timeline.analysis import median_step
from labs.experiments.result import ResultRow
from labs.measure.step_summary import COMPUTE, ROOT

UNUSED = "most all-gathers issued and not yet computed with"
LIMITED = "8 H100 at 8 rows of gpt2-774m, FSDP1, limit_all_gathers="


def most_unused(timeline: Timeline, rank: int = 0) -> int:
    """The most all-gathers at a time that the CPU has issued and whose units have not begun to compute."""
    ops = [event for event in timeline.select(step=median_step(timeline)).ops if event.rank == rank]
    changes: list[tuple[float, int]] = []
    for i, gather in enumerate(ops):
        if gather.op is not Op.ALL_GATHER or gather.unit in (ROOT, ""):
            continue
        used = next((e.start_s for e in ops[i + 1 :] if e.op in COMPUTE and e.unit == gather.unit), None)
        if used is not None:
            changes += [(gather.issue_s, 1), (used, -1)]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def limiter_rows() -> list[ResultRow]:
    """Predicted: on CPUs nothing is queued, so the rate limiter has nothing to limit."""
    rows = []
    for limit in (True, False):
        plan = Plan(api="fsdp1", limit_all_gathers=limit, micro_batch=8, seq_len=1024)
        timeline = simulate("gpt2-774m", Cluster("h100", gpus=8), plan).timeline
        rows.append(ResultRow(f"{LIMITED}{limit}", UNUSED, float(most_unused(timeline)), None, "all-gathers"))
    return rows
