"""Which units compute again in backward."""

import pytest

from fsdp_sim.schedule import Param, Unit, build, checkpoints, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op
from tests.oracles.verify import verify
from tests.schedule.against_torch import torch_lines
from tests.schedule.fsdp1_torch import recorded


@pytest.mark.parametrize(
    ("setting", "layers"),
    [(None, []), ("full", [0, 1, 2, 3, 4]), ("selective", [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (2, [1, 3]), (9, [])],
)
def test_blocks_that_are_checkpointed(setting, layers):
    plan = Plan(activation_checkpointing=setting)
    assert set(checkpoints(toy(5), plan)) == {f"layers.{i}" for i in layers}
    program = build(toy(5), plan, world_size=4)
    verify(program)
    assert [i.unit for i in program.ops if i.op is Op.RECOMPUTE] == [f"layers.{i}" for i in reversed(layers)]


def test_a_unit_that_computes_nothing_is_no_block():
    units = [*toy(1), Unit("outer", segments=(...,)), Unit("outer.inner")]
    assert set(checkpoints(units, Plan(activation_checkpointing=2))) == {"outer.inner"}


def cut(layers: int, wrapped: range) -> list[Unit]:
    """The toy with only some of its layers as units; the others are blocks of the root."""
    names = [f"layers.{i}" for i in range(layers)]
    first, last = (wrapped.start, wrapped.stop) if wrapped else (layers, layers)
    of_root = ["embed", *names[:first], *names[last:], "head"]
    root = Unit(
        "root", tuple(Param(name, (4, 4)) for name in of_root), ("embed", *names[:first], ..., *names[last:], "head"),
        blocks=tuple(names[:first] + names[last:]),
    )  # fmt: skip
    return [root, *(Unit(name, (Param("weight", (4, 4)),)) for name in names[first:last])]


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1", "ddp", "zero2"])
@pytest.mark.parametrize("wrapped", [range(0), range(4), range(1, 3)])
@pytest.mark.parametrize(("setting", "layers"), [("full", [0, 1, 2, 3]), (2, [1, 3])])
def test_a_block_is_computed_again_wherever_units_are_cut(api, wrapped, setting, layers):
    program = build(cut(4, wrapped), Plan(api=api, activation_checkpointing=setting), world_size=4)

    verify(program)
    assert [i.unit for i in program.ops if i.op is Op.RECOMPUTE] == [f"layers.{i}" for i in reversed(layers)]
    for place, i in enumerate(program.ops):
        if i.op is Op.RECOMPUTE:  # just before its own backward
            computing = [j for j in program.ops[place + 1 :] if j.op in (Op.BWD, Op.RECOMPUTE)]
            assert (computing[0].op, computing[0].unit) == (Op.BWD, i.unit)


@pytest.mark.parametrize("wrapped", [range(0), range(1, 3), range(2)])
@pytest.mark.parametrize("setting", ["full", 2])
def test_torch_computes_blocks_of_the_root_again_in_the_same_place(wrapped, setting):
    plan = Plan(activation_checkpointing=setting)

    assert build(cut(4, wrapped), plan, 2).lines() == torch_lines(cut(4, wrapped), plan, 2)


@pytest.mark.parametrize("wrapped", [range(0), range(1, 3), range(2)])
def test_so_does_fsdp1(wrapped):
    plan = Plan(api="fsdp1", activation_checkpointing="full")

    assert build(cut(4, wrapped), plan, 2).lines() == recorded(cut(4, wrapped), plan, 2)
