"""Numbers are read as people write them, by every reader of quantities."""

import pytest

from fsdp_sim.learn.drill.numbers import number_in
from fsdp_sim.learn.numerals import in_digits
from fsdp_sim.learn.quantity import in_unit

WRITTEN = [
    ("13,5 GB", "bytes", 13.5e9),
    ("0,003 s", "s", 0.003),
    ("13 000 MB", "bytes", 13e9),
    ("13'000 MB", "bytes", 13e9),
    ("13,000 MB", "bytes", 13e9),
    ("1.3 x 10^10 bytes", "bytes", 13e9),
    ("1.3 \u00d7 10\u00b9\u2070 bytes", "bytes", 13e9),
    ("13 billion bytes", "bytes", 13e9),
    ("13 G", "bytes", 13e9),
    ("13 GB-ish", "bytes", 13e9),
    ("**13 GB**", "bytes", 13e9),
    ("13 GB/GPU", "bytes", 13e9),
    ("13 giga bytes", "bytes", 13e9),
    ("104 Gbit", "bytes", 13e9),
    ("thirteen gigabytes", "bytes", 13e9),
    ("twenty-six GB", "bytes", 26e9),
    ("two hundred and four megabytes", "bytes", 204e6),
    ("fifteen hundred MB", "bytes", 1.5e9),
    ("13 and a half GB", "bytes", 13.5e9),
    ("half a gigabyte", "bytes", 5e8),
    ("an hour and a half", "s", 5400),
    ("2 min 30 s", "s", 150),
    ("3 milli seconds", "s", 0.003),
    ("forty percent", "%", 40),
    ("45 GBps", "bytes/s", 45e9),
    ("360 Gb/s", "bytes/s", 45e9),
    ("360 Gbps", "bytes/s", 45e9),
    ("500 teraflops", "FLOP/s", 5e14),
    ("thirty-eight", "collectives", 38),
]


@pytest.mark.parametrize(("typed", "unit", "value"), WRITTEN)
def test_a_number_is_read_as_it_is_written(typed: str, unit: str, value: float) -> None:
    assert in_unit(typed, unit) == pytest.approx(value)
    assert number_in(typed, unit)[0] == pytest.approx(value)


@pytest.mark.parametrize(
    "typed", ["8,192 tokens on one GPU", "the two of them", "1,2,3", "ranks 2 and 3", "5e-05 s", "a/b"]
)
def test_what_is_written_in_digits_or_counts_things_stays(typed: str) -> None:
    assert in_digits(typed) == typed


@pytest.mark.parametrize("typed", ["208 GB / 16", "2*19", "19 + 19 GB", "13 times 2"])
def test_a_sum_without_its_result_is_asked_for_it(typed: str) -> None:
    with pytest.raises(ValueError, match="what that comes to"):
        number_in(typed, "bytes")
