"""What an operator of torch means in the program of FSDP, given the hook of the unit inside which it runs.

[Note: how an operation is recognised]  Not by the code that issues it, which differs between torch and the mini, but by
the operator and the hook that is running. A dispatch mode sees every operator: inside `unshard` a `_foreach_copy_`
into another dtype is the cast and one into the same dtype the copy-in; inside `wait_for_unshard` it is the copy-out,
and what it writes are unsharded parameters. The collectives are seen where they are issued, at the process group.

[Note: when memory lives]  A buffer is born when an operator inside a hook returns a tensor with new storage, or when a
storage of size 0 is resized, and dies when it is resized to 0 or its last reference goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_sim.measure.recording_streams import Buffer, Device, Log
from fsdp_sim.schedule import EXTRA_OPS, Kind
from fsdp_sim.timeline import Memory, Op

Patches = Iterator[tuple[Any, str, Any]]  # object, attribute, what stands there during the recording


class Operators(TorchDispatchMode):
    """Writes a line for each operation of a unit, and for its buffers.

    Args:
        every_op: also write the operations that torch's recorded format leaves out: `EXTRA_OPS`.

    Attributes:
        hooks: those that are running, (name, unit), the innermost last. Operators outside of them are compute.
    """

    def __init__(self, log: Log, device: Device, every_op: bool) -> None:
        super().__init__()
        self.log, self.device, self.every_op = log, device, every_op
        self.hooks: list[tuple[str, Any]] = []
        self._buffers: dict[int, Buffer] = {}  # those alive, by storage
        self._travelling: set[int] = set()  # what an all-to-all writes and nobody has waited for, by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.hooks and self.hooks[-1][0] == CLIP and not DESUGARED.isdisjoint(types):
            return NotImplemented  # so that what they make of it comes here
        if not self.hooks and AsyncCollectiveTensor in types:
            return NotImplemented  # so that its wait comes here
        result = func(*args, **(kwargs or {}))
        if self.hooks and DTensor not in types and FakeTensor not in types:  # which DTensor asks for shapes
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._born(tensor.untyped_storage())
        if DTensor not in types and FakeTensor not in types:
            hook, unit = self.hooks[-1] if self.hooks else (COMPUTE, None)
            meaning = MEANINGS.get((hook, func._schema.name.partition("::")[2]))
            if meaning is not None:
                meaning(self, unit, result, *args, **(kwargs or {}))
        return result

    # Buffers

    def _born(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._buffers or not storage.nbytes():
            return
        buffer = Buffer(self.device.current_stream(), self.hooks[-1][1] if self.hooks else None)
        self._buffers[storage._cdata] = buffer
        self.log.write(Kind.ALLOC, buffer.stream, buffer)
        # Fires when the last reference goes; may come after the buffer was freed by a resize, and another was born.
        finalize(storage, self._died, storage._cdata).atexit = False

    def _died(self, key: int) -> None:
        buffer = self._buffers.pop(key, None)
        if buffer is not None:
            self.log.write(Kind.FREE, buffer.stream, buffer)

    def freed(self, tensor: torch.Tensor) -> None:
        """Write now that this memory is freed, rather than when it is."""
        self._died(tensor.untyped_storage()._cdata)

    def _role(self, role: Memory, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            buffer = self._buffers.get(tensor.untyped_storage()._cdata)
            if buffer is not None and not buffer.role:
                buffer.role = role

    def _has_role(self, role: Memory, tensor: torch.Tensor) -> bool:
        buffer = self._buffers.get(tensor.untyped_storage()._cdata)
        return buffer is not None and buffer.role == role

    # Operators: (self, unit, result, *arguments of the operator)

    def _copy_in(self, unit: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        self._op(Op.AG_COPY_IN, unit)

    def _foreach_copy_in(self, unit: Any, result: Any, to: Any, source: Any, *args: Any) -> None:
        if all(a.dtype == b.dtype for a, b in zip(to, source, strict=True)):
            self._op(Op.AG_COPY_IN, unit)
        else:
            self._op(Op.AG_CAST, unit, f" to {to[0].dtype}")

    def _cast_shard(self, unit: Any, result: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> None:
        self._op(Op.AG_CAST, unit, f" to {dtype}")

    def _copy_out(self, unit: Any, result: Any, *args: Any, out: Any, **kwargs: Any) -> None:
        self._role(Memory.UNSHARDED, *out)
        self._op(Op.AG_COPY_OUT, unit)

    def _foreach_copy_out(self, unit: Any, result: Any, to: Any, *args: Any) -> None:
        self._copy_out(unit, result, out=tree_leaves(to))

    def _clone(self, unit: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        self._op(Op.CLONE, unit)

    def _chunk_cat(self, unit: Any, result: Any, *args: Any, out: Any, **kwargs: Any) -> None:
        self._role(Memory.RS_INPUT, out)
        self._op(Op.RS_COPY_IN, unit)

    def _copy_reduced(self, unit: Any, result: Any, to: Any, *args: Any) -> None:
        self._role(Memory.RS_OUTPUT, to)
        self._op(Op.RS_COPY, unit)

    def _cast_flat_param(self, unit: Any, result: Any, to: Any, *args: Any) -> None:
        self._op(Op.AG_CAST, unit, f" to {to.dtype}")

    def _cast_flat_gradient(self, unit: Any, result: Any, gradient: Any, dtype: Any = None, **kwargs: Any) -> None:
        self._op(Op.GRAD_CAST, unit, f" {gradient.dtype} -> {dtype}")

    def _cast_gradient(self, unit: Any, result: Any, gradient: Any, dtype: Any = None, **kwargs: Any) -> None:
        if self._has_role(Memory.RS_OUTPUT, gradient):
            self._role(Memory.RS_OUTPUT, result)
            self._op(Op.GRAD_CAST, unit, f" {gradient.dtype} -> {dtype}")
        else:
            self._op(Op.UPCAST, unit)

    def _divide(self, unit: Any, result: Any, tensor: Any, factor: Any) -> None:
        self._op(Op.DIV, unit, f" by {factor}")

    def _add(self, unit: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        self._op(Op.ACCUMULATE, unit)

    def _norm(self, unit: Any, *args: Any) -> None:
        self.log.write_op(Op.NORM)

    def _scale(self, unit: Any, *args: Any) -> None:
        self.log.write_op(Op.CLIP)

    def _functional_all_reduce(self, unit: Any, result: Any, tensor: Any, op: str, group: Any) -> None:
        self.log.write_op(f"{Op.ALL_REDUCE} n={_resolve_process_group(group).size()} async")

    def _functional_wait(self, unit: Any, *args: Any) -> None:
        self.log.write(Kind.WAIT, self.log.current[-1], Op.ALL_REDUCE)

    def _all_to_all(self, unit: Any, result: Any, tensor: Any, to: Any, of: Any, group: Any) -> None:
        self.log.write_op(f"{Op.ALL_TO_ALL} n={_resolve_process_group(group).size()} async")
        self._travelling.add(result.untyped_storage()._cdata)

    def _all_to_all_wait(self, unit: Any, result: Any, tensor: Any) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._travelling:  # a second wait for the same finds nothing to wait for
            self._travelling.remove(key)
            self.log.write(Kind.WAIT, self.log.current[-1], Op.ALL_TO_ALL)

    def _op(self, op: Op, unit: Any, detail: str = "") -> None:
        if self.every_op or op not in EXTRA_OPS:
            self.log.write_op(f"{op}(", unit, f"){detail}")

    # What is no operator

    def patches(self) -> Patches:
        """Collectives, resizes and copies between host and device, which on CPU a dispatch mode does not see."""
        yield torch.nn.utils, CLIP, self._clip(torch.nn.utils.clip_grad_norm_)
        yield torch.UntypedStorage, "resize_", self._resize(torch.UntypedStorage.resize_)
        yield torch.Tensor, "to", self._to(torch.Tensor.to)
        yield torch.accelerator, "is_available", lambda: True  # pinning needs one
        yield torch.Tensor, "pin_memory", lambda tensor, *_: tensor
        yield torch.Tensor, "is_pinned", lambda tensor, *_: True
        for method, op in COLLECTIVES.items():
            kind = distributed_c10d.ProcessGroup  # that of this process's groups: `fsdp_sim.ranks` has its own
            original = getattr(kind, method, None)
            if original is not None:
                yield kind, method, self._collective(op, original)

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self.hooks.append((CLIP, None))
            try:
                return original(*args, **kwargs)
            finally:
                self.hooks.pop()

        return clip_grad_norm_

    def _resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if nbytes == 0:
                self._died(storage._cdata)
            result = original(storage, nbytes)
            self._born(storage)
            return result

        return resize_

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        direction = {"unshard": Op.H2D, "wait_for_unshard": Op.H2D, "post_backward": Op.D2H}

        @wraps(original)
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.hooks and args and args[0] == torch.device("cpu") and not kwargs.get("non_blocking", True):
                self.log.write(Kind.CPU_SYNC, None, self.log.current[-1])  # so it would be from a GPU
            if self.hooks and self.hooks[-1][0] in direction and args and isinstance(args[0], str | torch.device):
                self._op(direction[self.hooks[-1][0]], self.hooks[-1][1])
            return original(tensor, *args, **kwargs)

        return to

    def _collective(self, op: Op, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def collective(group: dist.ProcessGroup, output: Any, *args: Any) -> Any:
            options = args[-1]
            hook, unit = self.hooks[-1] if self.hooks else ("", None)
            what: tuple[object, ...] = (str(op),) if unit is None else (f"{op}(", unit, ")")
            text = f" n={group.size()}"
            if hook.startswith("fsdp1."):
                text = ""
                if op is Op.ALL_GATHER:
                    self._role(Memory.UNSHARDED, *tree_leaves(output))
            elif op is Op.ALL_GATHER:
                self._role(Memory.AG_OUTPUT, output)
            elif op is Op.REDUCE_SCATTER:
                self._role(Memory.RS_INPUT, args[0])
                self._role(Memory.RS_OUTPUT, output)
                text += f" op={_reduce_op(options.reduceOp)}"
            self.log.write_op(*what, text, " async" if options.asyncOp else "")
            work = original(group, output, *args)
            return _Work(self, what if options.asyncOp else (), work)

        return collective

    @contextmanager
    def inside_a_collective(self) -> Iterator[None]:
        """What a collective does with operators is its own affair: gloo's reduce-scatter ends with a copy."""
        self.hooks.append((INSIDE, self.hooks[-1][1] if self.hooks else None))
        try:
            yield
        finally:
            self.hooks.pop()


def _reduce_op(op: Any) -> str:
    name = str(op.op).removeprefix("RedOpType.") if hasattr(op, "op") else str(op)
    return name if name != "PREMUL_SUM" else f"{name}({op.factor})"


class _Work(dist.Work):
    """A collective: of an asynchronous one, ``what``, whoever waits makes the current stream wait for it."""

    def __init__(self, operators: Operators, what: tuple[object, ...], work: dist.Work) -> None:
        super().__init__()
        self._operators, self._what, self._work = operators, what, work

    def wait(self, *args: Any) -> bool:
        if self._what:
            self._operators.log.write(Kind.WAIT, self._operators.log.current[-1], *self._what)
        with self._operators.inside_a_collective():
            return self._work.wait(*args)

    def is_completed(self) -> bool:
        return self._work.is_completed()


COLLECTIVES = {  # methods of `ProcessGroup`; the first names are those of torch 2.13, the second those before
    "all_gather_single": Op.ALL_GATHER,
    "_allgather_base": Op.ALL_GATHER,
    "reduce_scatter_single": Op.REDUCE_SCATTER,
    "_reduce_scatter_base": Op.REDUCE_SCATTER,
    "allreduce": Op.ALL_REDUCE,
    "allgather": Op.ALL_GATHER,  # FSDP1 on CPU
}
DESUGARED = {DTensor, AsyncCollectiveTensor}
COMPUTE, INSIDE = "", "a collective"  # no hooks, but told apart in the same way
CLIP = "clip_grad_norm_"  # no hook of FSDP, but what runs inside of it is told apart in the same way
MEANINGS: dict[tuple[str, str], Callable[..., None]] = {  # by hook and operator
    ("unshard", "all_gather_copy_in"): Operators._copy_in,
    ("unshard", "_foreach_copy_"): Operators._foreach_copy_in,
    ("unshard", "_to_copy"): Operators._cast_shard,
    ("wait_for_unshard", "_to_copy"): Operators._cast_shard,  # one rank: no all-gather, all happens here
    ("wait_for_unshard", "split_with_sizes_copy"): Operators._copy_out,
    ("wait_for_unshard", "_foreach_copy_"): Operators._foreach_copy_out,
    ("wait_for_unshard", "copy_"): Operators._foreach_copy_out,
    ("reshard", "clone"): Operators._clone,
    ("post_backward", "chunk_cat"): Operators._chunk_cat,
    ("post_backward", "_chunk_cat"): Operators._chunk_cat,
    ("post_backward", "chunk_cat_mixed_dtype"): Operators._chunk_cat,  # torch 2.15
    ("post_backward", "copy_"): Operators._copy_reduced,
    ("post_backward", "_to_copy"): Operators._cast_gradient,
    ("post_backward", "div_"): Operators._divide,
    ("post_backward", "div"): Operators._divide,  # one rank, where torch divides on the way from I to O
    ("post_backward", "add_"): Operators._add,
    ("post_backward", "_foreach_add_"): Operators._add,
    (CLIP, "_foreach_norm"): Operators._norm,
    (CLIP, "all_reduce"): Operators._functional_all_reduce,
    (CLIP, "wait_tensor"): Operators._functional_wait,
    (CLIP, "_foreach_mul_"): Operators._scale,
    (COMPUTE, "all_to_all_single"): Operators._all_to_all,
    (COMPUTE, "wait_tensor"): Operators._all_to_all_wait,
    ("fsdp1.unshard", "copy_"): Operators._cast_flat_param,
    ("fsdp1.post_backward", "_to_copy"): Operators._cast_flat_gradient,
    ("fsdp1.post_backward", "div_"): Operators._divide,
    ("fsdp1.post_backward", "add_"): Operators._add,
}
