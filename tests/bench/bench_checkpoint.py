"""How fast a sharded checkpoint is written and read, beside what `dd` gets from the same disk in the same minutes.

Writing: `Checkpointer.save`, until the checkpoint has its name, beside ``dd if=/dev/zero conv=fsync``. (Both begin with
free space; deleting the oldest checkpoint comes after, and is not in either.) Reading: `newest`, which reads and hashes
every byte, and `load` together, beside ``dd iflag=direct``; before each the files are dropped from the page cache. All
four take turns, since the speed of a shared disk changes from minute to minute; the ratios are those of the medians.

    python tests/bench/bench_checkpoint.py [--gib=3] [--repeats=5] [--ranks=1,2] [--folder=DIR]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_sim.ranks import run
from labs.checkpoint import Checkpointer

AIM = 0.8  # of dd
LAYERS = 12
BLOCK_BYTES = "4M"


def state_of(size_bytes: int, sharded: bool) -> dict[str, torch.Tensor]:
    """Parameters and AdamW's two moments of GPT-shaped layers, as large as asked for together."""
    width = int((size_bytes / (LAYERS * 3 * 4 * 12)) ** 0.5) // 64 * 64
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "fc": (4 * width, width), "out": (width, 4 * width)}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _) in shapes.items()}
    names = [
        (f"{kind}.layers.{layer}.{name}", shape)
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    ]
    tensors = {name: torch.full(shape, 0.5).normal_() for name, shape in names}
    if not sharded:
        return tensors
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in tensors.items()}


def dd(*arguments: str) -> float:
    """Bytes per second, as dd says."""
    said = subprocess.run(["dd", f"bs={BLOCK_BYTES}", *arguments], check=True, capture_output=True, text=True).stderr
    found = re.search(r"(\d+) bytes .* copied, ([\d.e+-]+) s", said)
    assert found, said
    return int(found[1]) / float(found[2])


def drop_from_cache(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(folder: Path, size_bytes: int, repeats: int) -> list[dict[str, float]]:
    """On a rank: what each repeat got, in bytes per second."""
    group = dist.new_group(backend="gloo")
    state = state_of(size_bytes, dist.get_world_size() > 1)
    n_bytes = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    checkpointer = Checkpointer(folder, keep=repeats + 2, group=group)
    other, rows = folder / "dd", []
    for repeat in range(repeats):
        row = {}
        dist.barrier()
        if dist.get_rank() == 0:
            row["dd_write"] = dd("if=/dev/zero", f"of={other}", f"count={n_bytes >> 22}", "conv=fsync")
        dist.barrier()
        start_s = time.perf_counter()
        checkpointer.save(repeat, state, {}, {})
        row["save"] = n_bytes / (time.perf_counter() - start_s)
        if dist.get_rank() == 0:
            drop_from_cache(other, *(folder / f"step-{repeat}").iterdir())
            row["dd_read"] = dd(f"if={other}", "of=/dev/null", "iflag=direct")
            other.unlink()
        dist.barrier()
        start_s = time.perf_counter()
        found = checkpointer.newest()
        verified_s = time.perf_counter()
        assert found is not None
        assert found.step == repeat
        checkpointer.load(found, state)
        end_s = time.perf_counter()
        row["load"] = n_bytes / (end_s - start_s)
        row["verify only"] = n_bytes / (verified_s - start_s)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--folder", help="on the disk to measure; by default where temporary files go")
    options = parser.parse_args()
    table = Table(title=f"Checkpoint of {options.gib:g} GiB, medians of {options.repeats}, MB/s")
    for column in ("ranks", "save", "dd fsync", "ratio", "verify + load", "(verify only)", "dd direct", "ratio"):
        table.add_column(column, justify="right")
    good = True
    for ranks in map(int, options.ranks.split(",")):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            size_bytes = int(options.gib * 2**30)
            rows = run(measure, ranks, folder, size_bytes, options.repeats, record=False, timeout_s=300)[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        mb = {key: statistics.median(row[key] for row in rows) / 1e6 for key in rows[0]}
        save, load = mb["save"] / mb["dd_write"], mb["load"] / mb["dd_read"]
        good = good and min(save, load) >= AIM
        cells = [mb["save"], mb["dd_write"], save, mb["load"], mb["verify only"], mb["dd_read"], load]
        table.add_row(str(ranks), *(f"{cell:.2f}" if cell < 20 else f"{cell:.0f}" for cell in cells))
    Console().print(table)
    print(f"The aim is a ratio of at least {AIM}: {'reached' if good else 'missed'}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
