"""The program that FSDP issues, recorded: torch's own `fully_shard`, unmodified, or the mini's, on one CPU process.

A step of FSDP is a list of actions of the CPU: put this on that stream, let this stream wait for that event. Which
actions, in which order, does not depend on what the kernels compute. So one process suffices: a fake process group
says it has 8 ranks, the tensors are on the CPU, and the device is one whose streams write a log (`recording_streams`).

    def train(recorder):
        model = ...
        recorder.watch(model.layers[0], "layers.0")
        fully_shard(model.layers[0])
        ...
        recorder.mark("step 0 microbatch 0: forward")
        loss = model(x).sum()
        ...

    print(*record(train), sep="\\n")

Compute is what the modules that you `watch` do, and the steps of optimizers. The rest is recognised by operator and
hook, see `recording_operators`. The numbers mean nothing, for a fake collective moves no data: only the program does.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_sim import mini
from fsdp_sim.measure import recording_fsdp1
from fsdp_sim.measure.recording_operators import Operators, Patches
from fsdp_sim.measure.recording_streams import Device, Log, name_streams
from fsdp_sim.measure.trace_segment import tensors_anywhere
from fsdp_sim.schedule import Kind
from fsdp_sim.timeline import Lane

GROUP_HOOKS = (
    "pre_forward", "unshard", "wait_for_unshard", "post_forward", "reshard", "pre_backward", "post_backward",
    "finalize_backward",
)  # fmt: skip
FINAL_CALLBACK = "_root_post_backward_final_callback"
FULLY_SHARD = (FSDPParamGroup, FSDPState), (mini.FSDPParamGroup, mini.FSDPState)
STREAMS = {  # attributes of `FSDPCommContext`, in torch and in the mini
    "all_gather_copy_in_stream": Lane.AG_COPY_IN,
    "all_gather_stream": Lane.ALL_GATHER,
    "reduce_scatter_stream": Lane.REDUCE_SCATTER,
    "all_reduce_stream": Lane.ALL_REDUCE,
}


def record(
    train: Callable[[ProgramRecorder], object], *, world_size: int | None = 8, every_op: bool = False
) -> list[str]:
    """Run ``train`` and return the program that it issued on rank 0.

    Args:
        train: builds a model on CPU, shards it with torch's or the mini's `fully_shard`, and runs steps. What it
            returns is kept alive until the recording ends; what dies before is recorded as freed.
        world_size: ranks of the fake process group; None records on this rank of the process group that there is.
        every_op: also operations that torch's recorded format leaves out, see `Operators`.

    Returns:
        the lines, in the order in which the CPU issued them. Characters 0 to 11 are the kind (``op``, ``wait``,
        ``wait_stream``, ``record``, ``alloc``, ``free``, ``hook``, ``cpu_sync``), 12 to 27 the stream, the rest what.
        ``---`` lines are the recorder's marks.

    Raises:
        RuntimeError: this process already has a process group, or, where it should, has none.
        Exception: whatever ``train`` raises. torch is left as it was in every case.
    """
    if world_size is None:
        recorder = ProgramRecorder(every_op)
        _run(recorder, train)
        return recorder.lines()
    if dist.is_initialized():
        raise RuntimeError(
            f"this process already has a process group of {dist.get_world_size()} ranks ({dist.get_backend()}); "
            "recording makes a fake one of its own: call torch.distributed.destroy_process_group() first"
        )
    recorder = ProgramRecorder(every_op)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    _clear_sharding_prop_cache()  # DTensor's answers of earlier recordings name process groups that are gone
    try:
        _run(recorder, train)
    finally:
        dist.destroy_process_group()
    return recorder.lines()


def _run(recorder: ProgramRecorder, train: Callable[[ProgramRecorder], object]) -> None:
    try:
        with recorder._recording():
            alive = train(recorder)
            recorder._log.on = False  # what `alive` frees is no part of the program
            del alive
    finally:
        recorder._log.on = False


class ProgramRecorder:
    """How a training function adds its own lines to the recording.

    Attributes:
        device: the device handle that FSDP sees. ``device.Event()`` makes an event for `set_post_optim_event`,
            ``device.Stream(name="mine")`` a stream for `set_all_reduce_hook`.
    """

    def __init__(self, every_op: bool = False) -> None:
        self._log = Log()
        self.device = Device(self._log)
        self._operators = Operators(self._log, self.device, every_op)
        self._units: dict[int, Any] = {}  # every unit seen, by id
        self._fsdp1_states: list[Any] = []
        self._cleanup = ExitStack()

    def mark(self, phase: str) -> None:
        """A ``---`` line, for example ``step 0 microbatch 0: forward``."""
        self._log.write("---", None, phase)

    def op(self, name: str) -> None:
        """An ``op`` line on the current stream, for example ``FWD embed``."""
        self._log.write_op(name)

    def watch(self, module: nn.Module, name: str) -> None:
        """Write ``FWD name`` and ``BWD name`` whenever ``module`` runs, inside the hooks of `fully_shard`."""

        def backward_of(module: nn.Module, args: Any, output: Any) -> None:
            seen = set()  # backwards that came through here: a module with several outputs is one line

            def begins(grads: object) -> None:
                backward = torch._C._current_graph_task_id()
                if backward not in seen:
                    seen.add(backward)
                    self.op(f"BWD {name}")

            for tensor in tensors_anywhere(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(begins)  # after the tensor's own hooks, FSDP's pre-backward

        forward = module.register_forward_pre_hook(lambda *_: self.op(f"FWD {name}"))  # FSDP prepends its own
        self._cleanup.callback(forward.remove)
        self._cleanup.callback(module.register_forward_hook(backward_of, prepend=True).remove)

    def lines(self) -> list[str]:
        """The program so far."""
        fsdp1_units = recording_fsdp1.unit_names(self._fsdp1_states)

        def name(thing: Any) -> str:
            if id(thing) in self._units:
                return "?" if thing._module_fqn is None else thing._module_fqn or "root"
            return fsdp1_units.get(id(thing), "?")

        return self._log.text(name)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        collects = gc.isenabled()
        gc.disable()  # the moment a buffer is freed must not depend on when garbage is collected
        try:
            with self._cleanup as cleanup:
                for target, attribute, new in (*self._patches(), *self._operators.patches()):
                    cleanup.enter_context(patch.object(target, attribute, new))
                cleanup.callback(register_optimizer_step_pre_hook(lambda *_: self.op("OPTIM")).remove)
                with self._operators:
                    yield
        finally:
            if collects:
                gc.enable()

    def _patches(self) -> Patches:
        yield from recording_fsdp1.patches(self._operators, self._fsdp1_states)
        for group, state in FULLY_SHARD:
            package = group.__module__.rpartition(".")[0]
            for hook in GROUP_HOOKS:
                yield group, hook, self._hook(hook, getattr(group, hook))
            yield state, FINAL_CALLBACK, self._final_callback(getattr(state, FINAL_CALLBACK))
            for name, module in list(sys.modules.items()):
                if name.startswith(f"{package}.") and hasattr(module, "_get_device_handle"):
                    yield module, "_get_device_handle", lambda *_: self.device
        yield torch.accelerator, "current_stream", self.device.current_stream
        yield torch._C, "_get_accelerator", lambda *_: torch.device("cpu")  # the default mesh is of this device

    def _hook(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def hook(unit: Any, *args: Any, **kwargs: Any) -> Any:
            self._units[id(unit)] = unit
            name_streams(unit.comm_ctx, STREAMS)
            self._log.write(Kind.HOOK, None, f"{name}(", unit, ")")
            self._operators.hooks.append((name, unit))
            try:
                return original(unit, *args, **kwargs)
            finally:
                self._operators.hooks.pop()

        return hook

    def _final_callback(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def final_callback(state: Any) -> Any:
            self._log.write(Kind.HOOK, None, FINAL_CALLBACK.removeprefix("_"))
            return original(state)

        return final_callback
