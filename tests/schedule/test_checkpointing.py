"""Which units compute again in backward."""

import pytest

from fsdp_sim.schedule import Unit, build, checkpointed_units, toy, verify
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op


@pytest.mark.parametrize(
    ("setting", "layers"),
    [(None, []), ("full", [0, 1, 2, 3, 4]), ("selective", [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (2, [1, 3]), (9, [])],
)
def test_blocks_that_are_checkpointed(setting, layers):
    plan = Plan(activation_checkpointing=setting)
    assert checkpointed_units(toy(5), plan) == {f"layers.{i}" for i in layers}
    program = build(toy(5), plan, world_size=4)
    verify(program)
    assert [i.unit for i in program.ops if i.op is Op.RECOMPUTE] == [f"layers.{i}" for i in reversed(layers)]


def test_a_unit_that_computes_nothing_is_no_block():
    units = [*toy(1), Unit("outer", segments=(...,)), Unit("outer.inner")]
    assert checkpointed_units(units, Plan(activation_checkpointing=2)) == {"outer.inner"}
