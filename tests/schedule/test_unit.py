"""Units know their bytes, and which segment uses which parameter."""

import pytest

from fsdp_sim.schedule import Param, Unit


def test_shards_are_padded_to_equal_rows():
    param = Param("w", (15, 4))
    assert param.bytes == 15 * 4 * 4
    assert param.padded_bytes(world_size=1) == 15 * 4 * 4
    assert param.padded_bytes(world_size=2) == 16 * 4 * 4
    assert param.padded_bytes(world_size=32) == 32 * 4 * 4  # 17 ranks hold no row
    assert Param("w", (15, 4), "bf16").padded_bytes(world_size=2) == 16 * 4 * 2


def test_parameters_belong_to_the_segment_they_are_named_after():
    params = (Param("embed.weight", (4, 4)), Param("head.weight", (4, 4), requires_grad=False), Param("scale", (1,)))
    root = Unit("root", params, segments=("embed", ..., "norm", "head"))
    assert [p.name for p in root.params_of("embed")] == ["embed.weight", "scale"]  # named after none: first
    assert [p.name for p in root.params_of("head")] == ["head.weight"]
    assert (root.trains("embed"), root.trains("norm"), root.trains("head")) == (True, False, False)
    assert root.before_children() == ("embed",)
    assert root.after_children() == ("norm", "head")


def test_a_tied_parameter_belongs_to_every_segment_that_uses_it():
    tied = Param("weight", (4, 4), used_by=("head", "embed"))
    root = Unit("root", (tied, Param("head.bias", (4,))), segments=("embed", ..., "head"))
    assert root.segments_of(tied) == ("embed", "head")
    assert root.params_of("embed") == (tied,)
    assert [p.name for p in root.params_of("head")] == ["weight", "head.bias"]


def test_a_layer_is_one_segment_of_its_own_name():
    layer = Unit("layers.0", (Param("weight", (4, 4)),))
    assert layer.segments == ("layers.0",)
    assert not layer.is_root
    assert layer.before_children() == ("layers.0",)
    assert layer.after_children() == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Param("w", ()), r"Param\.shape is \(\); it must be .*scalar"),
        (lambda: Param("w", (0, 4)), r"Param\.shape is \(0, 4\); it must be .*whole number >= 1"),
        (lambda: Param("w", (4,), "int3"), r"Param\.dtype is 'int3'; it must be 'fp32', 'bf16', 'fp16' or 'fp64'"),
        (lambda: Unit("u", (Param("w", (4,)), Param("w", (4,)))), "unit u names the parameter 'w' twice"),
        (lambda: Unit("u", (Param("w", (4,), used_by=("b",)),), ("a",)), "'w' of unit u is used_by 'b', which is"),
        (lambda: Unit("u", segments=("a", "a")), "unit u names the segment 'a' twice"),
        (lambda: Unit("u", (Param("w", (4,)),), segments=(...,)), "unit u has 1 parameters and no segment"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
