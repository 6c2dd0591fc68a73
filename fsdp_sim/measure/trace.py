"""One step of a module under fake tensors, cut into segments: kernels, and bytes alive at every moment.

Forward, hooks on the modules say which unit runs. Backward, the autograd engine does not say, but every node knows
when its forward ran (its sequence number): the kernels of a node belong to the segment that made it. Bytes alive are
counted by storage, from the operator that made it to the moment its last reference goes, as an allocator does.
"""

from __future__ import annotations

import bisect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.cost import Kernel, Output
from fsdp_sim.measure.trace_kernels import NotPricedError, kernels_of, only_views, tensors_in
from fsdp_sim.measure.trace_segment import Segment, ends, managed, merge, tensors_anywhere
from fsdp_sim.schedule import Unit
from fsdp_sim.spec import OPERATORS, aten_names
from fsdp_sim.timeline import Phase

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_ACCUMULATE_GRAD_NR = 2**64 - 1
OPERATOR_OF = {name: operator for operator in OPERATORS for name in aten_names(operator)}


class Trace(TorchDispatchMode):
    """Watches a model while it runs.

    Args:
        model: with fake parameters.
        units: the root and the units inside it.
        progress: called when a unit has run, forward and backward.

    Attributes:
        segments: by name, in the order in which they first ran.
        order: names of the units in the order in which they first ran, the root first.
        recomputed_flops: of forwards that ran again in backward, because the model checkpoints itself.
        not_priced: operators whose work is not known, with the remedy, and the segment that ran each first.
        used_by: of each parameter, by the name of its unit and its own, the segments whose forward reads it.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], progress: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.model, self.units, self.progress = model, {u.name: u for u in units}, progress
        self.segments: dict[str, Segment] = {}
        self.order: list[str] = []
        self.used_by: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.recomputed_flops = 0.0
        self.not_priced: dict[str, str] = {}
        self._stack: list[list[Any]] = []  # units that run: name, and whether a unit inside has run
        self._phase = Phase.FORWARD
        self._now = ""
        self._clock = 0
        self._end_of_forward = 0
        self._starts: list[int] = []  # sequence numbers at which the segment changes
        self._names: list[str] = []
        self._alive = 0
        self._owner: dict[int, tuple[str, int, bool]] = {}  # by storage: segment, bytes, whether the loss made it
        self._references: dict[int, weakref.ref[Any]] = {}
        self._entered: set[int] = set()  # storages that entered a unit
        self._params: dict[int, tuple[str, str]] = {}  # by storage: names of the unit and of the parameter
        self._gradients: list[int] = []  # storages of whole gradients that the current segment made
        self._graded: set[int] = set()  # parameters that have one
        self._ready: list[nn.Parameter] = []  # parameters whose gradient is complete
        self._pending = ""  # the segment of an addition whose inputs may be about to go

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Forward and backward are run inside."""
        hooks: list[Any] = []
        for name in self.units:
            if name != "root":
                module = self.model.get_submodule(name)
                hooks.append(
                    module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True)
                )
                hooks.append(module.register_forward_hook(partial(self._leave, name)))
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._outside(tensor)
        for key, param in managed(self.model, self.units.values()):
            self._params[param.untyped_storage()._cdata] = key
            if param.requires_grad:
                hooks.append(param.register_post_accumulate_grad_hook(self._ready.append))
        self._run("root")
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for param in self.model.parameters():
                param.grad = None

    def inputs(self, values: Any) -> None:
        """Tensors that come from outside are not counted."""
        for tensor in tensors_anywhere(values):
            self._outside(tensor)

    def start_backward(self, loss: torch.Tensor) -> None:
        """Between forward and backward, when nothing but the loss is held: what is alive now is what is saved."""
        self._phase = Phase.BACKWARD
        self._end_of_forward = _sequence_nr()
        for name, size, of_loss in self._owner.values():
            self.segments[name].saved_bytes += size
            self.segments[name].loss_bytes += size if of_loss else 0
        for segment in self.segments.values():
            segment.outputs = [
                output._replace(saved_bytes=sum(s.nbytes() for ref in refs if (s := ref()) is not None))
                for output, refs in zip(segment.outputs, segment.made_by, strict=True)
            ]
        self.segments[self._now].output_bytes = loss.nbytes
        for node, i, accumulate in ends(loss.grad_fn):
            node.register_hook(partial(self._made_gradient, i, id(accumulate)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pending:
            self._sample(self._pending)
        out = func(*args, **(kwargs or {}))
        if only_views(func):
            return out
        if self._phase is Phase.BACKWARD:
            self._follow_backward()
        segment = self.segments[self._now]
        try:
            kernels = kernels_of(func, args, kwargs or {}, out)
        except NotPricedError as error:
            self.not_priced.setdefault(str(error), self._now)
            kernels = []
        of_loss = bool(kernels) and kernels[0].kind == "cross_entropy"
        made = [tensor for tensor in tensors_in(out) if self._own(tensor, loss=of_loss)]
        if self._phase is Phase.FORWARD:
            self._clock += 1
            segment.last = self._clock
            self._note_uses(args)
            kernels = _named(segment, func, kernels, made)
        elif torch.is_grad_enabled():  # in backward only a forward that runs again is differentiated
            self.recomputed_flops += sum(kernel.flops for kernel in kernels)
        # Autograd adds a second gradient to the first in place where nothing else holds it. With fake tensors it makes
        # a new one instead; what is alive is then looked at when the first is gone.
        self._pending = self._now
        if self._phase is Phase.FORWARD or func is not torch.ops.aten.add.Tensor:
            self._sample(self._now)
        merge(segment.forward if self._phase is Phase.FORWARD else segment.backward, kernels)
        return out

    def _sample(self, name: str) -> None:
        segment = self.segments[name]
        if self._phase is Phase.FORWARD:
            segment.forward_peak_bytes = max(segment.forward_peak_bytes, self._alive)
        else:
            segment.backward_peak_bytes = max(segment.backward_peak_bytes, self._alive)
        self._pending = ""

    # -- which segment

    def _enter(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._phase is Phase.FORWARD:  # in backward a checkpointed module runs again
            self._stack[-1][1] = True
            self._run(unit).input_bytes += self._bytes_of((args, kwargs), self._entered)

    def _leave(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._phase is Phase.FORWARD:
            self.segments[self._now].output_bytes += self._bytes_of(output)
            self._stack.pop()
            self._switch()
            self.progress()

    def _run(self, unit: str) -> Segment:
        self._stack.append([unit, False])
        if unit not in self.order:
            self.order.append(unit)
        return self._switch()

    def _switch(self) -> Segment:
        """The segment of the innermost unit that runs."""
        name, passed_inner = self._stack[-1]
        segments = self.units[name].names_of_segments
        now = segments[-1 if passed_inner else 0]
        if now != self._now:
            self._now = now
            self._starts.append(_sequence_nr())
            self._names.append(now)
        return self.segments.setdefault(now, Segment())

    def _follow_backward(self) -> None:
        node = torch._C._current_autograd_node()
        number = _ACCUMULATE_GRAD_NR if node is None else node._sequence_nr()
        if number >= self._end_of_forward:  # of a gradient's accumulation, or of a recomputed forward
            return
        name = self._names[bisect.bisect_right(self._starts, number) - 1]
        if name != self._now:
            self._release_grads()
            self._now = name

    # -- what is alive

    def _outside(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._references.setdefault(storage._cdata, weakref.ref(storage, partial(self._forget, storage._cdata)))

    def _own(self, tensor: torch.Tensor, loss: bool) -> int:
        """Count a storage that is new; returns its bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return 0
        size = storage.nbytes()
        self._references[key] = weakref.ref(storage, partial(self._forget, key))
        self._owner[key] = (self._now, size, loss)
        self._alive += size
        return size

    def _forget(self, key: int, _: Any) -> None:
        del self._references[key]
        self._entered.discard(key)
        if key in self._owner:
            self._alive -= self._owner.pop(key)[1]

    def _bytes_of(self, values: Any, counted: set[int] | None = None) -> int:
        """Of the storages that were made by the model, each once, and not those that were ``counted`` before."""
        keys = {t.untyped_storage()._cdata for t in tensors_anywhere(values)}
        if counted is not None:
            keys -= counted
            counted |= keys
        return sum(self._owner[key][1] for key in keys if key in self._owner)

    # -- parameters and their gradients

    def _note_uses(self, args: Any) -> None:
        for tensor in tensors_in(args):
            key = self._params.get(tensor.untyped_storage()._cdata)
            if key is not None and self._now not in self.used_by[key]:
                self.used_by[key].append(self._now)

    def _made_gradient(self, i: int, param: int, grad_inputs: Any, grad_outputs: Any) -> None:
        """A node handed a gradient on to a parameter; that of a tied weight comes in several parts."""
        grad = grad_inputs[i]
        if grad is not None and param not in self._graded:
            self._graded.add(param)
            self.segments[self._now].grad_bytes += grad.nbytes
            self._gradients.append(grad.untyped_storage()._cdata)

    def _release_grads(self) -> None:
        """FSDP accounts for whole gradients apart, from the segment that makes them to the reduction of the unit."""
        for key in self._gradients:
            if key in self._owner:
                name, size, loss = self._owner[key]
                self._alive -= size
                self._owner[key] = (name, 0, loss)
        self._gradients.clear()
        for param in self._ready:
            param.grad = None
        self._ready.clear()
        self.progress()


def _named(segment: Segment, func: Any, kernels: list[Kernel], made: list[torch.Tensor]) -> list[Kernel]:
    """The kernels of an operator with its name, if activation checkpointing may keep what it puts out."""
    op = OPERATOR_OF.get(func._opname)
    if op is None:
        return kernels
    storages = [tensor.untyped_storage() for tensor in made]
    segment.outputs.append(Output(op, sum(storage.nbytes() for storage in storages), 0))
    segment.made_by.append([weakref.ref(storage) for storage in storages])
    return [kernel._replace(op=op) for kernel in kernels]
