"""Bytes that live through all steps: the ZeRO paper's table."""

import csv
from pathlib import Path

import pytest

from fsdp_sim.engine import model_state_bytes

TABLE = Path(__file__).parent / "data" / "zero_paper_memory.csv"
"""Table 1 of the ZeRO paper (arXiv 1910.02054), recomputed from its formulas 2 + 2 + 12: GB by model and ranks."""
COLUMNS = {"baseline_GB": "ddp", "Pos_GB": "zero1", "Pos_g_GB": "zero2", "Pos_g_p_GB": "fsdp2"}
ROWS = list(csv.DictReader(TABLE.open()))


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
