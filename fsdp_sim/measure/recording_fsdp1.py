"""FSDP1 (`FullyShardedDataParallel`) under the recorder: its hooks, its rate limiter and its `record_stream`.

FSDP1 keeps a unit's parameters in one flat parameter, gathers straight into it, and orders little by events: it makes
the compute stream wait for the whole unshard stream, tells the allocator with `record_stream` how long memory is
needed, and bounds the memory by making the CPU wait ("rate limiter"). Its recorded lines therefore differ from those
of FSDP2, see `torch.distributed.fsdp._runtime_utils`.

On CPU give ``device_id=torch.device("cpu")``, else FSDP1 asks for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _runtime_utils
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle, clean_tensor_name
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue

from fsdp_sim.measure.recording_operators import Operators, Patches
from fsdp_sim.measure.recording_streams import Event, Stream, name_streams
from fsdp_sim.schedule import Kind
from fsdp_sim.timeline import Lane

FSDP1_STREAMS = {
    "_unshard_stream": Lane.UNSHARD,
    "_pre_unshard_stream": Lane.PRE_UNSHARD,
    "_post_backward_stream": Lane.POST_BACKWARD,
    "_all_reduce_stream": Lane.ALL_REDUCE,
}


def patches(operators: Operators, states: list[Any]) -> Patches:
    """What FSDP1 gets to see during the recording. The states (modules) that were seen are appended to ``states``."""
    log = operators.log

    def hooked(function: str) -> Callable[..., Any]:
        original = getattr(_runtime_utils, function)
        name = function.removeprefix("_").removesuffix("_hook")

        @wraps(original)
        def hook(state: Any, *args: Any, **kwargs: Any) -> Any:
            states.append(state)
            name_streams(state, FSDP1_STREAMS)
            # the handle that is meant: a unit that prefetches passes another's
            handle = next((a for a in args if isinstance(a, _flat_param.FlatParamHandle)), None)
            log.write(Kind.HOOK, None, *((f"{name}(", handle, ")") if handle else (name,)))
            operators.hooks.append((f"fsdp1.{name}", handle))
            try:
                return original(state, *args, **kwargs)
            finally:
                operators.hooks.pop()

        return hook

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        operators.freed(tensor)  # torch's recordings have the release before this line, though it comes right after
        log.write(Kind.RECORD_STREAM, stream, "tensor kept until ", stream, " passes (", operators.hooks[-1][1], ")")

    for function in (
        "_unshard",
        "_reshard",
        "_pre_backward_hook",
        "_post_backward_hook",
        "_post_backward_final_callback",
    ):
        yield _runtime_utils, function, hooked(function)
    for module in (_runtime_utils, _flat_param):
        yield module, "_no_dispatch_record_stream", record_stream
    yield _FSDPDeviceHandle, "from_device", lambda *_: operators.device

    dequeue = _FreeEventQueue.dequeue_if_needed

    def dequeue_if_needed(queue: Any) -> Any:
        event = dequeue(queue)
        return None if event is None else RateLimit(event)

    yield _FreeEventQueue, "dequeue_if_needed", dequeue_if_needed


class RateLimit:
    """The event that the rate limiter makes the CPU wait for."""

    def __init__(self, event: Any) -> None:
        self.event: Event = event

    def synchronize(self) -> None:
        self.event.log.write(Kind.CPU_BLOCK, None, "rate limiter waits for ", *self.event.pieces())


def unit_names(states: list[Any]) -> dict[int, str]:
    """The name of each unit, by the id of its flat parameter's handle: its module's name in the root, or ``root``."""
    return {
        id(module._handle): clean_tensor_name(name) or "root"
        for root in states
        if root._is_root
        for name, module in root.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }
