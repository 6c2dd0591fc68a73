"""The slow network: real data, modelled completion, one wire."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.ranks import Network, run
from fsdp_sim.timeline import Op

NETWORK = Network(bandwidth_gbps=0.8, latency_us=1000)


def test_seconds_follow_alpha_beta_with_ring_bytes() -> None:
    # 4 ranks, 1 MB: an all-gather sends 3/4 of it, an all-reduce twice that; 0.8 Gbit/s are 100 MB/s
    assert NETWORK.seconds("all_gather", 1_000_000, 4) == pytest.approx(0.001 + 0.0075)
    assert NETWORK.seconds("reduce_scatter", 1_000_000, 4) == pytest.approx(0.001 + 0.0075)
    assert NETWORK.seconds("all_reduce", 1_000_000, 4) == pytest.approx(0.001 + 0.015)
    assert NETWORK.seconds("broadcast", 1_000_000, 4) == pytest.approx(0.001 + 0.01)
    assert NETWORK.seconds("all_gather", 1_000_000, 1) == 0.0


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(2, 64))
def test_more_bytes_never_take_less_time(a: int, b: int, world_size: int) -> None:
    low, high = sorted((a, b))
    assert NETWORK.seconds("all_gather", low, world_size) <= NETWORK.seconds("all_gather", high, world_size)


@pytest.mark.parametrize(
    "bad", [{"bandwidth_gbps": 0}, {"bandwidth_gbps": -1}, {"bandwidth_gbps": 1, "latency_us": -1}]
)
def test_impossible_links_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Network"):
        Network(**bad)


def test_collectives_queue_on_one_wire_and_deliver_the_right_data() -> None:
    def fn() -> list[float]:
        inputs = [torch.full((50_000,), float(dist.get_rank() + 10 * i)) for i in range(3)]
        outputs = [torch.empty(100_000) for _ in range(3)]
        works = [dist.all_gather(list(out.chunk(2)), x, async_op=True) for x, out in zip(inputs, outputs, strict=True)]
        for work in works:
            work.wait()
        return [out[-1].item() for out in outputs]

    results = run(fn, 2, network=NETWORK, progress=False)
    assert list(results) == [[1.0, 11.0, 21.0]] * 2
    cost_s = NETWORK.seconds("all_gather", 400_000, 2)
    starts = [[e.start_s for e in results.timeline.select(rank=rank, op=Op.ALL_GATHER).ops] for rank in (0, 1)]
    assert starts[0] == starts[1]  # every rank computes the same wire
    for start_s, next_start_s in pairwise(starts[0]):
        assert next_start_s >= start_s + cost_s - 1e-9
    for event in results.timeline.select(op=Op.ALL_GATHER).ops:
        assert event.duration_s >= cost_s - 1e-9  # longer only where gloo itself was slower than the wire


def test_a_collective_starts_when_its_last_rank_arrives() -> None:
    def fn() -> None:
        if dist.get_rank() == 1:
            __import__("time").sleep(0.3)
        dist.all_reduce(torch.ones(10))

    timeline = run(fn, 2, network=NETWORK, progress=False).timeline
    early, late = timeline.select(rank=0).ops[0], timeline.select(rank=1).ops[0]
    assert early.issue_s < late.issue_s
    assert early.start_s == late.start_s >= late.issue_s


def test_groups_of_different_ranks_share_each_ranks_wire() -> None:
    def fn() -> float:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.ones(100_000)
        mine = pairs[dist.get_rank() // 2]
        first = dist.all_reduce(x, group=mine, async_op=True)
        first.wait()
        dist.all_reduce(x)
        return x[0].item()

    results = run(fn, 4, network=NETWORK, progress=False)
    assert list(results) == [8.0] * 4  # 2 in the pair, then the sum of four
    for rank in range(4):
        pair, world = results.timeline.select(rank=rank, op=Op.ALL_REDUCE).ops
        assert world.start_s >= pair.end_s


def test_futures_wait_for_the_wire_too() -> None:
    def fn() -> float:
        import time

        start_s = time.monotonic()
        dist.all_reduce(torch.ones(1_000_000), async_op=True).get_future().wait()
        return time.monotonic() - start_s

    slow = Network(bandwidth_gbps=0.08)
    assert min(run(fn, 2, network=slow, progress=False)) > 0.9 * slow.seconds("all_reduce", 4_000_000, 2)
