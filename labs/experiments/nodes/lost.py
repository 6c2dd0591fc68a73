"""One of two nodes is killed in the middle of a training, and comes back: the run goes on from its last checkpoint.

What happens, in this order: the ranks of the node that is left fail in their next collective. Their agent is told to
start them anew (``--max-restarts``), and for that it meets the other agent again: it waits. Somebody, or Slurm or
Kubernetes, starts the other node's agent with the very same command. They meet, start all ranks, and these load the
newest checkpoint from the folder that both nodes share.

The rendezvous itself lives on the head node. If that one is lost the other agent gives up, and both are started anew.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from labs.experiments.nodes.agents import Agents, started
from labs.experiments.nodes.namespaces import two_nodes
from labs.experiments.result import LabResult, ResultRow, this_machine

SAVE_EVERY = 3
STEPS = 8
KILLED_AFTER = 5
GONE = "another rank is gone or stuck"
"""What labs.train says on the node that is left."""


def lose_a_node(*, apart: bool | None = None) -> LabResult:
    """Train with HSDP on two nodes, kill the second after some steps, start its agent again, and see how it ends.

    Args:
        apart: as `two_nodes`.

    Raises:
        RuntimeError: an agent failed otherwise, or the run did not end; with what it printed.
    """
    arguments = ["--api=hsdp", "--device=cpu", f"--steps={STEPS}", f"--save_every={SAVE_EVERY}", "--seq_len=64"]
    with two_nodes(apart=apart) as nodes, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments.append(f"--out={folder / 'run'}")
        with started(nodes, arguments, folder, max_restarts=1) as agents:
            agents.until(lambda: len(agents.steps()) >= KILLED_AFTER, f"step {KILLED_AFTER}")
            before = _losses(agents)
            agents.kill(1)
            agents.until(lambda: GONE in agents.printed(0), "the ranks of node 0 to notice")
            agents.start(1)
            agents.wait()
            after = _losses(agents)
            lines = [json.loads(line) for line in agents.metrics.read_text().splitlines()]
        description = nodes.description
    done = len(before)
    resumed = next((int(line["step"]) for line in lines if line.get("kind") == "resumed"), -1)
    differ = max((abs(after[step] - before[step]) for step in range(resumed, done)), default=math.nan)
    name = f"node 1 killed after {done} steps"
    rows = (
        ResultRow(name, "resumed from step", done - done % SAVE_EVERY, resumed, ""),
        ResultRow(name, "steps in the end", STEPS, len(after), ""),
        ResultRow(name, "loss of steps done twice differs by", 0.0, differ, ""),
    )
    return LabResult("nodes", "measured", rows, this_machine("cpu", 4), notes=(description,))


def _losses(agents: Agents) -> dict[int, float]:
    """By step; a step that was done twice has its second loss, since a resumed run goes on in the same file."""
    return {int(line["step"]): line["loss"] for line in agents.steps()}
