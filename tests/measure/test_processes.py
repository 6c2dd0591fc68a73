"""What runs on GPUs over NCCL runs here on CPU cores over gloo: plain processes, one per rank."""

import pytest

from fsdp_sim.measure.on_rank import Case, CollectiveTime, KernelTime
from fsdp_sim.measure.processes import measure_in_processes

GATHER = Case("all_gather", n_bytes=4096, group_size=2)


def test_each_rank_measures_every_case():
    found = measure_in_processes(2, [Case("matmul", "fp32", (16, 16, 16)), GATHER], 0.01, "cpu")

    assert len(found) == 2
    for kernel, collective in found:
        assert isinstance(kernel, KernelTime)
        assert kernel.flops == 2 * 16**3
        assert isinstance(collective, CollectiveTime)
        assert (collective.group_size, collective.n_bytes) == (2, 4096)
        assert 0 < collective.seconds < 1


def test_a_rank_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"a rank failed: (?s:.*)KeyError: 'all_gatter'"):
        measure_in_processes(1, [GATHER._replace(kind="all_gatter", group_size=1)], 0.01, "cpu")
