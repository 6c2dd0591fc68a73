"""A torchrun agent on each of two nodes, watched from outside, and nothing of them left behind.

[Note: an agent that comes back]  By default the head node's agent makes a store for its ranks once, and tells its
address in the first round of the rendezvous only. An agent that was started anew in place of a dead one waits for it
in the next round, in vain, and after 60 s both give up (torch 2.13: `DynamicRendezvousHandler.next_rendezvous`). With
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` each round has a store of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from labs.cluster import torchrun
from labs.experiments.nodes.namespaces import Node, Nodes

ROOT = Path(__file__).parents[3]
LONG_S = 300.0
"""Longer than any of this takes on a loaded machine."""

LEAVE_S = 5.0


@dataclass
class Agents:
    """The two agents of a job; the ranks of both write to one folder, as to a shared file system.

    Attributes:
        ranks_per_node: ranks that each agent starts.
        folder: where logs, metrics and the run's checkpoints are.
    """

    nodes: Nodes
    arguments: Sequence[str]
    folder: Path
    ranks_per_node: int = 2
    max_restarts: int = 0
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def command(self, index: int) -> list[str]:
        """The line that one would type on this node of a cluster; the rendezvous is at the head node."""
        head, node = self.nodes.nodes[0], self.nodes.nodes[index]
        return [
            "torchrun", "--nnodes=2", f"--nproc-per-node={self.ranks_per_node}", f"--max-restarts={self.max_restarts}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={head.address}:{self.nodes.port}", "--rdzv-id=lab",
            f"--rdzv-conf=is_host={int(index == 0)}", f"--local-addr={node.address}",
            "-m", "labs.train", *self.arguments, f"--metrics={self.metrics}",
        ]  # fmt: skip

    def start(self, index: int) -> None:
        """Start the agent of a node, be it for the first time or after `kill`."""
        node: Node = self.nodes.nodes[index]
        # Without a name gloo listens at the address of the machine's name, which the other node does not reach.
        env = os.environ | {"GLOO_SOCKET_IFNAME": node.interface, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see the note of this file
        python = [sys.executable, "-c", torchrun.TIED, sys.executable, "-m", "torch.distributed.run"]
        with self._log(index).open("ab") as log:
            self.agents[index] = subprocess.Popen(
                [*node.enter, *python, *self.command(index)[1:]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    def kill(self, index: int) -> None:
        """What a power failure does to a node: its agent and its ranks are gone, without a word."""
        for process in self._processes(index):
            with suppress(psutil.Error):
                process.kill()
        self.agents.pop(index).wait()

    def printed(self, index: int) -> str:
        """What the agent of a node and its ranks have printed."""
        return self._log(index).read_text(errors="replace") if self._log(index).exists() else ""

    def steps(self) -> list[dict[str, float]]:
        """The lines of the metrics that are steps; rank 0 writes one at the end of each."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "loss" in line]

    def until(self, come: Callable[[], bool], what: str) -> None:
        """Wait for something while the agents run.

        Raises:
            RuntimeError: an agent has failed, or it takes longer than `LONG_S`; with the end of what it printed.
        """
        give_up_s = time.monotonic() + LONG_S
        while not come():
            ended = [index for index, agent in self.agents.items() if agent.poll() is not None]
            if (ended and not come()) or time.monotonic() > give_up_s:
                index = ended[0] if ended else 0
                why = f"ended with status {self.agents[index].returncode}" if ended else f"needs over {LONG_S:g} s"
                raise RuntimeError(
                    f"waiting for {what}, node {index} {why}: {torchrun.tool_message(self.printed(index))}"
                )
            time.sleep(0.005)

    def wait(self) -> None:
        """Wait for the end of all ranks.

        Raises:
            RuntimeError: an agent ended with another status than 0, or not at all.
        """
        for index, agent in self.agents.items():
            try:
                status = agent.wait(LONG_S)
            except subprocess.TimeoutExpired:
                status = None
            if status != 0:
                how = f"ended with status {status}" if status is not None else f"still runs after {LONG_S:g} s"
                raise RuntimeError(f"the agent of node {index} {how}: {torchrun.tool_message(self.printed(index))}")

    def close(self) -> None:
        """End what still runs: first as one asks, then by force."""
        processes = [process for index in self.agents for process in self._processes(index)]
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, LEAVE_S)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        for agent in self.agents.values():
            agent.wait()

    def _log(self, index: int) -> Path:
        return self.folder / f"node{index}.log"

    def _processes(self, index: int) -> list[psutil.Process]:
        with suppress(psutil.Error):
            agent = psutil.Process(self.agents[index].pid)
            return [agent, *agent.children(recursive=True)]
        return []


@contextmanager
def started(nodes: Nodes, arguments: Sequence[str], folder: Path, *, max_restarts: int = 0) -> Iterator[Agents]:
    """An agent on each node, which train with ``arguments``; all their processes end with the block.

    Args:
        folder: an empty one.
        max_restarts: how often an agent starts its ranks anew when one fails, also one of the other node.
    """
    agents = Agents(nodes, arguments, folder, max_restarts=max_restarts)
    try:
        for index in range(len(nodes.nodes)):
            agents.start(index)
        yield agents
    finally:
        agents.close()
