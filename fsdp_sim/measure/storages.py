"""How the meter sees a storage appear or change its size: every place where torch takes memory for tensors.

[Note: three doors]

    an operator      nearly all. A `TorchDispatchMode` sees every operator, in backward and in optimizer steps too, and
                     looks inside: the temporaries of operators that are made of others count, although nobody outside
                     sees them. DTensors are taken apart first: what is seen are this rank's local tensors
    a resize         ``UntypedStorage.resize_``, how FSDP frees, is not an operator; it is wrapped while one watches
    out of sight     memory that torch takes without an operator (``torch.from_numpy``, ``torch.load``): it is seen when
                     the first operator uses it

[Note: gloo lets go]  gloo works in threads of its own, which hold the buffers of a collective until a little after its
``wait`` has returned. When such a buffer is released would then be a matter of luck. So while one watches, a collective
is completed, and gloo has let go of it, before the call that issued it returns. The program's own order of allocations
stays; its overlap goes, so never measure time meanwhile.
"""

from __future__ import annotations

import sys
import sysconfig
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch._guards import active_fake_mode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

See = Callable[[torch.UntypedStorage, str], None]
"""Told of each storage that an operator was given or returned, and by which operator if that is news."""

OUT_OF_SIGHT = "out of sight"
CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
PLAIN = {torch._C._dispatch_keys(torch.empty(0)).raw_repr()}  # dispatch keys of an ordinary dense CPU tensor
with torch.inference_mode():
    PLAIN.add(torch._C._dispatch_keys(torch.empty(0)).raw_repr())
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")  # to complete these at once could be a deadlock
LET_GO_S = 60.0
TORCH = torch.__path__[0]
BARE = (torch.Tensor, torch.nn.Parameter)
INSIDE = (TORCH, sysconfig.get_paths()["stdlib"], __file__.removesuffix("storages.py"), "<")


@contextmanager
def watching(see: See) -> Iterator[None]:
    """Call ``see`` for every CPU storage that the operators inside the block are given or return, in order."""
    resize = torch.UntypedStorage.resize_

    def seen_resize(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type == "cpu":
            see(storage, OUT_OF_SIGHT)
        result = resize(storage, size)
        if storage.device.type == "cpu":
            see(storage, "resize_")
        return result

    torch.UntypedStorage.resize_ = seen_resize  # type: ignore[method-assign, assignment]
    try:
        with _Operators(see):
            yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The CPU storages behind a tensor: of its local tensor if it is a DTensor; none if it is sparse."""
    try:
        found = get_untyped_storages(tensor) if type(tensor) not in BARE else (tensor.untyped_storage(),)
    except NotImplementedError:
        return []
    return [storage for storage in found if storage.device.type == "cpu"]


def source() -> str:
    """``file:line`` of the nearest Python line outside torch and this package, or in an FSDP.

    In backward that is the call of ``backward``: Python does not know the line that autograd is at.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(INSIDE) or "/distributed/fsdp/" in name or "/fsdp_sim/mini/" in name:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Operators(TorchDispatchMode):
    """Shows what every operator is given and returns."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see
        self._running: list[Any] = []  # the outermost first
        self._done: list[Work] = []  # torch holds the C++ half of each; the Python half must not go before it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor: it comes again as operators on its local tensor
        if active_fake_mode() is not None:
            return func(*args, **kwargs)  # DTensor asks what shape a result would have: nothing is allocated
        given = _tensors((args, kwargs))
        self._show(given, self._outermost() or OUT_OF_SIGHT)
        if func.namespace == "c10d" and func._opname not in POINT_TO_POINT:
            return self._complete(func, args, kwargs, given)
        self._running.append(func)
        try:
            if self._running.count(func) == 1 and _has_inside(func, args, kwargs, given):
                with self:  # leaving a mode's handler turns the mode off, so turn it on again for the inside
                    result = func.redispatch(CPU_KERNELS, *args, **kwargs)
            else:
                result = func(*args, **kwargs)
            self._show(_tensors(result), self._outermost())
        finally:
            self._running.pop()
        return result

    def _outermost(self) -> str:
        return str(self._running[0]) if self._running else ""

    def _show(self, tensors: list[torch.Tensor], op: str) -> None:
        for tensor in tensors:
            for storage in storages(tensor):
                self._see(storage, op)

    def _complete(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """See [Note: gloo lets go].

        gloo is lent other tensors on the same storages, which go when it lets go: the storage has as many users as
        before. The program gets a handle that holds nothing.

        Raises:
            RuntimeError: gloo does not let go within a minute.
        """
        users = [(storage, _users(storage)) for tensor in given for storage in storages(tensor)]
        handle = _CompletedWork(given)
        self._done.append(handle)
        result = _lend(func, args, kwargs, given, handle)
        give_up_s = time.monotonic() + LET_GO_S
        while any(_users(storage) > before for storage, before in users):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{func} has completed, but its buffers are still in use after {LET_GO_S:g} s")
            time.sleep(2e-5)
        return result


class _CompletedWork(Work):
    """The handle of a collective that has completed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        return [tensor() for tensor in self._tensors]

    def get_future(self) -> torch.futures.Future:
        """As DDP's reducer wants it."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


def _lend(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], handle: Work) -> Any:
    """Run a collective to its end on other tensors with the same storages; what it returns, on the program's own."""
    lent = {id(tensor): tensor.detach() for tensor in given}
    owner = {id(lent[id(tensor)]): tensor for tensor in given}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: lent[id(tensor)], (args, kwargs))
    result = func(*args, **kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()
    result = tree_map_only(torch.ScriptObject, lambda _: handle.boxed(), result)
    return tree_map_only(torch.Tensor, lambda tensor: owner.get(id(tensor), tensor), result)


def _has_inside(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
    """Whether ``func`` can be run so that the operators it calls are seen: straight on its CPU kernel."""
    return (
        bool(given)
        and not func.is_view
        and all(torch._C._dispatch_keys(tensor).raw_repr() in PLAIN for tensor in given)
        and not _numbers_as_tensors(func, args, kwargs)
        and torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU")
    )


def _numbers_as_tensors(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a number stands where the schema has a tensor, as in ``x * 2``: a kernel called directly refuses it."""
    declared = {argument.name: argument for argument in func._schema.arguments}
    passed = {**dict(zip(declared, args, strict=False)), **kwargs}
    return any(
        isinstance(value, (bool, int, float, complex)) and isinstance(declared[name].type, torch.TensorType)
        for name, value in passed.items()
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _users(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)
