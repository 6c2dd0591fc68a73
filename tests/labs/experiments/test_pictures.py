"""Pictures of what a lab found say their numbers in words and tables too."""

import pytest

from labs.experiments.pictures import bars
from labs.experiments.result import ResultRow

ROWS = [
    ResultRow("ddp", "peak memory", 26.8, 26.9, "MiB"),
    ResultRow("ddp", "collectives", 2.0, 2.0, ""),
    ResultRow("fsdp2", "peak memory", 18.7, None, "MiB"),
]


def test_bars_are_those_of_one_quantity():
    picture = bars(ROWS, "peak memory", "FSDP2 needs less")
    predicted, measured = picture.figure.data
    assert (list(predicted.y), list(predicted.x)) == (["ddp", "fsdp2"], [26.8, 18.7])
    assert list(measured.x) == [26.9, None]
    assert picture.finding == "FSDP2 needs less. The predictions are within 1%."
    assert [row[0] for row in picture.tables[0].rows] == ["ddp", "fsdp2"]


def test_a_quantity_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no row is about 'peak'; there are peak memory, collectives"):
        bars(ROWS, "peak", "")
