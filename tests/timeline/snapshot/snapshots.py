"""Snapshots of CUDA's memory in torch's layout, of a step whose truth is known: for where there is no GPU.

Fields are those of torch 2.13's ``torch/cuda/memory.py`` (_snapshot) and ``torch/csrc/cuda/memory_snapshot.cpp``;
torch's own ``torch.cuda._memory_viz`` is asked whether it can read them.
"""

from __future__ import annotations

from typing import Any

MiB = 1 << 20
BEGAN_US = 1_790_000_000_000_000
PARAMS, OUTPUT, UNSHARDED, ACTIVATION, GRAD, RS_INPUT = 100 * MiB, 40 * MiB, 40 * MiB, 30 * MiB, 20 * MiB, 25 * MiB

TRAIN = {"filename": "/home/me/train.py", "line": 7, "name": "main"}
TORCH = "/x/lib/python3.12/site-packages/torch"
MODULE = {"filename": f"{TORCH}/nn/modules/module.py", "line": 1776, "name": "_call_impl"}
ENGINE = {
    "filename": f"{TORCH}/autograd/graph.py",
    "line": 8,
    "name": "_engine_run_backward",
}
COLLECTIVES = f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


def fsdp(name: str, line: int) -> dict[str, Any]:
    return {"filename": COLLECTIVES, "line": line, "name": name}


FORWARD = [{"filename": "/home/me/model.py", "line": 31, "name": "forward"}, MODULE, TRAIN]
BACKWARD = [ENGINE, TRAIN]
GATHER = [fsdp("foreach_all_gather", 150), MODULE, TRAIN]
COPY_OUT = [fsdp("foreach_all_gather_copy_out", 210), MODULE, TRAIN]
REDUCE = [fsdp("foreach_reduce", 430), ENGINE, TRAIN]


class Device:
    """An allocator that takes a new segment for each block, a multiple of 2 MiB, and writes down what it does."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.segments: dict[int, dict[str, Any]] = {}
        self.next = 0x7F00_0000_0000

    def note(self, action: str, size: int, frames: list[dict[str, Any]], **more: Any) -> None:
        at = {"time_us": BEGAN_US + 1000 * len(self.trace)}
        self.trace.append(
            {"action": action, "size": size, "stream": 0, "frames": frames, "pool_id": (0, 0)} | at | more
        )

    def alloc(self, size: int, frames: list[dict[str, Any]]) -> int:
        address, whole = self.next, -(-size // (2 * MiB)) * 2 * MiB
        self.next += whole
        self.note("segment_alloc", whole, frames, addr=address)
        self.note("alloc", size, frames, addr=address)
        rounded = -(-size // 512) * 512
        block = {
            "address": address,
            "size": rounded,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames,
        }
        blocks = [block]
        if whole > rounded:
            rest = {"address": address + rounded, "size": whole - rounded, "requested_size": 0, "state": "inactive"}
            blocks.append(rest | {"frames": []})
        self.segments[address] = {
            "address": address, "total_size": whole, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "allocated_size": rounded, "active_size": rounded, "requested_size": size, "device": 0, "blocks": blocks,
            "is_expandable": False, "frames": frames,
        }  # fmt: skip
        return address

    def free(self, address: int, frames: list[dict[str, Any]], *, give_back: bool = False) -> None:
        segment = self.segments[address]
        size = segment["requested_size"]
        self.note("free_requested", size, frames, addr=address)
        self.note("free_completed", size, frames, addr=address)
        segment["blocks"][0] |= {"state": "inactive", "requested_size": 0}
        segment |= {"allocated_size": 0, "active_size": 0, "requested_size": 0}
        if give_back:
            self.note("segment_free", segment["total_size"], frames, addr=address)
            del self.segments[address]

    def snapshot(self, *, oom: bool = False) -> dict[str, Any]:
        if oom:
            self.note("oom", 500 * MiB, FORWARD, device_free=3 * MiB)
        self.note("snapshot", 0, [TRAIN], addr=0)
        return {
            "segments": list(self.segments.values()), "device_traces": [self.trace, []],
            "allocator_settings": {"expandable_segments": False}, "external_annotations": [],
        }  # fmt: skip


def step(*, oom: bool = False, before: bool = True) -> dict[str, Any]:
    """Parameters from before the recording, a unit's forward, and its backward, whose reduce-scatter input is the peak.

    What stands there is `PEAK`; the all-gather's output has been freed by then, and its segment given back.
    """
    device = Device()
    device.alloc(PARAMS, [])
    if before:
        device.trace.clear()
    output = device.alloc(OUTPUT, GATHER)
    whole = device.alloc(UNSHARDED, COPY_OUT)
    device.free(output, COPY_OUT, give_back=True)
    activation = device.alloc(ACTIVATION, FORWARD)
    grad = device.alloc(GRAD, BACKWARD)
    reduce_input = device.alloc(RS_INPUT, REDUCE)
    device.free(grad, REDUCE)
    device.free(activation, BACKWARD)
    device.free(reduce_input, REDUCE)
    device.free(whole, BACKWARD)
    return device.snapshot(oom=oom)


PEAK = {
    "": PARAMS, "unsharded": UNSHARDED, "activation": ACTIVATION, "unsharded_grad": GRAD, "rs_input": RS_INPUT,
}  # fmt: skip
