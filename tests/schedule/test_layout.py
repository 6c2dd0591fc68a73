"""Bytes and dtypes of a unit, and how a sum of gradients becomes a mean."""

import pytest

from fsdp_sim.schedule import Param, Unit
from fsdp_sim.schedule.layout import division_of, layout_of
from fsdp_sim.schedule.mesh import Mesh
from fsdp_sim.spec import Plan


def layout(params, plan=None, shards=4, replicas=1):
    return layout_of(Unit("unit", tuple(params)), plan or Plan(), Mesh(shards, replicas, shards))


def test_whole_parameters_are_padded_to_equal_shards_and_gradients_are_not():
    found = layout([Param("a", (5, 3)), Param("b", (8,), requires_grad=False)])
    assert found.param_bytes == (8 * 3 * 4, 8 * 4)
    assert found.shard_bytes == (2 * 3 * 4, 2 * 4)
    assert found.gather_bytes == 8 * 3 * 4 + 8 * 4
    assert (found.trained, found.grad_bytes, found.reduce_bytes) == ((0,), ((0, 5 * 3 * 4),), 8 * 3 * 4)


def test_parameters_of_several_dtypes_are_gathered_as_bytes_unless_they_are_cast():
    params = [Param("a", (4,)), Param("b", (4,), "bf16", requires_grad=False)]
    assert layout(params).gather_dtype == "uint8"
    cast = layout(params, Plan(param_dtype="bf16"))
    assert (cast.gather_dtype, cast.cast, cast.casts) == ("bf16", (True, False), True)


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "grad", "upcast", "reduced"),
    [
        (None, None, "fp32", None, "fp32"),
        ("bf16", None, "bf16", None, "bf16"),
        ("bf16", "fp32", "bf16", "fp32", "fp32"),
        ("bf16", "bf16", "bf16", None, "bf16"),
        (None, "bf16", "fp32", "bf16", "bf16"),
        ("fp32", "fp32", "fp32", None, "fp32"),
    ],
)
def test_gradients_are_computed_in_one_dtype_and_reduced_in_another(param_dtype, reduce_dtype, grad, upcast, reduced):
    found = layout([Param("a", (4,))], Plan(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    assert (found.grad_dtype, found.upcast_dtype, found.reduce_dtype) == (grad, upcast, reduced)
    assert found.orig_dtype == "fp32"


@pytest.mark.parametrize(
    ("dtype", "factor", "shards", "replicas", "before", "after", "op"),
    [
        ("fp32", None, 8, 1, None, None, "AVG"),
        ("bf16", None, 4, 2, None, None, "AVG"),
        ("fp32", None, 1, 1, None, None, "SUM"),
        ("fp32", 8.0, 8, 1, None, None, "AVG"),
        ("fp32", 8.0, 4, 2, None, None, "PREMUL_SUM(0.125)"),
        ("fp16", None, 8, 1, 4, 2, "SUM"),
        ("fp16", None, 4, 4, 4, 4, "SUM"),
        ("fp16", None, 2, 1, 2, 1, "SUM"),
        ("fp16", None, 3, 1, 2, 1.5, "SUM"),  # torch's rule: the first power of two that is no factor, or large enough
        ("fp16", 6.0, 8, 1, 4, 1.5, "SUM"),
    ],
)
def test_division(dtype, factor, shards, replicas, before, after, op):
    found = division_of(dtype, factor, shards, replicas)
    assert (found.before, found.after, found.reduce_scatter_op) == (before, after, op)
    if before is not None:
        assert found.before * found.after == (factor or shards * replicas)
