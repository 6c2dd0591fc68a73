"""Gradients communicated while backward runs: what DDP and ZeRO share.

[Note: buckets]  One collective per parameter would pay the latency of the network hundreds of times; one for the whole
model could not start before backward has ended. So gradients travel in buckets. Backward produces them roughly in the
reverse order of `parameters()`, and the buckets are filled in that order:

    parameters   embed.w | layers.0.w   layers.1.w | head.w
    buckets      bucket.2         bucket.1           bucket.0
    backward     BWD head | BWD layers.1 | BWD layers.0      | BWD embed         |
    wire                  | ALL_REDUCE(bucket.0) | idle      | ALL_REDUCE(bucket.1) | ALL_REDUCE(bucket.2) |

The collective of a bucket starts as soon as its last gradient is there *and* the bucket before it has started: all
ranks issue their collectives in one order, or they would wait for each other for ever. The first bucket may be smaller
(torch: 1 MiB, then 25), so that the wire is not idle for long. The last bucket is always exposed.

[Note: gradients are views]  A bucket is one flat buffer, allocated once, and after a backward each ``.grad`` is a view
of it (torch: ``gradient_as_bucket_view=True``). Autograd's own gradient is copied in and dropped; nothing is copied
out. Gradients exist once: with torch's default, where a bucket is a copy, they take twice the memory.

[Note: in which order to fill]  torch starts with one bucket and rebuilds them after the first backward, in the order in
which the gradients came. Here it is always the reverse order of the parameters: the same where modules are registered
in the order in which they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, ReduceOp

from fsdp_sim.mini import recording
from fsdp_sim.mini.siblings.collectives import NoWork, Pending, all_reduce
from fsdp_sim.timeline import RECORDER, Lane, Memory


class Bucket:
    """Parameters that are communicated together, and where each lies in a flat buffer.

    Attributes:
        unit: its name in the timeline.
        numel: elements of a flat buffer: those of the parameters, padded to a multiple of ``multiple_of``.
        buffer: 1D, their gradients; None while it has no memory.
        missing: the parameters whose gradient this backward has not written yet.
        pending: its collective in this backward, once issued.
    """

    def __init__(self, index: int, params: list[nn.Parameter], multiple_of: int = 1) -> None:
        self.unit = f"bucket.{index}"
        self.params = params
        numels = [p.numel() for p in params]
        self.offsets = dict(zip(params, accumulate([0, *numels]), strict=False))  # the last sum is the end
        self.numel = -(-sum(numels) // multiple_of) * multiple_of
        self.buffer: torch.Tensor | None = None
        self.missing = set(params)
        self.pending: Pending = NoWork()

    def zeros(self) -> torch.Tensor:
        """A flat buffer, 1D: numel."""
        return self.params[0].detach().new_zeros(self.numel)

    def part(self, flat: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """What belongs to a parameter in a flat buffer: a view of the parameter's shape."""
        return flat.narrow(0, self.offsets[param], param.numel()).view(param.shape)


def assign_to_buckets(
    params: Sequence[nn.Parameter], cap_bytes: int, first_cap_bytes: int | None = None
) -> list[list[nn.Parameter]]:
    """Split the reversed parameters into buckets; a bucket is full once it holds ``cap_bytes`` or more.

    A parameter is never split, and a bucket holds one dtype. Source: torch's `compute_bucket_assignment_by_size`.

    Example:
        >>> params = [nn.Parameter(torch.empty(n)) for n in (1, 2, 3, 4)]  # 4 to 16 bytes
        >>> [[p.numel() for p in bucket] for bucket in assign_to_buckets(params, 20, first_cap_bytes=16)]
        [[4], [3, 2], [1]]
    """
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    caps: dict[torch.dtype, int] = {}
    for param in reversed(params):
        bucket = filling.setdefault(param.dtype, [])
        bucket.append(param)
        if sum(p.nbytes for p in bucket) >= caps.setdefault(param.dtype, first_cap_bytes or cap_bytes):
            full.append(filling.pop(param.dtype))
            caps[param.dtype] = cap_bytes
    return full + list(filling.values())


class Reducer:
    """Averages the buckets' gradients over the ranks during backward (torch: `reducer.cpp`).

    Args:
        names: of the parameters, for messages.
        find_unused_parameters: a gradient that this rank did not compute counts as zero; one that no rank computed
            stays None. Costs one more all-reduce. If False, a gradient that does not come is an error.

    Attributes:
        sync: False while gradients are only accumulated.

    Raises:
        RuntimeError: in backward: a parameter got no gradient, or got it twice.
    """

    def __init__(
        self, buckets: list[Bucket], names: dict[nn.Parameter, str], group: ProcessGroup, find_unused_parameters: bool
    ) -> None:
        self.buckets, self.names, self.group = buckets, names, group
        self.find_unused_parameters = find_unused_parameters
        self.sync = True
        self._next = 0  # the bucket that is issued next
        self._in_backward = False
        self._recording = 0  # the one into which the buffers were written
        self.allocate()
        for bucket in buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(lambda p, b=bucket: self._grad_written(b, p))

    # What happens to a bucket. ZeRO-2 does it otherwise

    def allocate(self) -> None:
        for bucket in self.buckets:
            bucket.buffer = bucket.zeros()

    def take(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Move a gradient into the bucket, see [Note: gradients are views]. One that nobody computed counts as zero."""
        assert bucket.buffer is not None
        part = bucket.part(bucket.buffer, param)  # the parameter's shape
        if param.grad is None:
            part.zero_()
        elif param.grad.data_ptr() != part.data_ptr():  # equal: accumulated in place since the last zero_grad
            part.copy_(param.grad)
            param.grad = part

    def issue(self, bucket: Bucket) -> None:
        """Start averaging a full bucket."""
        assert bucket.buffer is not None
        bucket.pending = all_reduce(bucket.buffer, self.group, bucket.unit)

    def finish(self, bucket: Bucket) -> None:
        """Wait until it is averaged."""
        bucket.pending.wait()

    def used_somewhere(self) -> set[nn.Parameter]:
        """The parameters for which some rank has a gradient. The others keep their ``.grad`` of None, so that the
        optimizer leaves them alone."""
        params = [p for bucket in self.buckets for p in bucket.params]
        has_grad = [int(p.grad is not None) for p in params]
        n_ranks = torch.tensor(has_grad, device=params[0].device)  # (params,): how many ranks have a gradient
        all_reduce(n_ranks, self.group, "used parameters", ReduceOp.SUM).wait()
        return {p for p, n in zip(params, n_ranks.tolist(), strict=True) if n}

    # A backward

    def _grad_written(self, bucket: Bucket, param: nn.Parameter) -> None:
        if not self.sync:
            return
        if not self._in_backward:
            self._in_backward = True
            recording.backward_begins()
            self._record_buffers()
            Variable._execution_engine.queue_callback(self._backward_ended)
        if param not in bucket.missing:
            raise RuntimeError(
                f"the gradient of {self.names[param]} was written twice in one backward, and may have been sent after "
                "the first time; with activation checkpointing use use_reentrant=False"
            )
        self._put(bucket, param)
        self._issue_full_buckets()

    @torch.no_grad()
    def _put(self, bucket: Bucket, param: nn.Parameter) -> None:
        self.take(bucket, param)
        bucket.missing.discard(param)

    def _issue_full_buckets(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.issue(self.buckets[self._next])
            self._next += 1

    def _backward_ended(self) -> None:
        unused = [(bucket, p) for bucket in self.buckets for p in bucket.params if p in bucket.missing]
        if unused and not self.find_unused_parameters:
            self._wait_and_reset()
            raise RuntimeError(
                f"backward computed no gradient for {', '.join(self.names[p] for _, p in unused)}, for which the other "
                "ranks would wait; use all parameters in the loss, freeze them, or pass find_unused_parameters=True "
                "(and with activation checkpointing use_reentrant=False)"
            )
        for bucket, param in unused:
            self._put(bucket, param)
        self._issue_full_buckets()
        used = self.used_somewhere() if self.find_unused_parameters else set()
        self._wait_and_reset()
        for bucket, param in unused:
            if param in used and bucket.buffer is not None:
                param.grad = bucket.part(bucket.buffer, param)

    def _wait_and_reset(self) -> None:
        for bucket in self.buckets:
            self.finish(bucket)
        recording.backward_ended(max(bucket.pending.seq for bucket in self.buckets))
        for bucket in self.buckets:
            bucket.missing, bucket.pending = set(bucket.params), NoWork()
        self._next, self._in_backward = 0, False

    def _record_buffers(self) -> None:
        if RECORDER.on and self._recording != RECORDER.session:
            self._recording = RECORDER.session
            for bucket in self.buckets:
                if bucket.buffer is not None:
                    recording.allocated(Memory.UNSHARDED_GRAD, bucket.unit, bucket.buffer.nbytes, Lane.COMPUTE)
