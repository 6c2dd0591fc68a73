"""How long collectives take: limits that hold for any cluster, and published measurements."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost.collectives import OPS, collective_s, family_of, fitted_links, offload_s
from fsdp_sim.ranks.network import Network
from fsdp_sim.spec import Cluster, Link, gpu_names, link, link_names
from tests.bench.bench_collectives import measurements, predict

GIB = 2**30


@st.composite
def asked(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    """A cluster of any GPU, and a group on it: size and stride."""
    name = draw(st.sampled_from(gpu_names()))
    nodes, per_node = draw(st.sampled_from([1, 2, 3, 8, 64])), draw(st.sampled_from([1, 2, 4, 8]))
    cluster = Cluster(name, gpus=nodes * per_node, gpus_per_node=per_node)
    stride = draw(st.sampled_from([s for s in (1, 2, per_node) if cluster.gpus % s == 0]))
    divisors = [n for n in range(1, cluster.gpus // stride + 1) if cluster.gpus // stride % n == 0]
    return cluster, draw(st.sampled_from(divisors)), stride


SIZES = st.integers(0, 40 * GIB)


@given(asked(), st.sampled_from(OPS), SIZES, SIZES)
def test_more_bytes_never_take_less_time(group, op, a, b):
    cluster, n, stride = group
    less, more = (collective_s(op, size, n, cluster, stride=stride) for size in sorted((a, b)))
    assert less <= more


@given(asked(), st.sampled_from(OPS), st.integers(1, 40 * GIB))
def test_time_is_continuous_in_bytes(group, op, size):
    cluster, n, stride = group
    here, next_ = (collective_s(op, s, n, cluster, stride=stride) for s in (size, size * (1 + 1e-9)))
    assert next_ == pytest.approx(here, rel=1e-6)


@given(asked(), st.integers(0, 40 * GIB))
def test_no_rank_sends_faster_than_its_link(group, size):
    cluster, n, stride = group
    nodes, local = cluster.spans(n, stride)
    sent = size * (n - 1) / n
    for op, turns in (("all_gather", 1), ("reduce_scatter", 1)):
        seconds = collective_s(op, size, n, cluster, stride=stride)
        if local > 1:
            assert seconds * cluster.intra_link.bytes_per_s >= turns * sent
        if nodes > 1:  # what leaves a node shares the links of the ranks it holds
            assert seconds * cluster.inter_link.bytes_per_s * local >= turns * sent


@given(asked(), st.integers(0, 40 * GIB))
def test_an_all_reduce_takes_at_most_a_reduce_scatter_and_an_all_gather(group, size):
    cluster, n, stride = group
    scatter, gather, both = (
        collective_s(op, size, n, cluster, stride=stride) for op in ("reduce_scatter", "all_gather", "all_reduce")
    )
    assert both <= (scatter + gather) * (1 + 1e-12)
    assert scatter == gather


@given(asked(), st.sampled_from(OPS), SIZES)
def test_a_group_of_one_takes_no_time(group, op, size):
    cluster, _, stride = group
    assert collective_s(op, size, 1, cluster, stride=stride) == 0


def test_eight_replica_groups_share_the_adapters_that_one_shard_group_has_alone():
    cluster = Cluster("H100", gpus=64)
    of_all = collective_s("all_reduce", 8 * GIB, 64, cluster)
    eighth = collective_s("all_reduce", GIB, 8, cluster, stride=8)  # eight of these run at once
    assert eighth == pytest.approx(of_all, rel=0.2)


def test_on_cpu_cores_it_is_alpha_and_bytes_over_bandwidth_as_the_slow_network_does_it():
    cluster, network = Cluster("cpu", gpus=4, bandwidth_gbps=0.8, latency_us=150), Network(0.8, 150)
    for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        for n in (1, 2, 4):
            assert collective_s(op, 3_000_000, n, cluster) == pytest.approx(network.seconds(op, 3_000_000, n))


def test_two_ranks_are_further_from_the_rate_of_their_link_than_eight():
    """aiconfigurator: 258 GB/s of 450 with two H100, 335 with eight."""
    cluster = Cluster("H100", gpus=8)
    busbw = [8e9 * (n - 1) / n / collective_s("all_gather", 8e9, n, cluster) for n in (2, 4, 8)]
    assert busbw == sorted(busbw)
    assert busbw[0] / busbw[2] == pytest.approx(258 / 335, rel=0.05)


def test_a_measured_link_speaks_for_itself():
    measured = Link("mine", 1e9, "gloo", kind="intra", base_s=1e-3, hop_s=1e-4, reduce_scatter_fraction=0.5)
    cluster = Cluster("cpu", gpus=4, intra=measured)
    assert collective_s("all_gather", 4e6, 4, cluster) == pytest.approx(1e-3 + 3e-4 + 3e6 / 1e9)
    assert collective_s("reduce_scatter", 4e6, 4, cluster) == pytest.approx(1e-3 + 3e-4 + 6e6 / 1e9)


def test_a_bridge_joins_pairs_and_larger_rings_pass_pcie():
    bridged, plain = Cluster("RTX-3090", gpus=4, intra="NVLink3 bridge"), Cluster("RTX-3090", gpus=4)
    assert collective_s("all_gather", GIB, 2, bridged) < 0.5 * collective_s("all_gather", GIB, 2, plain)
    assert collective_s("all_gather", GIB, 4, bridged) == collective_s("all_gather", GIB, 4, plain)


def test_two_of_eight_gpus_of_a_mesh_have_one_of_seven_shares():
    cluster = Cluster("MI300X", gpus=8)
    busbw = [8e9 * (n - 1) / n / collective_s("all_gather", 8e9, n, cluster) for n in (2, 8)]
    assert busbw == [pytest.approx(47.7e9, rel=0.07), pytest.approx(312.9e9, rel=0.02)]  # stas00/ml-engineering


@pytest.mark.parametrize(
    ("op", "name", "gpus", "n_bytes", "seconds", "off"),
    [  # rows of the catalogue of measurements, and how far off the prediction may be
        ("all_gather", "H200", 8, 2**26, 186.8e-6, 0.1),  # MIT ORCD
        ("all_gather", "H200", 8, 2**30, 2577.7e-6, 0.05),
        ("reduce_scatter", "H200", 8, 2**28, 704.2e-6, 0.05),
        ("all_reduce", "H100", 8, 2**33, 31.39e-3, 0.03),  # Azure, reduced in the switch
        ("all_reduce", "A100", 8, 2**30, 8237.8e-6, 0.05),
        ("reduce_scatter", "H100", 256, 2**33, 28.5e-3, 0.1),  # NVIDIA/nccl issue 1229
        ("all_gather", "H100", 256, 2**31, 10.7e-3, 0.25),  # NVIDIA/nccl issue 1218
        ("all_reduce", "H100", 64, 2**32, 22.2e-3, 0.05),  # coreweave/nccl-tests
        ("all_gather", "H100", 2, 2**28, 549.2e-6, 0.1),  # aiconfigurator
        ("reduce_scatter", "B200", 4, 2**26, 107.6e-6, 0.1),
        ("all_gather", "RTX-PRO-6000", 8, 2**29, 20404.8e-6, 0.15),
    ],
)
def test_published_measurements_are_met(op, name, gpus, n_bytes, seconds, off):
    assert collective_s(op, n_bytes, gpus, Cluster(name, gpus=gpus)) == pytest.approx(seconds, rel=off)


def test_half_of_all_published_measurements_are_within_8_percent_and_of_large_messages_within_5():
    rows = measurements()
    errors = abs(predict(rows, fitted_links()) / [row.seconds for row in rows] - 1)
    assert len(rows) == 848
    assert statistics.median(errors) < 0.08
    assert statistics.median(e for e, row in zip(errors, rows, strict=True) if row.n_bytes >= 2**26) < 0.05


@pytest.mark.parametrize(
    ("op", "n_bytes", "n", "words"),
    [
        ("all_gatter", 1, 8, "there is no collective 'all_gatter'; there are all_gather"),
        ("all_gather", -1, 8, "all_gather of -1 bytes: a message has 0 bytes or more"),
        ("all_gather", 1, 3, "groups of 3 ranks, 1 apart, do not fill 8 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(op, n_bytes, n, words):
    with pytest.raises(ValueError, match=words):
        collective_s(op, n_bytes, n, Cluster("H100", gpus=8))


def test_every_link_of_the_catalogue_is_of_a_known_family():
    for name in link_names():
        assert 0 < family_of(link(name)).fraction <= 1, name


def test_a_link_of_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="the link odd is of family 'magic'; known are nvlink2"):
        collective_s("all_gather", 1, 8, Cluster("H100", gpus=8, intra=Link("odd", 1e9, "magic", kind="intra")))


def test_offload_passes_the_link_to_the_cpu():
    assert 1e9 / offload_s(1e9, Cluster("H100", gpus=8)) == pytest.approx(52e9, rel=0.02)  # nvbandwidth, Azure
    assert offload_s(1e9, Cluster("GH200", gpus=1)) < 0.2 * offload_s(1e9, Cluster("H100", gpus=1))
    assert offload_s(1e9, Cluster("cpu", gpus=4)) == 0
    assert offload_s(0, Cluster("H100", gpus=8)) == 0


def test_copies_of_the_gpus_of_a_node_share_the_memory_of_its_cpus():
    alone, shared = (offload_s(1e9, Cluster("H100", gpus=n, host_memory_gb_per_s=80)) for n in (1, 8))
    assert alone == offload_s(1e9, Cluster("H100", gpus=8))
    assert 1e9 / shared == pytest.approx(10e9, rel=0.01)
