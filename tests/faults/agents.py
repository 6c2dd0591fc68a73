"""Starts torchrun's agent with the trainer as its ranks, quickly: agents are forked from a server that has torch.

The agent is torch's own (`torch.distributed.launcher.api.elastic_launch`, which torchrun calls): it watches the ranks,
stops all when one fails, starts them anew, passes signals on. Only the import of torch is saved, on each start and each
restart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180.0
"""Longer than any of these trainings takes on a loaded machine."""


class Agents:
    """The server; `start` forks an agent from it."""

    def __init__(self) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self, folder: Path, *arguments: str, ranks: int = 2, max_restarts: int = 0, faults: str = "", **env: str
    ) -> Job:
        """Start ``python -m labs.train ARGUMENTS --out=FOLDER/run`` on ranks of an agent."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{uuid.uuid4().hex}.log"
        job = {
            "arguments": [*arguments, f"--out={folder / 'run'}", "--device=cpu"],
            "ranks": ranks,
            "max_restarts": max_restarts,
            "env": {"FSDP_SIM_FAULTS": faults, **env},
            "log": str(log),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        return Job(psutil.Process(int(self._server.stdout.readline())), folder / "run", log)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(TIMEOUT_S)


@dataclass
class Job:
    """An agent and its ranks.

    Attributes:
        agent: the process of the agent.
        out: the run's folder.
        log: what agent and ranks print.
    """

    agent: psutil.Process
    out: Path
    log: Path
    started_s: float = field(default_factory=time.monotonic)

    @property
    def printed(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The agent's exit status, -9 if it was killed. Fails when it takes longer: a hang."""
        try:
            self.agent.wait(timeout_s)
        except psutil.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.printed[-4000:]}") from None
        status = self.log.with_suffix(".status")
        return int(status.read_text()) if status.exists() else -signal.SIGKILL

    def ranks(self) -> list[psutil.Process]:
        """The living ranks in their order, also when their agent is gone: they are of its session."""
        found = []
        for process in psutil.process_iter():
            try:
                if process != self.agent and os.getsid(process.pid) == self.agent.pid:
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return sorted((p for p in found if p.status() != psutil.STATUS_ZOMBIE), key=lambda process: process.pid)

    def until(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until this has been printed."""
        give_up_s = time.monotonic() + timeout_s
        while text not in self.printed:
            assert time.monotonic() < give_up_s, f"{text!r} was not printed within {timeout_s:g} s:\n{self.printed}"
            assert self.agent.is_running(), f"ended without printing {text!r}:\n{self.printed}"
            time.sleep(0.02)

    def kill(self) -> None:
        for process in [self.agent, *self.ranks()]:
            try:
                process.kill()
            except psutil.Error:
                continue

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are steps."""
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "loss" in line]


@contextmanager
def agents() -> Iterator[Agents]:
    server = Agents()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def starting(server: Agents, folder: Path, setting: Sequence[str]) -> Iterator[Callable[..., Job]]:
    """A function that starts trainings with a setting, in a folder or below it; nothing of them outlives the block."""
    jobs: list[Job] = []

    def start(*arguments: str, into: str = "", **options: Any) -> Job:
        jobs.append(server.start(folder / into, *setting, *arguments, **options))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.kill()


# ---- The server -----------------------------------------------------------------------------------------------------


def _rank(arguments: list[str]) -> int:
    from labs import train

    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    ):  # those of the agent it was forked from
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["labs.train", *arguments]
    status = train.command()
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _heard_later(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """torch's start of ranks. A forked rank may tell its agent to leave before the agent has noted the next one, which
    would then be left alone; one that imports torch first never does. So what comes meanwhile is heard afterwards."""

    def started(context: Any) -> None:
        heard: list[Any] = []
        handler = signal.signal(signal.SIGTERM, lambda *signal_: heard.append(signal_))
        start(context)
        signal.signal(signal.SIGTERM, handler)
        if heard and callable(handler):
            handler(*heard[0])

    return started


def _agent(job: dict[str, Any]) -> None:
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["env"])
    MultiprocessContext._start = _heard_later(MultiprocessContext._start)  # type: ignore[method-assign]
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=job["ranks"], run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=job["max_restarts"], start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    status = 0
    try:
        elastic_launch(config, _rank)(job["arguments"])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        status = 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    sys.stderr.flush()
    Path(job["log"]).with_suffix(".status").write_text(str(status))
    os._exit(status)


def _serve() -> None:
    import labs.train  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are waited for by their starter, through psutil
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _agent(json.loads(line))
        print(child, flush=True)


if __name__ == "__main__":
    _serve()
