"""Which dtype where, and who divides: the same choices as torch, for every combination."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from fsdp_sim.mini.precision import gradient_division

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def of_size(n):
    return SimpleNamespace(size=lambda: n)


@given(
    n_shards=st.integers(1, 1024),
    n_replicas=st.integers(1, 64),
    dtype=st.sampled_from(DTYPES),
    factor=st.none() | st.floats(1.0, 4096.0) | st.integers(1, 4096).map(float),
    force_sum=st.booleans(),
)
def test_division_is_torchs(n_shards, n_replicas, dtype, factor, force_sum):
    ours = gradient_division(n_shards, n_replicas, dtype, factor, force_sum, has_premul_sum=True)
    replicas = of_size(n_replicas) if n_replicas > 1 else None
    theirs = _fsdp_collectives._get_gradient_divide_factors(
        of_size(n_shards), replicas, dtype, "cuda", factor, force_sum
    )
    if n_shards == 1 and factor not in (None, 1) and dtype in (FP32, BF16) and not force_sum:
        assert ours.before == factor, "nothing is scattered, so no collective can divide: torch divides the copy"
    else:
        assert (ours.before, ours.after) == theirs[:2]
        assert ours.reduce_scatter_op == theirs[2]
    assert ours.all_reduce_op == theirs[3]


@given(n=st.integers(2, 4096), dtype=st.sampled_from(DTYPES), factor=st.none() | st.floats(1.0, 4096.0))
def test_a_sum_is_divided_by_the_factor_in_all(n, dtype, factor):
    """Also where the backend cannot multiply before it sums (gloo)."""
    division = gradient_division(n, 1, dtype, factor, force_sum=False, has_premul_sum=False)
    by_op = n if division.reduce_scatter_op == torch.distributed.ReduceOp.AVG else 1
    assert (division.before or 1) * (division.after or 1) * by_op == pytest.approx(factor or n)
