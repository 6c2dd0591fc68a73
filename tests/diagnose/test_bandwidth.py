"""Bus bandwidth, and a line through times and sizes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.diagnose.bandwidth import Speeds, bus_bytes, gbps
from fsdp_sim.timeline import Op
from tests.timeline.strategies import gather, op

SIZES = st.lists(st.integers(1, 10**9), min_size=2, max_size=5, unique=True)


def sent(n_bytes: int, alpha_s: float, bytes_per_s: float, ranks: int = 8):
    return gather(
        0.0, alpha_s + bus_bytes(Op.ALL_GATHER, n_bytes, ranks) / bytes_per_s, bytes=n_bytes, group_size=ranks
    )


@pytest.mark.parametrize(
    ("kind", "bytes_", "ranks", "expected"),
    [
        (Op.ALL_GATHER, 800, 8, 700),
        (Op.REDUCE_SCATTER, 800, 8, 700),
        (Op.ALL_REDUCE, 800, 8, 1400),
        (Op.BROADCAST, 800, 8, 800),
        (Op.ALL_GATHER, 800, 1, 0),
        (Op.BARRIER, 0, 8, 0),
    ],
)
def test_bus_bytes_are_those_of_nccl_tests(kind, bytes_, ranks, expected):
    assert bus_bytes(kind, bytes_, ranks) == expected


def test_a_link_of_100_gbit_per_s_carries_100():
    assert gbps(Op.ALL_GATHER, 10**9, 8, 0.875 * 8 / 100) == pytest.approx(100)
    assert gbps(Op.ALL_GATHER, 10**9, 8, 0.0) == 0.0


@given(SIZES, st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_a_line_through_sizes_finds_latency_and_bandwidth(sizes, alpha_s, bytes_per_s):
    speeds = Speeds([sent(n, alpha_s, bytes_per_s) for n in sizes])
    line = speeds.line(8)

    if max(sizes) < 1.5 * min(sizes):
        assert line is None
    elif line.bytes_per_s < float("inf"):
        transfer_s = max(sizes) * 7 / 8 / bytes_per_s
        if transfer_s > 1e-6 * alpha_s:  # else rounding is all that is left of it
            assert line.fixed_s == pytest.approx(alpha_s, rel=1e-3)


def test_small_messages_are_too_small_and_large_ones_are_not():
    small, large = sent(10_000, 1e-3, 1e9), sent(10**8, 1e-3, 1e9)
    speeds = Speeds([small, large])

    assert speeds.too_small(small)
    assert not speeds.too_small(large)


def test_one_size_tells_nothing_but_with_a_bandwidth_it_does():
    small, large = sent(10_000, 1e-3, 1e9), sent(10**8, 1e-3, 1e9)

    assert Speeds([small]).too_small(small) is None
    assert Speeds([small], bandwidth_gbps=8).too_small(small)
    assert Speeds([large], bandwidth_gbps=8).too_small(large) is False


def test_a_large_message_on_a_bad_link_is_not_called_small():
    slow = sent(10**9, 0.0, 1e8)

    assert Speeds([slow], bandwidth_gbps=400).too_small(slow) is False
    assert Speeds([slow], bandwidth_gbps=400).reached(slow, slow.duration_s) == pytest.approx(1e8 * 8e-9 / 400)


def test_a_clusters_line_is_that_of_the_cost_model():
    cluster = Cluster("A100-SXM-40GB", gpus=16)
    line = Speeds([], cluster=cluster).line(16)

    seconds = line.fixed_s + bus_bytes(Op.ALL_GATHER, 10**9, 16) / line.bytes_per_s
    assert seconds == pytest.approx(collective_s("all_gather", 10**9, 16, cluster), rel=0.1)
    assert line.fixed_s == collective_s("all_gather", 0, 16, cluster)


def test_what_is_no_collective_or_has_no_size_is_left_out():
    speeds = Speeds([op(0.0, 1.0, bytes=8), gather(0.0, 1.0), gather(0.0, 1.0, bytes=8)])

    assert speeds.line(8) is None
    assert speeds.too_small(gather(0.0, 1.0, group_size=8)) is None
    assert speeds.too_small(gather(0.0, 1.0, bytes=8)) is None


def test_replicas_on_many_nodes_say_nothing_of_as_many_ranks_side_by_side() -> None:
    """HSDP of Mixtral, 8 ranks of a node by 8 nodes: 2.7 GiB over NVLink in 7 ms are no matter of fixed costs, which
    the slow all-reduces of other groups of eight would make of them."""
    large = sent(10**9, 1e-5, 4e11)
    slow = msgspec.structs.replace(sent(10**7, 5e-3, 4e10), op=Op.ALL_REDUCE)
    assert Speeds([large, slow]).line(8) is None
    plan = Plan(
        seq_len=4096, shard_size=8, activation_checkpointing="selective", param_dtype="bf16", reduce_dtype="fp32"
    )
    said = " ".join(simulate("mixtral-8x7b", Cluster("H100", gpus=64), plan).explain().sentences)
    assert "All-gathers start as early as they can" in said
    assert "fixed costs" not in said
