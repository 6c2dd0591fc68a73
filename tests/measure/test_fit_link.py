"""`fit_link` finds known links again."""

import dataclasses

import numpy as np
import pytest

from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.measure.fit_link import fit_link
from fsdp_sim.measure.on_rank import CollectiveTime
from fsdp_sim.spec import Cluster, Gpu, Link, gpu, link

CORE, H100 = gpu("cpu"), gpu("H100")
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def times(truth: Link, part: Gpu, ops: tuple[str, ...] = OPS, noise: float = 0.0) -> list[CollectiveTime]:
    """What collectives over that link take, each up to ``noise`` more or less."""
    random = np.random.default_rng(0)
    found = []
    for op in ops:
        for n in (2, 4, 8):
            for n_bytes in (2**12, 2**16, 2**20, 2**24, 2**28):
                seconds = collective_s(op, n_bytes, n, Cluster(part, gpus=n, intra=truth))
                found.append(CollectiveTime(op, n, n_bytes, seconds * (1 + random.uniform(-noise, noise))))
    return found


TRUTH = Link(
    "gloo", 3e9, "gloo", kind="intra", base_s=2e-4, hop_s=5e-5, fill_s=3e-5,
    reduce_scatter_fraction=0.5, all_reduce_fraction=0.8,
)  # fmt: skip


def assert_same_link(found: Link, truth: Link, within: float) -> None:
    for name in ("bytes_per_s", "base_s", "hop_s", "fill_s", "reduce_scatter_fraction", "all_reduce_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=within), name


def test_a_link_between_processes_is_found_again():
    assert_same_link(fit_link(times(TRUTH, CORE), link("gloo"), CORE), TRUTH, within=0.01)


def test_it_is_found_roughly_where_the_times_are_noisy():
    found = fit_link(times(TRUTH, CORE, noise=0.1), link("gloo"), CORE)
    for op in OPS:
        for size in (2**16, 2**22):
            a, b = (collective_s(op, size, 4, Cluster(CORE, gpus=4, intra=one)) for one in (found, TRUTH))
            assert a == pytest.approx(b, rel=0.1)


def test_a_link_between_gpus_keeps_its_datasheet_and_gets_a_fraction_of_it():
    truth = dataclasses.replace(link("NVLink4"), fraction=0.7, base_s=2e-5, hop_s=3e-6, fill_s=1e-6)
    found = fit_link(times(truth, H100, ("all_gather", "reduce_scatter")), link("NVLink4"), H100)

    assert (found.bytes_per_s, found.fraction) == (450e9, pytest.approx(0.7, rel=0.01))
    assert (found.base_s, found.hop_s) == (pytest.approx(2e-5, rel=0.01), pytest.approx(3e-6, rel=0.01))
    assert collective_s("all_reduce", 1e9, 8, Cluster(H100, gpus=8, intra=found)) < 2 * collective_s(
        "all_gather", 1e9, 8, Cluster(H100, gpus=8, intra=found)
    )  # the switch still reduces


def test_times_that_do_not_grow_with_the_messages_are_refused():
    with pytest.raises(ValueError, match="the measured times fit no link"):
        fit_link([CollectiveTime("all_gather", 2, 2**k, 1.0 / 2**k) for k in range(10, 24)], link("NVLink4"), H100)
