"""CPU offload: shards, gradients and the optimizer live in host memory; the device holds what computes.

A unit's shards are copied to the device (H2D) on the all-gather copy-in stream, right before their all-gather; its
reduced gradients are copied back (D2H) behind the reduce-scatter. From pinned host memory both run beside the compute;
the end of backward then makes the CPU wait for the last D2H, because the optimizer that follows runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch


def pin(shard: torch.Tensor, pin_memory: bool) -> torch.Tensor:
    """A shard in host memory; pinned, copies to and from the device are asynchronous.

    Raises:
        RuntimeError: to be pinned, without a device to pin it for.
    """
    if pin_memory and not torch.accelerator.is_available():
        raise RuntimeError(
            "pinned memory needs an accelerator and there is none; pass CPUOffloadPolicy(pin_memory=False)"
        )
    if shard.is_meta:
        return shard
    shard = shard.cpu()
    return shard.pin_memory() if pin_memory else shard


def to_device(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    """H2D on the current stream."""
    return shard.to(device, non_blocking=True)


def grad_to_cpu(fsdp_param: Any, rows: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
    """D2H of a reduced gradient, on the current stream (``stream``).

    It may only be asynchronous if nobody reads it on the CPU within backward: no gradient to add to, no hook.
    """
    param = fsdp_param.sharded_param
    read_at_once = param.grad is not None or getattr(param, "_post_accumulate_grad_hooks", None)
    non_blocking = fsdp_param.pin_memory and not read_at_once
    on_cpu = rows.to("cpu", non_blocking=non_blocking)
    if non_blocking:
        fsdp_param.grad_offload_event = stream.record_event()
    return on_cpu


def wait_for_grads(fsdp_params: list[Any]) -> None:
    """At the end of backward: block the CPU until the last asynchronous D2H is done."""
    for p in fsdp_params:
        if p.grad_offload_event is not None:
            p.grad_offload_event.synchronize()
            p.grad_offload_event = None


def validate_on_cpu(fsdp_params: list[Any]) -> None:
    """Raises: RuntimeError: offloaded shards that are not in host memory."""
    elsewhere = {
        p._param_fqn: str(p.sharded_param.device)
        for p in fsdp_params
        if p.offload_to_cpu and p.sharded_param.device.type != "cpu"
    }
    if elsewhere:
        raise RuntimeError(
            f"with CPU offload the parameters must be on the CPU before training, but these are not: {elsewhere}; "
            'call module.to_empty(device="cpu") and initialize them, or load a state dict that is on the CPU'
        )
