"""Activation offload: the order of copies is the one in which autograd saves and asks for tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_sim.cost import workload
from fsdp_sim.engine import memory
from fsdp_sim.engine.tensors import tensors
from fsdp_sim.schedule import Kind, Program, build, toy
from fsdp_sim.spec import Model, Plan
from fsdp_sim.timeline import Lane, Memory, Op

COMPUTE = {Op.FWD: "FWD", Op.BWD: "BWD", Op.RECOMPUTE: "RECOMPUTE"}
HOWS = ("save_on_cpu", "streams")
LAYERS = 4


def program(how: str, again: object = None, grad_accum: int = 1) -> Program:
    plan = Plan(activation_offload=how, activation_checkpointing=again, grad_accum=grad_accum)
    return build(toy(layers=LAYERS), plan, 2)


class Watched(nn.Module):
    """A block that writes down when it computes."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen, self.linear = name, seen, nn.Linear(8, 8)
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"{'RECOMPUTE' if self.again else 'FWD'} {self.name}")
        self.again = True
        return torch.tanh(self.linear(x))


def in_torch() -> list[str]:
    """Checkpointed blocks under hooks on saved tensors: what goes out and comes back, by whose output it is."""
    seen: list[str] = []
    names = ["embed", *(f"layers.{n}" for n in range(LAYERS))]
    blocks = [Watched(name, seen) for name in names]
    made: dict[int, str] = {}

    def pack(tensor: torch.Tensor) -> Any:
        name = made.get(tensor.data_ptr(), "")
        if name:
            seen.append(f"out {name}")
        return tensor.clone(), name

    def unpack(packed: Any) -> torch.Tensor:
        tensor, name = packed
        if name:
            seen.append(f"back {name}")
        return tensor

    x = blocks[0](torch.randn(2, 8, requires_grad=True))
    kept = [x]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for before, block in pairwise(blocks):
            made[x.data_ptr()] = before.name
            x = checkpoint(block, x, use_reentrant=False)
            kept.append(x)
    x.sum().backward()
    return seen


def test_checkpoints_go_and_come_back_where_autograd_saves_them_and_asks_for_them() -> None:
    """All but what the last block makes, which the head saves, and the head, which torch's side does not have."""
    words = {Op.ACT_D2H: "out", Op.ACT_H2D: "back", Op.FWD: "FWD", Op.RECOMPUTE: "RECOMPUTE"}
    ours = [f"{words[i.op]} {i.unit}" for i in program("save_on_cpu", "full").ops if i.op in words]
    last = f"layers.{LAYERS - 1}"
    assert [line for line in ours if "head" not in line and line not in (f"out {last}", f"back {last}")] == in_torch()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("again", [None, "full", 2])
def test_what_goes_comes_back_before_its_backward(how: str, again: object) -> None:
    away: set[str] = set()
    before = dict(pairwise(["", "embed", *(f"layers.{n}" for n in range(LAYERS)), "head"]))
    needs = {after: first for first, after in before.items()}
    copied: list[str] = []
    for i in program(how, again, grad_accum=2):
        if i.op is Op.ACT_D2H:
            copied.append(i.unit)
        elif i.kind is Kind.FREE and i.category is Memory.ACTIVATION:
            assert i.unit in copied
            away.add(i.unit)
        elif i.op is Op.ACT_H2D:
            away.remove(i.unit)
        elif i.op in (Op.BWD, Op.RECOMPUTE):
            assert not away & {i.unit, needs[i.unit]}
    assert not away
    assert copied


def test_save_on_cpu_holds_up_the_cpu_and_streams_do_not() -> None:
    blocking, beside = (program(how).instructions for how in HOWS)
    lanes = {i.lane for i in blocking if i.op in (Op.ACT_D2H, Op.ACT_H2D)}
    assert lanes == {Lane.COMPUTE}
    after = [blocking[n + 1] for n, i in enumerate(blocking) if i.op is Op.ACT_D2H]
    assert {(i.kind, i.lane) for i in after} == {(Kind.CPU_SYNC, Lane.COMPUTE)}
    assert not any(i.kind is Kind.CPU_SYNC for i in beside)
    assert {i.lane for i in beside if i.op in (Op.ACT_D2H, Op.ACT_H2D)} == {Lane.OFFLOAD}


def test_with_streams_the_head_keeps_what_it_saves_and_the_last_block_need_not_come_back() -> None:
    ops = program("streams").ops
    out, back = ([i.unit for i in ops if i.op is op] for op in (Op.ACT_D2H, Op.ACT_H2D))
    layers = [f"layers.{n}" for n in range(LAYERS)]
    assert out == ["embed", *layers]
    assert back == ["embed", *layers[:-1]][::-1]


def test_a_copy_back_runs_beside_one_block_of_backward() -> None:
    """It waits for the end of the backward before the one that was issued last."""
    passed: list[str] = []
    ends: dict[int, str] = {}
    awaited = ""
    for i in program("streams"):
        if i.op is Op.BWD:
            passed.append(i.unit)
        elif i.kind is Kind.RECORD and i.lane is Lane.COMPUTE and passed:
            ends.setdefault(i.event, passed[-1])
        elif i.kind is Kind.WAIT and i.lane is Lane.OFFLOAD:
            awaited = ends[i.event]
        elif i.op is Op.ACT_H2D:
            assert awaited == (passed[-2] if len(passed) > 1 else "")
    assert awaited == "layers.2"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("again", [None, "full", "selective"])
def test_what_is_freed_was_alive_and_the_step_ends_with_what_it_began_with(how: str, again: object) -> None:
    plan = Plan(activation_offload=how, activation_checkpointing=again, micro_batch=2, param_dtype="bf16")
    work = workload(replace(Model.preset("gpt2-124m"), n_layer=3, d_model=64, n_head=2, vocab=256, d_ffn=128), plan)
    built = build(work.units, plan, 2)
    assert sum(memory(built, work).changes) == 0
    for of_segments in (work.work, {name: replace(one, tape=None) for name, one in work.work.items()}):
        found, alive = tensors(built, of_segments, None), set[int]()
        for move in chain.from_iterable([*found.before_optimizer, *found.after]):
            if move.bytes:
                assert move.tensor not in alive
                alive.add(move.tensor)
            else:
                alive.remove(move.tensor)
        assert not alive


def test_units_that_run_twice_are_refused() -> None:
    units = toy(layers=2)
    with pytest.raises(ValueError, match=r"activation_offload is 'streams', and unit layers\.0 is there twice"):
        build([units[0], units[1], units[1], *units[2:]], Plan(activation_offload="streams"), 2)
