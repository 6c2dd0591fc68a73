"""How many bytes of tensors this rank holds, at every moment: one exact, repeatable meter for the mini and for torch.

[Note: storages]  A tensor is a view; the memory is in its storage, which several tensors share and which can grow or
shrink while the tensors stay (``resize_``: how FSDP frees an unsharded parameter). So storages are counted, each as
one interval from its allocation to its release, or two if it was resized in between. Everything this meter answers is
computed from that list of intervals.

An allocation or a resize is seen by `storages.watching`. A release is seen by a `weakref.finalize` on the storage,
which fires when the last tensor on it goes, whoever held it: a variable, autograd's graph, an optimizer.

[Note: the same number every time]  The order of allocations and releases, which alone decides the figures, is the
program's own, but for two things. Reference cycles are freed when Python's garbage collector happens to run: here it
runs once before the start and not again until the end. What only the collector could free is alive all the time, and
`CPUMeter.cycle_bytes` says how much that was. The other is in `storages`, [Note: gloo lets go].

Not counted: what gloo and kernels allocate for themselves without a tensor, sparse tensors, code made by torch.compile,
other threads and processes.

Source: the idea is that of `torch.distributed._tools.mem_tracker.MemTracker`, which sorts bytes by what they are for,
but sees neither temporaries inside operators, nor storages it was not told of, nor to the end of gloo's work.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdp_sim.measure.storages import source, storages, watching


@dataclasses.dataclass(slots=True)
class Allocation:
    """Bytes that one storage held from one moment to another. Moments count allocations and releases.

    Attributes:
        bytes: as allocated.
        op: the operator that allocated them, ``resize_``, or what they were before the meter started.
        source: ``file:line`` of the Python line that caused it, see `storages.source`. For what was there before: its
            name, if the meter was told, or the line that first used it.
        born, died: alive at the moments ``born <= moment < died``; ``died`` is None while alive.
    """

    bytes: int
    op: str
    source: str
    born: int
    died: int | None = None


@dataclasses.dataclass(frozen=True)
class MeterMark:
    """What a meter found at a `CPUMeter.mark`.

    Attributes:
        live_bytes: alive at the mark.
        peak_bytes: the most that was alive at once since the mark before it.
    """

    name: str
    live_bytes: int
    peak_bytes: int


def live_bytes(*held: nn.Module | torch.optim.Optimizer | torch.Tensor, device: str = "cpu") -> CPUMeter | CUDAMeter:
    """A meter of the bytes this rank holds, to be used as a context manager.

    Args:
        held: models, optimizers and tensors that exist already. Their parameters, buffers, gradients and states count
            from the start under their names, also those that the program never touches.
        device: ``"cpu"``; or ``"cuda"``, where torch's allocator keeps the count (untested without a GPU).

    Raises:
        ValueError: another device.
        TypeError: ``held`` has something else in it.

    Example:
        >>> x = torch.ones(1000)  # 4,000 bytes
        >>> with live_bytes(x) as meter:
        ...     y = (2 * x + 1).sum()  # 2 * x, then the sum of it and 1: three of 4,000 bytes at once
        >>> meter.peak_bytes, meter.live_bytes
        (12000, 4004)
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"live_bytes(device={device!r}): must be 'cpu' or 'cuda'")
    for thing in held:
        if not isinstance(thing, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
            raise TypeError(f"live_bytes() takes models, optimizers and tensors, not a {type(thing).__name__}")
    return CPUMeter(held) if device == "cpu" else CUDAMeter()


class CPUMeter:
    """Counts CPU storages; made by `live_bytes`.

    Attributes:
        allocations: every one seen, in the order in which they were seen.
        cycle_bytes: bytes that were alive at the end only because of reference cycles. Known after the block.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        self.allocations: list[Allocation] = []
        self.cycle_bytes = 0
        self._held = tuple(held)
        self._marks: list[tuple[str, int]] = []
        self._now = 0
        self._ended: int | None = None  # the moment at which the block ended
        self._alive: dict[int, Allocation] = {}  # by the address of the storage
        self._unused: set[int] = set()  # addresses of storages that existed at the start and that nobody has used yet
        self._finalizers: dict[int, weakref.finalize] = {}  # of both
        self._watching = ExitStack()

    # What it answers

    @property
    def live_bytes(self) -> int:
        """Alive now, or when the block ended."""
        return int(self.history()[-1])

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once."""
        return int(self.history().max())

    def history(self) -> np.ndarray:
        """Bytes alive at each moment, the start included; int64 of shape (moments + 1,)."""
        change = np.zeros(self._now + 1, dtype=np.int64)
        for a in self.allocations:
            change[a.born] += a.bytes
            if a.died is not None:
                change[a.died] -= a.bytes
        return change.cumsum()[: None if self._ended is None else self._ended + 1]

    def mark(self, name: str) -> MeterMark:
        """Note this moment; `marks` has them all."""
        self._marks.append((name, self._now))
        return self.marks[-1]

    @property
    def marks(self) -> list[MeterMark]:
        """The marks so far, in order."""
        history, since, found = self.history(), 0, []
        for name, moment in self._marks:
            found.append(MeterMark(name, int(history[moment]), int(history[since : moment + 1].max())))
            since = moment
        return found

    def at_peak(self) -> list[Allocation]:
        """What was alive when the most was (the first such moment), largest first."""
        peak = int(self.history().argmax())
        alive = (a for a in self.allocations if a.born <= peak and (a.died is None or a.died > peak) and a.bytes)
        return sorted(alive, key=lambda a: -a.bytes)

    def by_size(self, n: int = 10) -> str:
        """What was alive at the peak, as ``n`` lines of text: bytes, how many, operator, where; largest first."""
        sums: dict[tuple[str, str], list[int]] = {}
        for a in self.at_peak():
            row = sums.setdefault((a.op, a.source), [0, 0])
            row[0], row[1] = row[0] + a.bytes, row[1] + 1
        rows = sorted(sums.items(), key=lambda item: -item[1][0])
        lines = [f"{total:>14,} B {count:>5} x  {op}  {_short(where)}" for (op, where), (total, count) in rows[:n]]
        if rest := sum(total for _, (total, _) in rows[n:]):
            lines.append(f"{rest:>14,} B in {len(rows) - n} more places")
        return "\n".join([f"{self.peak_bytes:>14,} B at the peak", *lines])

    # Start and end

    def __enter__(self) -> CPUMeter:
        """Find what exists, and start to watch.

        Raises:
            RuntimeError: this meter was used before.
        """
        if self._finalizers:
            raise RuntimeError("a meter measures one block; call live_bytes() again for another")
        gc.collect()
        if gc.isenabled():
            self._watching.callback(gc.enable)
            gc.disable()
        for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
            for storage in storages(tensor):
                self._unused.add(storage._cdata)
                self._watch_release(storage)
        for name, tensor in _named(self._held):
            for storage in storages(tensor):
                self._see(storage, "", name)
        self._watching.enter_context(watching(self._see))
        return self

    def __exit__(self, *error: Any) -> None:
        alive, self._ended = list(self._alive.values()), self._now
        gc.collect()
        self.cycle_bytes = sum(a.bytes for a in alive if a.died is not None)
        for finalizer in list(self._finalizers.values()):
            finalizer.detach()
        self._watching.close()

    # What it is told

    def _see(self, storage: torch.UntypedStorage, op: str, name: str = "") -> None:
        """Note that a storage is there, and how large. ``op`` is what made it so, if that is news."""
        address, n_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(address)
        if known is not None and known.bytes == n_bytes:
            return
        if known is None and address in self._unused:
            self._unused.remove(address)
            self._alive[address] = Allocation(n_bytes, "before the meter started", name or source(), born=0)
        else:
            self._now += 1
            self._alive[address] = Allocation(n_bytes, op if known is None else "resize_", source(), born=self._now)
        self.allocations.append(self._alive[address])
        if known is not None:  # a storage that is resized holds both until the old content has been copied
            self._now += 1
            known.died = self._now
        self._watch_release(storage)

    def _watch_release(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._finalizers:
            finalizer = weakref.finalize(storage, self._released, storage._cdata)
            finalizer.atexit = False
            self._finalizers[storage._cdata] = finalizer

    def _released(self, address: int) -> None:
        del self._finalizers[address]
        self._unused.discard(address)
        if (known := self._alive.pop(address, None)) is not None:
            self._now += 1
            known.died = self._now


class CUDAMeter:
    """The same questions to torch's CUDA allocator, which counts this process's tensors.

    cuBLAS's workspaces lie in the same allocator, 8 MiB and more for each thread that multiplies matrices. They are no
    tensors of the program, and are left out; they are taken to be there at the peak.
    """

    def __init__(self) -> None:
        self.marks: list[MeterMark] = []
        self.cycle_bytes = 0
        self._ended: tuple[int, int] | None = None  # live and peak since the last mark, when the block ended
        self._workspace_bytes = 0  # the most that were found since the last mark: looking gives them back

    def _look(self) -> tuple[int, int]:
        """Bytes alive now, and the most since the last mark."""
        peak_bytes = torch.cuda.max_memory_allocated()
        self._workspace_bytes = max(self._workspace_bytes, workspace_bytes())
        return torch.cuda.memory_allocated(), peak_bytes - self._workspace_bytes

    def _begin(self) -> None:
        """The peak, from now on."""
        self._workspace_bytes = 0
        torch.cuda.reset_peak_memory_stats()

    def __enter__(self) -> CUDAMeter:
        gc.collect()
        workspace_bytes()  # of what ran before
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended = self._look()
        gc.collect()
        self.cycle_bytes = self._ended[0] - torch.cuda.memory_allocated()

    @property
    def live_bytes(self) -> int:
        """Alive now, or when the block ended."""
        return (self._ended or self._look())[0]

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once."""
        last = (self._ended or self._look())[1]
        return max(last, *(mark.peak_bytes for mark in self.marks), 0)

    def mark(self, name: str) -> MeterMark:
        """Note this moment; ``marks`` has them all."""
        self.marks.append(MeterMark(name, *self._look()))
        self._begin()
        return self.marks[-1]

    def by_size(self, n: int = 10) -> str:
        """The allocator does not keep this.

        Raises:
            NotImplementedError: always; the message names what does.
        """
        raise NotImplementedError(
            "the CUDA allocator keeps sums only; for what was alive call torch.cuda.memory._record_memory_history() "
            "before, torch.cuda.memory._dump_snapshot(file) after, and open the file at https://pytorch.org/memory_viz"
        )


def workspace_bytes() -> int:
    """What cuBLAS kept of torch's CUDA allocator for its workspaces, one for each thread and stream; gives it back.

    Its size depends on GPU, torch and CUBLAS_WORKSPACE_CONFIG (torch 2.13: ``CUDABlas.cpp``, 8,320 KiB, on Hopper 32
    MiB), so it is measured: freed, it is missing. The next matmul takes it again.
    """
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def _named(held: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of models and optimizers, with names."""
    held = list(held)
    optimizers = [thing for thing in held if isinstance(thing, torch.optim.Optimizer)]
    names = {p: "a parameter" for o in optimizers for group in o.param_groups for p in group["params"]}
    for thing in held:
        if isinstance(thing, torch.Tensor):
            yield "given to live_bytes", thing
        elif isinstance(thing, nn.Module):
            names |= {param: name for name, param in thing.named_parameters()}
            yield from thing.named_buffers()
    for param, name in names.items():
        yield name, param
        if param.grad is not None:
            yield f"gradient of {name}", param.grad
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {names[param]}", value


def _short(where: str) -> str:
    """A path without the folder from which Python imports it."""
    return min((where.removeprefix(f"{folder}/") for folder in sys.path if folder), key=len, default=where)
