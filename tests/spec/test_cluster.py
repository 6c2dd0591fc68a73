"""A cluster is GPUs in nodes and the links between them, in SI units inside; it goes to a file and back."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_sim.spec import Cluster, Gpu, Link, gpu, gpu_names


def test_a_gpus_name_gives_its_server_and_its_links():
    cluster = Cluster("H100", gpus=64)

    assert (cluster.kind, cluster.nodes, cluster.node_size) == ("gpu", 8, 8)
    assert cluster.gpu == gpu("H100-SXM-80GB")
    links = (cluster.intra_link, cluster.inter_link, cluster.host_link)
    assert [link.name for link in links] == ["NVLink4", "IB NDR x8", "PCIe5"]
    assert cluster.bandwidth_bytes_per_s == 50e9
    assert Cluster("H100", gpus=8).bandwidth_bytes_per_s == 450e9


def test_processes_on_cpu_cores_have_one_link():
    laptop = Cluster("cpu", gpus=4, bandwidth_gbps=4, latency_us=200)

    assert (laptop.kind, laptop.nodes) == ("cpu", 1)
    assert laptop.bandwidth_bytes_per_s == 500e6
    assert laptop.latency_s == pytest.approx(200e-6)


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_of_the_catalogue_makes_clusters_of_one_to_many_nodes(name):
    size = gpu(name).gpus_per_node
    assert Cluster(name, gpus=1).nodes == 1
    assert Cluster(name, gpus=16 * size).nodes == 16


def test_a_server_may_be_part_full_when_it_is_the_only_one():
    assert Cluster("H100", gpus=3).nodes == 1
    assert replace(Cluster("H100", gpus=2), gpus=16).nodes == 2  # a server still holds 8


@pytest.mark.parametrize(
    ("inter", "bytes_per_s", "family"),
    [
        ("ib ndr X8", 50e9, "infiniband"),
        ("1600 Gb/s RoCE per node", 25e9, "roce"),
        ("400 Gb/s per node (GDR)", 6.25e9, "infiniband"),
        ("800 Gb/s per node", 12.5e9, "infiniband"),
        ("400 Gb/s RDMA per GPU", 50e9, "infiniband"),
        ("8x400Gb/s", 50e9, "infiniband"),
        ("2 x 200 Gb/s per GPU, RoCE", 50e9, "roce"),
        ("100GbE per node", 1.5625e9, "ethernet"),
        ("10GbE", 0.15625e9, "ethernet"),
        ("RoCE 400", 50e9, "roce"),
        ("400G InfiniBand", 50e9, "infiniband"),
        ("NDR400", 50e9, "infiniband"),
        ("EFAv3", 50e9, "efa"),
        ("GCP TCPX", 12.5e9, "tcpx"),
        ("3.2 Tbps EFA per node", 50e9, "efa"),
        ("100 GB/s per node", 12.5e9, "infiniband"),
    ],
)
def test_the_link_between_nodes_is_a_name_or_a_rate_in_words(inter, bytes_per_s, family):
    link = Cluster("H100", gpus=16, inter=inter).inter_link
    assert (link.bytes_per_s, link.family) == (pytest.approx(bytes_per_s), family)


def test_bandwidth_and_latency_replace_those_of_the_link_between_nodes_alone():
    cluster = Cluster("A100", gpus=16, bandwidth_gbps=100, latency_us=7)

    assert cluster.inter_link.bytes_per_s == 12.5e9
    assert cluster.latency_s == pytest.approx(7e-6)
    assert cluster.intra_link == Cluster("A100", gpus=16).intra_link


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpus": 0}, r"Cluster\.gpus is 0; it must be a whole number >= 1 \(the world size\)"),
        ({"gpus": 12}, r"Cluster\.gpus is 12, .* nodes of 8 GPUs; take 8 or 16, or gpus_per_node=6"),
        ({"gpus_per_node": 0}, r"Cluster\.gpus_per_node is 0; it must be None or a whole number >= 1"),
        ({"gpu": "H10O"}, r"no GPU is called 'H10O'; the nearest names are H100-SXM-80GB"),
        ({"gpu": 7}, r"Cluster\.gpu is 7; it must be the name of a GPU"),
        ({"bandwidth_gbps": 0}, r"Cluster\.bandwidth_gbps is 0; .* a number > 0 \(gigabits per second\)"),
        ({"bandwidth_gbps": float("nan")}, r"Cluster\.bandwidth_gbps is nan"),
        ({"latency_us": -1}, r"Cluster\.latency_us is -1; it must be None or a number >= 0"),
        (
            {"inter": "IB NRD x8"},
            r"no link is called 'IB NRD x8'; the nearest names are IB NDR x8.*'1600 Gb/s per node'",
        ),
        ({"inter": "400 Gb/s"}, r"'400 Gb/s' does not say whose rate that is; add 'per node' or 'per GPU'"),
        ({"inter": "400"}, r"says neither its unit nor whose it is: '400 Gb/s per GPU', .*IB NDR x8 \(400\)"),
        ({"inter": 400}, r"Cluster\.inter is 400; .* neither its unit nor whose it is"),
        ({"intra": "900 GB/s"}, r"its rate counts one direction, half of what NVIDIA says .* NVLink4 \(450\)"),
        ({"inter": "0 Gb/s per GPU"}, r"Link\.bytes_per_s is 0\.0; it must be a number > 0"),
        ({"inter": "1,600 Gb/s per node"}, r"'1,600 Gb/s per node' is not understood at '1,'; write its rate as"),
        ({"inter": "400 Gb/s + 100 Gb/s per GPU"}, r"is not understood at '\+'"),
        ({"inter": "about 400 Gb/s per GPU"}, r"is not understood at 'about'"),
        ({"inter": "400 Gb/s per GPU per node"}, r"says both per node and per GPU"),
        ({"inter": "400 Gb/s RoCE EFA per GPU"}, r"is said to be efa and roce"),
        ({"inter": "RoCE"}, r"the link 'RoCE' says no rate; write it as '1600 Gb/s per node'"),
        ({"intra": "NVLink9"}, r"no link is called 'NVLink9'"),
        ({"inter": ""}, r"Cluster\.inter is ''"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(wrong, message):
    with pytest.raises(ValueError, match=message):
        Cluster(**{"gpu": "H100", "gpus": 16} | wrong)


@pytest.mark.parametrize(
    ("group_size", "stride", "nodes", "per_node"),
    [
        (64, 1, 8, 8),  # everyone
        (8, 1, 1, 8),  # a node
        (4, 1, 1, 4),  # half of one
        (16, 1, 2, 8),  # a shard group of two nodes
        (8, 8, 8, 1),  # replicas of shards a node apart
        (4, 16, 4, 1),  # of shards two nodes apart
        (16, 4, 8, 2),  # of shards half a node apart
        (2, 4, 1, 2),  # both in one node
    ],
)
def test_where_shard_groups_and_replicate_groups_lie(group_size, stride, nodes, per_node):
    assert Cluster("H100", gpus=64).spans(group_size, stride) == (nodes, per_node)


def test_of_groups_that_lie_differently_the_most_spread_counts():
    # Groups of 6 on nodes of 8: ranks 0 to 5 share a node, of ranks 6 to 11 two are on one and four on the next.
    assert Cluster("H100", gpus=24).spans(6) == (2, 2)
    # Of 12 eight and four: of one node only the cards of four carry what a ring sends on.
    assert Cluster("H100", gpus=24).spans(12) == (2, 4)


def test_groups_that_do_not_fill_the_cluster_are_refused():
    with pytest.raises(ValueError, match="groups of 8 ranks, 16 apart, do not fill 64 ranks"):
        Cluster("H100", gpus=64).spans(8, 16)


MEASURED = Gpu(name="core", arch="CPU", mem_bytes=2**30, mem_bytes_per_s=1e10, fp32_flops=1e11, gpus_per_node=64)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster("H100", gpus=64),
        Cluster("cpu", gpus=4, bandwidth_gbps=4, latency_us=200),
        Cluster("A100", gpus=32, gpus_per_node=4, inter="1600 Gb/s RoCE per node"),
        Cluster(MEASURED, gpus=4, intra=Link("wire", 2e9, "gloo", kind="intra", base_s=0.25, all_reduce_fraction=0.5)),
        Cluster("H100", gpus=8, host=Link('a "quoted"\tname', 1e9, "pcie", sources=("one", "two"))),
    ],
)
def test_a_cluster_goes_to_a_file_and_back(cluster, tmp_path):
    cluster.to_file(tmp_path / "cluster.toml")
    assert Cluster.from_file(tmp_path / "cluster.toml") == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no cluster file .*cluster.toml; fsdp-sim calibrate writes one"),
        ("gpus = [", "cluster.toml is not a cluster file"),
        ("[gpu]\n", "cluster.toml has no table 'cluster'"),
        ('[cluster]\ngpu = "H100"\ngpus = 8\nspeed = 3\n', "Cluster has no field speed"),
        ('[cluster]\ngpu = "H100"\n', "gpus"),
        ('[cluster]\ngpu = "H100"\ngpus = 8\n[intra]\nfamily = "nvlink4"\n', "bytes_per_s"),
    ],
)
def test_a_file_that_is_not_a_cluster_says_what_is_wrong(text, message, tmp_path):
    if text is not None:
        (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        Cluster.from_file(tmp_path / "cluster.toml")


def test_equal_clusters_are_one_key():
    assert len({Cluster("H100", gpus=8), Cluster("H100-SXM-80GB", gpus=8), Cluster("H100", gpus=16)}) == 2


def test_a_cluster_prints_as_it_is_written():
    assert repr(Cluster("h100", gpus=8, inter="NDR")) == "Cluster('H100-SXM-80GB', gpus=8, inter='NDR')"


@given(st.text("0123456789.,_-+*/xeEGTbB ", max_size=12), st.sampled_from(["per node", "per GPU"]))
@example(",1", "per node")
@example("1,", "per node")
def test_a_rate_is_read_whole_or_refused(number, whose):
    """What Python and a person would read is what is read; anything else is an error."""
    plain = re.fullmatch(r" *(\d+(?:\.\d+)?) *", number)
    words = f"{number} Gb/s {whose}"
    try:
        found = Cluster("H100", gpus=16, inter=words).inter_link.bytes_per_s
    except ValueError:
        assert not plain or float(plain[1]) == 0
        return
    several = re.fullmatch(r" *(\d+) *x *(\d+(?:\.\d+)?) *", number)
    assert plain or several
    gbits = float(plain[1]) if plain else int(several[1]) * float(several[2])
    assert found == pytest.approx(gbits * 1e9 / 8 / (8 if whose == "per node" else 1))
