"""Pictures of a lesson say what they draw: where a line begins, and where a number stands."""

from fsdp_sim.learn.pictures.migration import knobs
from fsdp_sim.learn.pictures.numerics import losses


def test_losses_begin_where_they_began():
    picture = losses({"whole": (0, [3.0, 2.0, 1.0]), "resumed": (1, [2.0, 1.0])}, "The same")
    whole, resumed = picture.figure.data
    assert (whole.mode, list(whole.x)) == ("lines", [0, 1, 2])
    assert (resumed.mode, list(resumed.x)) == ("markers", [1, 2])
    assert picture.tables[0].rows == (("0", "3.0000", ""), ("1", "2.0000", "2.0000"), ("2", "1.0000", "1.0000"))


def test_a_number_stands_beside_the_dashed_line_and_not_across_it():
    picture = knobs({"start": (100, 10), "a bit less": (96, 3), "more": (120, 20)}, "See", base="start", limit_gib=30)
    ms, gib = (trace for trace in picture.figure.data if trace.type == "scatter")
    assert list(ms.x) == [100, 100, 120]
    assert list(gib.x) == [10, 3, 20]
