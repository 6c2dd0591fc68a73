"""The memory of a step on a CPU rank: every storage, counted, with what it is for.

    with counted(wrapped.model, optimizer, api="fsdp2") as memory:
        train_step(...)
    memory.timeline          # the bytes alive by category, as the simulator predicts them

Every storage is counted (`fsdp_sim.measure.live_bytes`), those from before the step too: torch.profiler's
``profile_memory`` does not know what was alive before it started.

To count slows a step down many times, and completes each collective where it is issued. The order of allocations, and
with it every number of bytes, is the program's own; the seconds say no more than what came before what.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.measure import storages
from fsdp_sim.measure.live_bytes import CPUMeter
from fsdp_sim.timeline import Header, Memory
from fsdp_sim.timeline.snapshot import AllocationMoment, Block, Frame
from labs.measure.allocations.blocks import states_of
from labs.measure.allocations.series import StepMemory, timeline_of
from labs.measure.simulated import WHOLE_MODEL

WATCHING = {
    __file__, inspect.getfile(CPUMeter), storages.__file__, weakref.__file__,
    *(f"{torch.__path__[0]}/{file}" for file in ("_ops.py", "_compile.py", "_dynamo/eval_frame.py")),
}  # fmt: skip
"""Files of calls that are there because somebody watches: the meter's, and torch's on the way to it."""


@contextmanager
def counted(model: nn.Module, optimizer: torch.optim.Optimizer, *, api: str = "fsdp2") -> Iterator[StepMemory]:
    """Count the memory of the training step in the block, the second one or a later: the first makes optimizer state.

    Args:
        model, optimizer: as `labs.loop.step.train_step` has them.
        api: of `labs.config.TrainConfig`.
    """
    found = StepMemory()
    meter = _Meter(model, optimizer, sharded=api not in WHOLE_MODEL)
    with meter:
        yield found
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    title = f"{api}, counted"
    header = Header(producer="live_bytes", clock="measured", world_size=ranks, title=title, device="cpu")
    found.blocks = meter.blocks()
    found.timeline = timeline_of(found.blocks, header, rank)


class _Meter(CPUMeter):
    """A `CPUMeter` that also notes when and from where each moment came, and what it knew from the start."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
        super().__init__((model, optimizer))
        self._states = {storage._cdata: category for storage, category in states_of(model, optimizer, sharded=sharded)}
        self._known: list[Memory | None] = []  # of each allocation
        self._moments = [AllocationMoment(0, time.perf_counter())]

    def blocks(self) -> list[Block]:
        """What was alive in the block of the meter."""
        last = len(self.history()) - 1  # what the garbage collector frees afterwards was alive all the time
        return [
            Block(a.bytes, self._moments[a.born], None if a.died is None or a.died > last else self._moments[a.died], k)
            for a, k in zip(self.allocations, self._known, strict=True)
        ]

    def _see(self, storage: torch.UntypedStorage, op: str, name: str = "") -> None:
        super()._see(storage, op, name)
        if len(self.allocations) > len(self._known):
            before = self.allocations[-1].born == 0
            self._known.append(self._states.get(storage._cdata, Memory.NONE) if before else None)
        self._note(op)

    def _released(self, address: int) -> None:
        super()._released(address)
        self._note("")

    def _note(self, op: str) -> None:
        """The moments that have come since the last note."""
        if len(self._moments) <= self._now:
            now_s, frames = time.perf_counter(), (Frame("", 0, f"op::{op}"), *_frames())
            for number in range(len(self._moments), self._now + 1):
                self._moments.append(AllocationMoment(number, now_s, frames))


def _frames() -> Iterator[Frame]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in WATCHING:
            yield Frame(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
