"""Bytes that live through all steps: the ZeRO paper's table, and how each way of sharding cuts a unit."""

import csv
from pathlib import Path

import pytest

from fsdp_sim.engine import model_state_bytes, state_bytes
from fsdp_sim.schedule import Param, Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Memory

TABLE = Path(__file__).parent / "data" / "zero_paper_memory.csv"
"""Table 1 of the ZeRO paper (arXiv 1910.02054), recomputed from its formulas 2 + 2 + 12: GB by model and ranks."""
COLUMNS = {"baseline_GB": "ddp", "Pos_GB": "zero1", "Pos_g_GB": "zero2", "Pos_g_p_GB": "fsdp2"}
ROWS = list(csv.DictReader(TABLE.open()))

UNIT = Unit("layers.0", (Param("w", (15, 4)), Param("b", (3,), requires_grad=False)))  # 240 and 12 bytes


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['model']}-{row['Nd']}" for row in ROWS])
def test_the_table_of_the_zero_paper_to_the_last_printed_digit(row):
    for column, api in COLUMNS.items():
        gigabytes = model_state_bytes(float(row["params"]), int(row["Nd"]), api) / 1e9
        assert gigabytes == pytest.approx(float(row[column]), abs=0.00501)


def test_the_table_is_there():
    assert len(ROWS) == 18


def test_torch_splits_the_same_sum_otherwise():
    torch_s = model_state_bytes(1e9, 8, "fsdp2", param_bytes=4, grad_bytes=4, optimizer_bytes=8)
    assert torch_s == model_state_bytes(1e9, 8, "fsdp2")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"api": "zero3"}, "api is 'zero3'; it must be one of ddp, zero1, zero2, fsdp1, fsdp2"),
        ({"shards": 0}, "shards is 0; it must be a whole number >= 1"),
        ({"params": -1}, "params is -1; it must be >= 0"),
    ],
)
def test_wrong_numbers_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        model_state_bytes(**{"params": 1e9, "shards": 8} | change)


def test_a_shard_size_that_does_not_divide_the_ranks_is_named():
    with pytest.raises(ValueError, match=r"shard_size is 3, which does not divide the world size 8"):
        state_bytes([UNIT], Plan(shard_size=3), 8)
