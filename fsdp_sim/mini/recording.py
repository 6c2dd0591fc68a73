"""What a training tells the timeline, in the words that `observer` (of the mini) and the siblings share.

- **collectives**: their end is known to whoever waits for them, see `PendingCollective`.
- **compute segments**: the mini has no kernels of its own, it sees only its hooks. Compute is the time between the end
  of one hook and the begin of the next. A unit without units inside is one segment, ``FWD layers.0``. A unit with
  units inside computes before the first and after the last of them: ``embed`` and ``head``, which backward passes in
  the other order. What happens between two inner units (the loop over the layers) is hook overhead, not recorded.
- **memory**: an alloc or a free is written when it happens on the CPU.
- **steps**: the phase, step and micro-batch are kept by hooks, without a line in the training script. A step ends with
  the first forward after an optimizer step, so several optimizers make one step and ``zero_grad`` belongs to it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.timeline import RECORDER, Lane, Memory, Op, Phase, dtype_name


class PendingCollective:
    """A collective that was issued and must be waited for before its output is read.

    Attributes:
        seq: of its event in the timeline, -1 when nothing is recorded.
    """

    def __init__(self, op: Op, unit: str, buffer: torch.Tensor, group: ProcessGroup, waits_on: int) -> None:
        self._work: Work | None = None
        self._unit = unit
        self._over = False
        self._end_s: float | None = None
        about = {"bytes": buffer.nbytes, "group_size": group.size(), "dtype": dtype_name(buffer.dtype)}
        self.seq = RECORDER.begin(op, unit, waits_on=(waits_on,), **about)

    def issue(self, collective: Callable[..., Work | None], *args: Any, **kwargs: Any) -> PendingCollective:
        """Call what issues it."""
        with RECORDER.label(self._unit, self.seq):
            self._work = work = collective(*args, **kwargs)
        if work is not None and self.seq >= 0 and not hasattr(work, "end_s"):  # a Work of fsdp_sim.ranks knows its end
            with suppress(RuntimeError):  # gloo's reduce-scatter has no future: its end is when `wait` returned
                work.get_future().add_done_callback(self._note_end)
        return self

    def _note_end(self, _: Any) -> None:
        self._end_s = time.monotonic()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait for the end of the collective, and write it into the timeline."""
        if self._over:
            return
        if self._work is not None:
            self._work.wait()
        if self.seq >= 0:
            end_s = getattr(self._work, "end_s", None) or self._end_s
            RECORDER.end(self.seq, start_s=getattr(self._work, "start_s", None), end_s=end_s)
        self._over = True


class ComputeSegments:
    """The compute between hooks: every hook closes what runs when it is entered and opens what follows when it ends."""

    def __init__(self) -> None:
        self._open = -1  # seq of the running segment
        self._idle_since_s: float | None = None  # a unit has ended and nobody knows yet whether it was the last one

    def open(self, op: Op, name: str, waits_on: int) -> None:
        """At the end of a hook before a unit's compute."""
        self._open = RECORDER.begin(op, name, waits_on=(waits_on,))

    def close(self) -> None:
        """At the begin of a hook before a unit's compute: whatever was running ends here."""
        RECORDER.end(self._open)
        self._open, self._idle_since_s = -1, None

    def close_unit(self, op: Op, name: str, waits_on: int) -> None:
        """At the begin of a hook after a unit's compute: its last segment ends, which may follow its inner units."""
        if self._open < 0 and self._idle_since_s is not None and RECORDER.on:
            since = self._idle_since_s
            self._open = RECORDER.begin(op, name, waits_on=(waits_on,), issue_s=since, start_s=since)
        self.close()

    def unit_done(self) -> None:
        """At the end of a hook after a unit's compute."""
        self._idle_since_s = time.monotonic() if RECORDER.on else None


# Memory


def allocated(category: Memory, unit: str, n_bytes: int, lane: Lane) -> None:
    if RECORDER.on:
        RECORDER.memory(Op.ALLOC, category, unit, n_bytes, lane)


def freed(category: Memory, unit: str, n_bytes: int, lane: Lane) -> None:
    if RECORDER.on:
        RECORDER.memory(Op.FREE, category, unit, n_bytes, lane)


def allocated_storage(category: Memory, unit: str, tensor: torch.Tensor, lane: Lane) -> None:
    """Record an alloc now, and the free when the tensor's storage dies, whoever holds it until then."""
    if RECORDER.on:
        allocated(category, unit, tensor.nbytes, lane)
        freed_with(tensor.untyped_storage(), category, unit, tensor.nbytes, lane)


def freed_with(holder: object, category: Memory, unit: str, n_bytes: int, lane: Lane) -> None:
    """Record the free when ``holder`` dies."""
    finalizer = weakref.finalize(holder, _freed_if_same_recording, RECORDER.session, category, unit, n_bytes, lane)
    finalizer.atexit = False


def _freed_if_same_recording(recording_id: int, *freed_args: Any) -> None:
    if RECORDER.session == recording_id:
        freed(*freed_args)


# Steps and phases


class _Progress:
    """Where this process is in its training loop."""

    installed = False
    micro_batch_is_over = False  # a backward has ended since the last forward
    step_is_over = False  # an optimizer has run since the last forward
    recording_with_shards = 0  # the recording into which the sharded parameters were written
    reduced: tuple[int, ...] = ()  # seq of the last reduce-scatter, which the next optimizer step waits for
    open_optimizer_steps: ClassVar[list[int]] = []
    optimizers_with_state: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()


def install() -> list[Any]:
    """Watch every optimizer of this process.

    Returns:
        the handles of the hooks; none if they are there already.
    """
    if _Progress.installed:
        return []
    _Progress.installed = True
    return [register_optimizer_step_pre_hook(_before_optimizer), register_optimizer_step_post_hook(_after_optimizer)]


def uninstall(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
        _Progress.installed = False


def forward_begins(groups: Iterable[FSDPParamGroup]) -> None:
    """The root's pre-forward."""
    if not RECORDER.on:
        return
    if _Progress.recording_with_shards != RECORDER.session:  # the first forward of this recording
        _Progress.recording_with_shards = RECORDER.session
        _Progress.micro_batch_is_over = _Progress.step_is_over = False
        for group in groups:
            shards = sum(p.local_data.nbytes for p in group.fsdp_params)
            allocated(Memory.SHARDED, group.unit, shards, Lane.COMPUTE)
    if _Progress.step_is_over:
        RECORDER.step += 1
        RECORDER.micro_batch = 0
    elif _Progress.micro_batch_is_over:
        RECORDER.micro_batch += 1
    _Progress.micro_batch_is_over = _Progress.step_is_over = False
    RECORDER.phase = Phase.FORWARD


def backward_begins() -> None:
    """The first pre-backward hook of a backward, the root's if its outputs are used."""
    RECORDER.phase = Phase.BACKWARD


def backward_ended(last_reduce_scatter: int) -> None:
    """The end of the final callback."""
    _Progress.reduced = (last_reduce_scatter,)
    _Progress.micro_batch_is_over = True


def _before_optimizer(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if RECORDER.on:
        RECORDER.phase = Phase.OPTIMIZER
        _Progress.open_optimizer_steps.append(RECORDER.begin(Op.OPTIM, "", waits_on=_Progress.reduced))
        _Progress.reduced = ()


def _after_optimizer(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if RECORDER.on and _Progress.open_optimizer_steps:
        RECORDER.end(_Progress.open_optimizer_steps.pop())
        _Progress.step_is_over = True
        if optimizer not in _Progress.optimizers_with_state:  # its first step made its state
            _Progress.optimizers_with_state.add(optimizer)
            allocated(Memory.OPTIMIZER, "", _state_bytes(optimizer), Lane.COMPUTE)


def _state_bytes(optimizer: Optimizer) -> int:
    """Bytes of optimizer state on this rank."""
    tensors = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    return sum((t._local_tensor if isinstance(t, DTensor) else t).nbytes for t in tensors)
