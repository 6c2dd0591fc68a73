"""Where a plain module computes, for the timeline. Nothing here moves data: without it the siblings train the same.

The mini records compute between its own hooks. Its siblings have fewer hooks or none, so `watch` puts some on any
module: around the whole (``root``) and around each of its blocks (what its `nn.ModuleList`s hold). Compute is cut into
segments, one at a time: a block, or what the root does before the first and after the last of its blocks. What happens
between two blocks is a loop, and not recorded. Communication inside a segment interrupts it, see `pause`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from fsdp_sim.mini import recording
from fsdp_sim.mini.autograd import grad_tensors, in_backward
from fsdp_sim.timeline import RECORDER, Lane, Memory, Op, Phase


class BlockSegments:
    """The segment of compute that runs now. A rank computes on one thread, so there is one of these per process."""

    def __init__(self) -> None:
        self._running: tuple[int, Op, str] | None = None  # seq, op, unit
        self._idle_since_s: float | None = None  # a block has ended, and nobody knows yet whether another follows

    def begin(self, op: Op, unit: str) -> None:
        self.end()
        self._idle_since_s = None
        if RECORDER.on:
            self._running = (RECORDER.begin(op, unit), op, unit)

    def begin_unless(self, op: Op, unit: str) -> None:
        """Begin a segment unless one of the same kind runs: the last block's output may be the root's."""
        if self._running is None or self._running[1] is not op:
            self.begin(op, unit)

    def end(self) -> int:
        """End the running segment; returns its ``seq`` in the timeline, -1 if none was running."""
        running, self._running = self._running, None
        if running is None:
            return -1
        RECORDER.end(running[0])
        return running[0]

    def end_block(self, unit: str) -> None:
        if self._running is not None and self._running[2] == unit:
            self.end()
            self._idle_since_s = time.monotonic()

    def end_root(self, op: Op) -> None:
        """End the root's last segment."""
        self._resume_root(op)
        self.end()
        self._idle_since_s = None

    def _resume_root(self, op: Op) -> None:
        """No block followed the last one, so the root has computed since that ended."""
        if self._running is None and self._idle_since_s is not None and RECORDER.on:
            since_s, self._idle_since_s = self._idle_since_s, None
            self._running = (RECORDER.begin(op, ROOT, issue_s=since_s, start_s=since_s), op, ROOT)

    @contextmanager
    def pause(self) -> Iterator[int]:
        """Interrupt the running segment for what is done inside the block; yields the ``seq`` of its first part."""
        self._resume_root(Op.BWD if RECORDER.phase is Phase.BACKWARD else Op.FWD)
        running = self._running
        yield self.end()
        if running is not None:
            self.begin(*running[1:])


ROOT = "root"
SEGMENTS = BlockSegments()


def watch(module: nn.Module) -> nn.Module:
    """Record forward, backward and parameters of a module that `fully_shard` was not applied to, and count its steps.

    Args:
        module: the one whose forward is called in the training loop; hooked in place, once.

    Returns:
        the module.
    """
    if getattr(module, "_is_watched", False):
        return module
    module._is_watched = True  # type: ignore[assignment]
    recordings: set[int] = set()  # into which the parameters were written

    def forward_begins(*_: Any) -> None:
        recording.install()
        recording.forward_begins(())
        if RECORDER.on and RECORDER.session not in recordings:
            recordings.add(RECORDER.session)
            n_bytes = sum(p.nbytes for p in module.parameters())
            category = getattr(module, "parameters_are", Memory.UNSHARDED)
            recording.allocated(category, ROOT, n_bytes, Lane.COMPUTE)
        SEGMENTS.begin(Op.FWD, ROOT)

    def forward_ended(_: nn.Module, args: Any, output: Any) -> None:
        SEGMENTS.end_root(Op.FWD)
        begun: list[bool] = []  # one backward begins at the first output that has a gradient

        def backward_begins(_: torch.Tensor) -> None:
            if not begun:
                begun.append(True)
                recording.backward_begins()
                SEGMENTS.begin_unless(Op.BWD, ROOT)
                Variable._execution_engine.queue_callback(backward_ended)

        for tensor in grad_tensors(output):
            tensor.register_hook(backward_begins)

    def backward_ended() -> None:
        SEGMENTS.end_root(Op.BWD)
        recording.backward_ended(-1)

    module.register_forward_pre_hook(forward_begins)
    for name, block in _blocks(module).items():
        _watch_block(block, name)
    module.register_forward_hook(forward_ended)
    return module


def _watch_block(block: nn.Module, name: str) -> None:
    def forward_begins(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward():  # else activation checkpointing recomputes: part of the backward
            for tensor in grad_tensors((args, kwargs)):
                tensor.register_hook(lambda _: SEGMENTS.end_block(name))
            SEGMENTS.begin(Op.FWD, name)

    def forward_ended(_: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            SEGMENTS.end_block(name)
            for tensor in grad_tensors(output):
                tensor.register_hook(lambda _: SEGMENTS.begin(Op.BWD, name))

    block.register_forward_pre_hook(forward_begins, with_kwargs=True)
    block.register_forward_hook(forward_ended)


def _blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that stand in a list, by name; of blocks inside blocks the outermost."""
    found: dict[str, nn.Module] = {}
    for name, inner in module.named_modules():
        if isinstance(inner, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            found |= {f"{name.removeprefix('module.')}.{i}": block for i, block in enumerate(inner)}
    return found
