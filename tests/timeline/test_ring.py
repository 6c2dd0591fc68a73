"""What each rank of a ring sends, beside a count of the chunks that a ring really passes on."""

import pytest

from fsdp_sim.timeline import Op, ring_share


def chunks_sent(ranks: int, steps: int) -> float:
    """A ring cuts the message into one chunk per rank, and each rank passes one on in each step."""
    return steps / ranks


@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_a_ring_passes_on_all_chunks_but_one_and_an_all_reduce_twice(ranks: int) -> None:
    assert ring_share("all_gather", ranks) == ring_share("reduce_scatter", ranks) == chunks_sent(ranks, ranks - 1)
    assert ring_share("all_reduce", ranks) == pytest.approx(chunks_sent(ranks, 2 * (ranks - 1)))


def test_a_broadcast_and_a_message_between_two_ranks_cross_a_link_whole() -> None:
    assert ring_share("broadcast", 8) == ring_share("send", 2) == 1.0


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "broadcast", "send"])
def test_one_rank_alone_sends_nothing(op: str) -> None:
    assert ring_share(op, 1) == 0.0


def test_an_operation_may_be_spelt_as_the_record_torch_or_prose_does() -> None:
    assert ring_share(Op.ALL_REDUCE, 4) == ring_share("all_reduce", 4) == ring_share("all-reduce", 4) == 1.5
