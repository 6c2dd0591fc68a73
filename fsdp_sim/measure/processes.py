"""`measure_in_processes`: one plain process per rank, which is what GPUs of this node over NCCL need."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from fsdp_sim.measure.on_rank import Case, measure

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def measure_in_processes(ranks: int, cases: Sequence[Case], budget_s: float, device: str = "cuda") -> list[list[Any]]:
    """What each rank measured. The processes end with this call, however it ends.

    Raises:
        RuntimeError: a rank failed; its traceback is in the text.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, list(cases), budget_s, device, folder)
        started = mp.start_processes(_rank, args, nprocs=ranks, join=False, daemon=True, start_method="spawn")
        try:
            while not started.join():
                pass
        except ProcessException as error:
            raise RuntimeError(f"a rank failed: {error}") from error
        finally:
            for process in started.processes:
                process.terminate()
        return [pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, cases: list[Case], budget_s: float, device: str, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole terminal; the parent ends its ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    device_id = None
    if device == "cuda":
        torch.cuda.set_device(rank)
        device_id = torch.device(device, rank)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=ranks, device_id=device_id)
    try:
        found = measure(cases, device, budget_s)
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}").write_bytes(pickle.dumps(found))
