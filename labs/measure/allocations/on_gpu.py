"""The memory of a step on a GPU: what torch's caching allocator recorded, with what it is for.

    with recorded(wrapped.model, optimizer, api="fsdp2") as memory:
        train_step(...)
    memory.timeline          # the bytes alive by category, as the simulator predicts them

The allocator notes every alloc and free with the calls that led to it (``torch.cuda.memory._record_memory_history``);
``torch.cuda.memory._snapshot()`` gives the notes as a dictionary. It never becomes a file, and no pickle is read.

Recorded are Python's calls alone: those of C++ would have to be looked up in the symbols of all of torch. Autograd
works for a GPU in a thread that has none, but in FSDP's hooks; so what has no calls is backward's, and the gradient of
the logits is one temporary of many.

Not run on a GPU: the reader is tested on dictionaries of the structure that torch 2.13 documents, with the calls of
real CPU ranks; `recorded` itself has a test that waits for a GPU.

Sources, torch 2.13: ``torch/cuda/memory.py`` (_record_memory_history, and _snapshot for the structure),
``torch/cuda/_memory_viz.py`` (trace, _block_extra: how torch reads it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.timeline import Header, Memory
from fsdp_sim.timeline.snapshot import Block, Snapshot
from labs.measure.allocations.blocks import states_of
from labs.measure.allocations.series import StepMemory, timeline_of
from labs.measure.simulated import WHOLE_MODEL

Raw = Mapping[str, Any]


@contextmanager
def recorded(model: nn.Module, optimizer: torch.optim.Optimizer, *, api: str = "fsdp2") -> Iterator[StepMemory]:
    """Record the memory of the training step in the block, the second one or a later: the first makes optimizer state.

    Args:
        model, optimizer: as `labs.loop.step.train_step` has them, on this process's GPU.
        api: of `labs.config.TrainConfig`.
    """
    found = StepMemory()
    states = states_of(model, optimizer, sharded=api not in WHOLE_MODEL)
    known = {storage.data_ptr(): category for storage, category in states if storage.device.type == "cuda"}
    del states  # holds gradients of the step before
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", clear_history=True)
    try:
        yield found
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.cuda.current_device()
    header = Header(
        producer="torch.cuda.memory", clock="measured", world_size=ranks, title=f"{api}, recorded",
        hardware=f"{ranks} x {torch.cuda.get_device_name(device)}", device="gpu",
    )  # fmt: skip
    found.blocks = read_snapshot(snapshot, device=device, known=known)
    found.timeline = timeline_of(found.blocks, header, rank)


def read_snapshot(snapshot: Raw, *, device: int = 0, known: Mapping[int, Memory] | None = None) -> list[Block]:
    """The blocks of one device's snapshot, as `labs.measure.allocations.series.timeline_of` takes them.

    Args:
        snapshot: what ``torch.cuda.memory._snapshot()`` returned, recorded with ``context="all"``: what a block is for
            follows from where it was freed, too.
        device: the number of the GPU.
        known: by address, what is known of blocks from before the recording. Others have no category.

    Raises:
        ValueError: nothing was recorded on this device, or the allocs and frees of the recording came without calls.
    """
    taken = Snapshot.of(snapshot, device)
    if not any(one.action in ("alloc", "free_requested") for one in taken.actions):
        raise ValueError(
            f"the snapshot has no allocs of device {device}; call "
            'torch.cuda.memory._record_memory_history("all", context="all") before the step'
        )
    for action in ("alloc", "free_requested"):
        if not any(one.frames for one in taken.actions if one.action == action):
            raise ValueError(f'no {action!r} of the snapshot has calls; record it with context="all"')
    return taken.blocks(known)
