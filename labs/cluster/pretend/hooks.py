"""The collectives that FSDP2 is given, one pair for each unit: they move a rank's bytes and then hold the stream.

Source: torch's interfaces ``AllGather`` and ``ReduceScatter`` (torch/distributed/fsdp/_fully_shard/_fsdp_api.py), which
are met without being inherited, for their home has moved between versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from fsdp_sim.timeline import Op
from labs.cluster.pretend.network import Message, PretendedWire
from labs.cluster.pretend.recorder import PretendedTape

NEEDED = ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook")


def check_hooks(of: type = FSDPModule) -> None:
    """See that this torch has the hooks.

    Raises:
        ValueError: it lacks one; names it.
    """
    for name in NEEDED:
        if not hasattr(of, name):
            raise ValueError(
                f"torch {torch.__version__} has no FSDPModule.{name}, through which the pretend cluster gives FSDP2 "
                "its collectives; use torch 2.11 or newer"
            )


class AllGather:
    """An all-gather that finds only this rank's shard, and copies it to where the others' would arrive."""

    def __init__(self, unit: str, wire: PretendedWire, tape: PretendedTape) -> None:
        self.unit, self.wire, self.tape = unit, wire, tape

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.tape.thread(Op.AG_COPY_IN, self.unit)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.tape.thread(Op.ALL_GATHER, self.unit)
        ranks = group.size()
        others = output_tensor.view(ranks, -1)[1:]  # the first row is this rank's, rank 0's

        def move() -> None:
            others.copy_(input_tensor.view(1, -1).expand_as(others))

        message = Message(
            Op.ALL_GATHER, self.unit, output_tensor.nbytes, others.nbytes, ranks, group.group_name
        )  # fmt: skip
        return self.wire.carry(message, move, async_op)


class ReduceScatter:
    """A reduce-scatter that takes the parts of this rank's gradients for those of all ranks: it reads all of them.

    Args:
        reduced: called when it is issued.
    """

    def __init__(self, unit: str, wire: PretendedWire, tape: PretendedTape, reduced: Callable[[str], None]) -> None:
        self.unit, self.wire, self.tape, self.reduced = unit, wire, tape, reduced
        self._copying_in = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not self._copying_in:  # the input; the output's comes next
            self._copying_in = True
            self.tape.mark(Op.RS_COPY_IN, self.unit)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._copying_in = False
        self.tape.end()
        self.tape.thread(Op.REDUCE_SCATTER, self.unit)
        ranks = group.size()

        def move() -> None:
            torch.sum(input_tensor.view(ranks, -1), dim=0, out=output_tensor).div_(ranks)

        message = Message(
            Op.REDUCE_SCATTER, self.unit, input_tensor.nbytes, input_tensor.nbytes, ranks, group.group_name
        )  # fmt: skip
        work = self.wire.carry(message, move, async_op)
        self.reduced(self.unit)
        return work


class AllReduce:
    """HSDP's all-reduce between copies of the model. FSDP2's own is one of the fake process group, which takes no time
    and changes nothing; this runs right after it, on its stream.

    Args:
        copies: of the model.
        stride: ranks from a shard to its next copy.
    """

    def __init__(
        self,
        unit: str,
        wire: PretendedWire,
        tape: PretendedTape,
        reduced: Callable[[str], None],
        copies: int,
        stride: int,
    ) -> None:
        self.unit, self.wire, self.tape, self.reduced = unit, wire, tape, reduced
        self.copies, self.stride = copies, stride

    def __call__(self, reduce_output: torch.Tensor) -> None:
        self.tape.thread(Op.ALL_REDUCE, self.unit)
        message = Message(
            Op.ALL_REDUCE, self.unit, reduce_output.nbytes, reduce_output.nbytes, self.copies, "replicate", self.stride
        )  # fmt: skip
        self.wire.carry(message, lambda: reduce_output.mul_(1.0))
        self.reduced(self.unit)


def give_hooks(
    units: dict[str, Any],
    mesh_shape: tuple[int, ...],
    wire: PretendedWire,
    tape: PretendedTape,
    reduced: Callable[[str], None],
) -> None:
    """Give each unit its collectives.

    Args:
        units: the modules that `fully_shard` was called on, by name.
        mesh_shape: (ranks,), or of HSDP (copies, ranks that share one).
        reduced: called when a unit's gradients are on their way.

    Raises:
        ValueError: this torch has no such hooks.
    """
    check_hooks()
    copies = math.prod(mesh_shape[:-1])
    for name, module in units.items():
        module.set_custom_all_gather(AllGather(name, wire, tape))
        module.set_custom_reduce_scatter(ReduceScatter(name, wire, tape, reduced))
        if copies > 1:
            module.set_all_reduce_hook(AllReduce(name, wire, tape, reduced, copies, mesh_shape[-1]))
