"""How each way of sharding cuts a unit, and what of it lives through all steps."""

import pytest

from fsdp_sim.schedule import Param, Unit
from fsdp_sim.schedule.shards import unit_shards
from fsdp_sim.schedule.states import state_bytes
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Memory

UNIT = Unit("layers.0", (Param("w", (15, 4)), Param("b", (3,), requires_grad=False)))  # 240 and 12 bytes


@pytest.mark.parametrize(
    ("plan", "ranks", "sharded", "optimizer"),
    [
        (Plan(), 4, 4 * 16 + 4, 2 * 64),  # 4 of 15 rows (16 padded), 1 of 3; the optimizer has none of the frozen b
        (Plan(), 1, 252, 480),
        (Plan(shard_size=2), 4, 8 * 16 + 8, 2 * 128),
        (Plan(optimizer="sgd_momentum"), 4, 68, 64),
        (Plan(optimizer="sgd"), 4, 68, 0),
        (Plan(api="fsdp1"), 4, 63, 120),  # the flat parameter of 63 numbers is cut, not each parameter
        (Plan(api="fsdp1", sharding_strategy="NO_SHARD"), 4, 252, 480),
        (Plan(api="ddp"), 4, 252, 480),
        (Plan(api="zero1"), 4, 252, 120),
        (Plan(api="zero2"), 4, 252, 120),
    ],
)
def test_what_rank_0_keeps_of_a_unit(plan, ranks, sharded, optimizer):
    found = state_bytes([UNIT], plan, ranks)
    assert found[Memory.SHARDED, "layers.0"] == sharded
    assert found.get((Memory.OPTIMIZER, "layers.0"), 0) == optimizer


def test_what_is_offloaded_is_not_on_the_device():
    assert state_bytes([UNIT], Plan(cpu_offload=True), 4) == {}


def test_a_unit_s_parts_are_its_parameters_and_the_first_is_what_rank_0_keeps():
    (shards,) = unit_shards([UNIT], Plan(), 4)
    assert shards.part_bytes == (64 + 4, 64 + 4, 64 + 4, 48)  # of w 4, 4, 4 and 3 rows; of b 1, 1, 1 and none
    assert shards.part_bytes[0] == state_bytes([UNIT], Plan(), 4)[Memory.SHARDED, "layers.0"]


@pytest.mark.parametrize(
    ("plan", "parts", "part_bytes"),
    [
        (Plan(api="fsdp1"), ("0", "1", "2", "3"), (64, 64, 64, 60)),  # 63 numbers in chunks of 16
        (Plan(api="ddp"), ("layers.0",), (240,)),  # what is frozen is in no bucket
        (Plan(api="zero1"), ("0", "1", "2", "3"), (60,) * 4),
    ],
)
def test_every_way_of_sharding_cuts_otherwise(plan, parts, part_bytes):
    (shards,) = unit_shards([UNIT], plan, 4)
    assert (shards.parts, shards.part_bytes) == (parts, part_bytes)
    assert (shards.replicated, shards.optimizer_states) == (plan.api != "fsdp1", 2)
