"""FSDP over both nodes against HSDP (sharded inside a node, copied across): the same training over the same link.

The job starts on a fast link. After a few steps what a step takes is known, and from that and the bytes that must
cross, what it will take over a slow link: nothing overlaps, since torch's FSDP waits for gloo. Then the link is made
slow while the job runs.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.nodes.agents import started
from labs.experiments.nodes.namespaces import Nodes, two_nodes
from labs.experiments.nodes.traffic import across_bytes
from labs.experiments.result import LabResult, ResultRow, this_machine

PLACE = RankPlace(rank=0, world_size=4, local_rank=0, local_world_size=2)
MIB = 2**20
NAMES = {"fsdp2": "FSDP over all 4 ranks", "hsdp": "HSDP, a copy on each node"}
_WARM = 2  # steps after the start, and after the link has changed, that are not counted


def run(*, mbit: float = 100.0, steps: int = 4, apart: bool | None = None) -> LabResult:
    """Train both ways over two nodes; predict and measure the bytes across the link and the time of a step.

    Args:
        mbit: what each node may send over the slow link, Mbit/s.
        steps: counted on each of the two links.
        apart: as `two_nodes`. On loopback there is no link to count on or to slow down: only the fast steps are
            measured, and the predictions stand alone.

    Raises:
        ValueError: a number that cannot be. RuntimeError: an agent failed; with what it printed.
    """
    if not mbit > 0:
        raise ValueError(f"mbit={mbit}: a link carries more than nothing, such as 100")
    if steps < 1:
        raise ValueError(f"steps={steps}: count at least 1")
    rows: list[ResultRow] = []
    for api, name in NAMES.items():
        with two_nodes(apart=apart) as nodes:
            rows += _train(nodes, TrainConfig(api=api, device="cpu"), name, mbit, steps)
            description = nodes.description
    return LabResult("nodes", "measured", tuple(rows), this_machine("cpu", 4), notes=(description,))


def _train(nodes: Nodes, config: TrainConfig, name: str, mbit: float, steps: int) -> list[ResultRow]:
    across = across_bytes(config, PLACE)
    fast, slow, last = _WARM + steps, 2 * (_WARM + steps), 2 * (_WARM + steps) + 1
    arguments = [f"--api={config.api}", "--device=cpu", f"--steps={last if nodes.apart else fast}"]
    with tempfile.TemporaryDirectory() as folder, started(nodes, arguments, Path(folder)) as agents:

        def sent_after(step: int) -> int:
            agents.until(lambda: len(agents.steps()) >= step, f"step {step}")
            return nodes.sent_bytes() if nodes.apart else 0

        sent_after(fast)
        measured = 0.0
        if nodes.apart:
            nodes.limit(mbit)
            before = sent_after(fast + _WARM)  # on the slow link: a step is long beside the moment it takes to look
            measured = (sent_after(slow) - before) / 2 / steps
        agents.wait()
        step_s = [line["step_s"] for line in agents.steps()]
    fast_s = statistics.median(step_s[_WARM:fast])
    predicted_s = fast_s + 8 * across / (mbit * 1e6)
    slow_ms = 1e3 * statistics.median(step_s[fast + _WARM : slow]) if nodes.apart else None
    return [
        ResultRow(name, "sent per node and step", across / MIB, measured / MIB if nodes.apart else None, "MiB"),
        ResultRow(name, "step on the fast link", None, 1e3 * fast_s, "ms"),
        ResultRow(name, f"step at {mbit:g} Mbit/s", 1e3 * predicted_s, slow_ms, "ms"),
    ]
