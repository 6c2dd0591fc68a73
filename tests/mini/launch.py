"""Real gloo ranks that stay alive between tests, so that a test costs milliseconds and not an import of torch."""

from __future__ import annotations

import multiprocessing as mp
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.fsdp", "fsdp_sim.mini"])
TIMEOUT_S = 60
MOST_GROUPS = 8


def rank_main(rank: int, world_size: int, store: str, connection: Any) -> None:
    """A rank: join the group, then run what is sent until told to stop."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    while (work := connection.recv_bytes()) != b"stop":
        fn, args = cloudpickle.loads(work)
        torch.manual_seed(0)
        try:
            answer = ("done", fn(*args))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        connection.send_bytes(cloudpickle.dumps((*answer, dist.get_pg_count())))
    dist.destroy_process_group()


class Ranks:
    """N processes in one process group."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        pairs = [CONTEXT.Pipe() for _ in range(world_size)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            CONTEXT.Process(target=rank_main, args=(rank, world_size, str(folder / "store"), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        self.broken = False
        self.groups = 1

    @property
    def worn(self) -> bool:
        """Time for new ones: torch keeps the process groups that tests make, and each has a thread that polls."""
        return self.broken or self.groups > MOST_GROUPS

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(*args)`` on every rank; the results in rank order. A rank that raises fails the test."""
        cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
        work = cloudpickle.dumps((fn, args))
        for connection in self.connections:
            connection.send_bytes(work)
        self.broken = True  # until every rank has answered well
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(TIMEOUT_S):
                raise AssertionError(f"rank {rank} of {self.world_size} gave no answer within {TIMEOUT_S} s")
            kind, result, self.groups = cloudpickle.loads(connection.recv_bytes())
            if kind == "raised":
                raise AssertionError(f"rank {rank} of {self.world_size} raised:\n{result}")
            results.append(result)
        self.broken = False
        return results

    def stop(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if self.broken:
                process.kill()
            else:
                connection.send_bytes(b"stop")
            process.join(10)
