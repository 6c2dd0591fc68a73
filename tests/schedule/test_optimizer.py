"""`torch.optim.Muon` on shards: the collectives that torch issues for one matrix are those of the program."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES, Op
from tests.measure.mem_tracker import fake_ranks

NAMES = {"all_gather_into_tensor": "ALL_GATHER", "all_reduce": "ALL_REDUCE"}


class Collectives(TorchDispatchMode):
    """The collectives that DTensor asks for, and the bytes of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func._opname in NAMES:
            self.seen.append((NAMES[func._opname], out.nbytes))
        return out


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (64, 64)], ids=["wide", "tall", "square"])
def test_muon_issues_the_collectives_of_torch(shape: tuple[int, int]) -> None:
    with fake_ranks(8) as mesh, Collectives() as torch_issued:
        block = nn.Linear(shape[1], shape[0], bias=False)
        fully_shard(block, mesh=mesh)
        optimizer = torch.optim.Muon(block.parameters())
        block(torch.randn(2, shape[1])).sum().backward()
        torch_issued.seen.clear()
        optimizer.step()

    units = (Unit("root", segments=(...,)), Unit("block", (Param("weight", shape),)))
    ops = build(units, Plan(optimizer="muon"), 8).ops

    assert [(str(i.op), i.bytes) for i in ops if i.op in COLLECTIVES and "weight" in i.unit] == torch_issued.seen


@pytest.mark.parametrize(
    ("api", "read", "reduced"),
    [("fsdp2", 4 * (2 * 3 + 1), 2 * 4), ("fsdp1", 4 * 18 // 4, 4), ("ddp", 4 * 18, None), ("zero1", 4 * 18, None)],
)
def test_clipping_reads_what_a_rank_holds_of_the_gradients(api: str, read: int, reduced: int | None) -> None:
    """FSDP2 holds rows of each parameter, padded, and reduces a norm for each; FSDP1 a quarter of all; DDP all."""
    unit = Unit("root", (Param("weight", (5, 3)), Param("bias", (3,))))
    ops = build([unit], Plan(api=api, clip_grad_norm=True), 4).ops
    assert [i.bytes for i in ops if i.op in (Op.NORM, Op.CLIP)] == [read, read]
    assert [i.bytes for i in ops if i.op is Op.ALL_REDUCE and i.reduce_op == "SUM"] == ([reduced] if reduced else [])
