"""Runs scripts on two gloo ranks each, one after another, as torchrun would: torch is imported once, ranks are forks.

``python run_on_ranks.py JOBS.json``, a list of script and folder; prints a list of what rank 0 printed, and the status.
"""

import contextlib
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which the first step of every optimizer imports
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

RANKS = 2
KEPT: list[object] = []


def keep_groups() -> None:
    """Process groups live until the process ends. Where DDP's reducer is the last to hold one, it ends gloo's threads
    while it has the GIL, for which one of them may be waiting: seldom, and then for ever (torch 2.13).
    """
    init = dist.init_process_group

    def kept(*args: object, **options: object) -> None:
        init(*args, **options)  # type: ignore[arg-type]
        KEPT.append(dist.group.WORLD)

    dist.init_process_group = kept


def rank(script: str, folder: str, number: int, port: int) -> None:
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OUT_DIR": folder,
    }  # fmt: skip
    torch.set_num_threads(1)
    keep_groups()
    sys.path.insert(0, str(Path(script).parent))
    out = open(Path(folder, f"rank{number}.txt"), "w")  # noqa: SIM115 - the process ends with it
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            out.flush()
            os._exit(1)
    out.flush()


def run(script: str, folder: str) -> dict[str, object]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for number in range(RANKS):
        child = os.fork()
        if child == 0:
            rank(script, folder, number, port)
            os._exit(0)
        children.append(child)
    status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    texts = [Path(folder, f"rank{number}.txt").read_text() for number in range(RANKS)]
    return {"status": status, "output": texts[0], "other": texts[1]}


if __name__ == "__main__":
    print(json.dumps([run(*job) for job in json.loads(Path(sys.argv[1]).read_text())]))
