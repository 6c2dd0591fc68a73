"""The toy model, cut as a plan says."""

import pytest

from fsdp_sim.schedule import toy, toy_program
from fsdp_sim.spec import Plan


@pytest.mark.parametrize(
    ("layers", "wrap", "units", "segments"),
    [
        (2, "block", ["root", "layers.0", "layers.1"], ("embed", ..., "head")),
        (0, "block", ["root"], ("embed", ..., "head")),
        (2, "root", ["root"], ("embed", "layers.0", "layers.1", "head")),
        (1, 16, ["root", "embed", "layers.0", "head"], (...,)),
        (1, 17, ["root"], ("embed", ..., "layers.0", "head")),
        (2, ("layers.1", "layers.0"), ["root", "layers.0", "layers.1"], ("embed", ..., "head")),
    ],
)
def test_wrap_says_what_is_a_unit(layers, wrap, units, segments):
    found = toy(layers, wrap)
    assert [unit.name for unit in found] == units
    assert found[0].segments == segments
    assert toy_program(layers, 4, 1, Plan(wrap=wrap)).units == tuple(found)


@pytest.mark.parametrize(
    ("layers", "wrap", "message"),
    [
        (-1, "block", "layers is -1; it must be a whole number >= 0"),
        (1, ("layers.7",), "Plan.wrap names 'layers.7', which is no module of the toy; it has embed, layers.0, head"),
        (3, ("layers.0", "layers.2"), "must follow one another"),
    ],
)
def test_what_the_toy_has_not_is_refused(layers, wrap, message):
    with pytest.raises(ValueError, match=message):
        toy(layers, wrap)
