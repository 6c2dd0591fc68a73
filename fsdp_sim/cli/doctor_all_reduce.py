"""One all-reduce in processes of its own: ``python -m fsdp_sim.cli.doctor_all_reduce nccl 8``.

Ends with exit status 0 if the sum is right on every rank. Started by ``fsdp-sim doctor``, which ends it if it hangs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fsdp_sim.cli.doctor_finding import torch_here


def all_reduce(rank: int, ranks: int, backend: str, folder: str) -> None:
    """On a rank: sum ones over all ranks.

    Raises:
        ArithmeticError: the sum is wrong.
    """
    torch = torch_here()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist = torch.distributed
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        ones = torch.ones(2**20, device=device)
        dist.all_reduce(ones)
        if not bool((ones == ranks).all()):
            raise ArithmeticError(f"rank {rank}: {ranks} ones make {float(ones[0])}")
    finally:
        dist.destroy_process_group()


def main(backend: str, ranks: int) -> None:
    """Start the ranks and wait for them."""
    torch_here()
    from importlib import import_module

    with tempfile.TemporaryDirectory() as folder:
        import_module("torch.multiprocessing").spawn(all_reduce, (ranks, backend, folder), nprocs=ranks)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
