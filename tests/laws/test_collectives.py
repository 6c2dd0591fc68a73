"""Laws of a collective alone: how long it takes by its size and by its ranks."""

from __future__ import annotations

import itertools

import pytest

from fsdp_sim.cost.collectives import collective_s, family_of
from fsdp_sim.spec import Cluster, gpu_names


@pytest.mark.parametrize("name", gpu_names())
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_collective_of_more_ranks_never_takes_less_time(name, op):
    """In a node, over nodes, and from one to the other; but for what is measured to be faster (see `collectives`)."""
    gpu = Cluster(name, gpus=1)
    size, mesh = gpu.node_size, gpu.intra_link.mesh
    inside = [n for n in (2, 4, 8, 16, 32, 64) if n < size and not mesh]
    ranks = [*inside, *(size * n for n in (1, 2, 4, 8, 16, 32, 64, 256))]
    for n_bytes in (1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10):
        times = [collective_s(op, n_bytes, n, Cluster(name, gpus=n)) for n in ranks]
        for (few, before), (many, after) in itertools.pairwise(zip(ranks, times, strict=True)):
            in_switch = op == "all_reduce" and many <= size and family_of(gpu.intra_link).nvls_fraction
            least = before * ((1 + 1 / many) / (1 + 1 / few) if in_switch else 1)
            assert after >= least * (1 - 1e-12), f"{op} of {n_bytes:g} bytes: {few} ranks {before}, {many} {after}"


def test_an_all_reduce_in_the_switch_gets_as_much_faster_as_published():
    """8 GiB on 4 and on 8 of H200 and B200 (data/nccl_collectives.csv, "default")."""
    for name, few_s, many_s in (("H200", 35.47e-3, 31.77e-3), ("B200", 19.14e-3, 17.94e-3)):
        for ranks, measured_s in ((4, few_s), (8, many_s)):
            assert collective_s("all_reduce", 2**33, ranks, Cluster(name, gpus=ranks)) == pytest.approx(
                measured_s, rel=0.06
            )
