"""Activation offload: what a segment keeps for its backward is copied to the CPU's memory, and back.

[Note: save_on_cpu]  ``torch.autograd.graph.save_on_cpu(pin_memory=True)`` copies each tensor that autograd saves, where
it saves it. That copy is not ``non_blocking``: the CPU waits for the device and issues nothing meanwhile. The one back,
where backward asks for the tensor, is. Both are on the compute stream.

[Note: streams]  ``OffloadActivations(use_streams=True)`` of torchtune 0.6.1: both copies are on a stream of their own.
The copy of a tensor starts when compute has come to it; the tensor is freed some tensors later (``max_fwd_stash_size``,
5), when compute waits for the end of its copy. The last are still there in backward. A copy back is issued where
backward asks for the tensor, and waits not for compute but for the end of the node before the last: as the CPU issues
ahead of the device, it runs beside the backward of one block. The head and the loss keep what they save.

Here segments are copied, not tensors: all that one keeps, once its forward has run. What it keeps includes its output,
so the backward of the one after it needs it too. (Of a tensor that two operators save torch makes two copies.)
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op

CHECKPOINT = "checkpoint"  # detail of a copy: of what a segment keeps that is computed again
MOST_STASHED = 5  # tensors that torchtune keeps on the device
_C, _S = Lane.COMPUTE, Lane.OFFLOAD


class ActivationOffload:
    """Issues the copies.

    Args:
        plan: how (``activation_offload``).
        segments: those that have a backward, in forward order.
        kept_by: those of the head and the loss.
        again: those that are computed again in backward.
    """

    def __init__(
        self, cpu: Cpu, plan: Plan, segments: Sequence[str], kept_by: Sequence[str], again: Sequence[str]
    ) -> None:
        self.cpu = cpu
        self.streams = plan.activation_offload == "streams"
        self.before = dict(zip(segments[1:], segments, strict=False))
        self.copied = set(segments) - (set(kept_by) if self.streams else set())
        self.again = set(again)
        self.most = MOST_STASHED if plan.activation_checkpointing == "full" else 1  # a checkpoint is one tensor
        self._stash: list[tuple[str, int]] = []  # copied, still on the device; the end of each copy
        self._away: set[str] = set()
        self._passed: list[int] = []  # ends of backward

    def forward(self, segment: str) -> None:
        """After the forward of a segment."""
        cpu = self.cpu
        if segment not in self.copied:
            return
        while len(self._stash) >= (self.most if self.streams else 1):
            self._drop()
        if self.streams:
            cpu.wait_stream(_S, _C)
        cpu.op(Op.ACT_D2H, segment, _S if self.streams else _C, detail=CHECKPOINT if segment in self.again else "")
        event = cpu.record(_S) if self.streams else 0
        if not self.streams:
            cpu.cpu_sync_stream(_C)
        self._stash.append((segment, event))

    def end_of_forward(self) -> None:
        """Without streams nothing stays but what backward brings back."""
        while self._stash and not self.streams:
            self._drop()

    def _drop(self) -> None:
        segment, event = self._stash.pop(0)
        if event:
            self.cpu.wait(_C, event)
        self.cpu.free(Memory.ACTIVATION, segment, 0, "", _C)
        self._away.add(segment)

    def before_backward(self, segments: Sequence[str]) -> None:
        """Bring back what the backward of these segments, which are computed again together, needs."""
        cpu = self.cpu
        for segment in dict.fromkeys(one for s in reversed(segments) for one in (s, self.before.get(s, ""))):
            if segment in self._away:
                self._away.remove(segment)
                lane = _S if self.streams else _C
                if self.streams and len(self._passed) > 1:
                    cpu.wait(_S, self._passed[-2])
                cpu.alloc(Memory.ACTIVATION, segment, 0, "", lane)
                cpu.op(Op.ACT_H2D, segment, lane, detail=CHECKPOINT if segment in self.again else "")
                if self.streams:
                    cpu.wait_stream(_C, _S)

    def after_backward(self) -> None:
        """After the backward of a segment: compute has waited for what was still being copied."""
        if not self.streams:
            return
        for _, event in self._stash:
            self.cpu.wait(_C, event)
        self._stash.clear()
        self._passed.append(self.cpu.record(_C))
