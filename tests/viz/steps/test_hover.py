"""What a bar says: how fast its bytes went, why it began when it did, what waited for it."""

import pytest

from fsdp_sim.diagnose.links import Links
from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
from fsdp_sim.viz.steps.hover import details, payload, reasons


def op(seq: int, op: Op, unit: str, start_s: float, end_s: float, **fields: object) -> Event:
    lane = {Op.ALL_GATHER: Lane.ALL_GATHER}.get(op, Lane.COMPUTE)
    return Event(**{"seq": seq, "rank": 0, "op": op, "lane": lane, "unit": unit, "issue_s": 0.0} | fields
                 | {"start_s": start_s, "end_s": end_s})  # fmt: skip


def links(*events: Event) -> Links:
    return Links(Timeline(Header(producer="tests", clock="measured", world_size=2), events), 0)


def test_what_ended_last_is_named_first_and_the_rest_after_it() -> None:
    gathers = [op(n, Op.ALL_GATHER, f"layers.{n}", n, n + 1.0) for n in range(4)]
    forward = op(4, Op.FWD, "layers.3", 4, 5, waits_on=(0, 1, 2, 3))
    assert reasons(forward, links(*gathers, forward)) == [
        "waited for its all-gather",
        "also after all-gather of 0, all-gather of 1 and 1 more",
    ]
    assert reasons(gathers[0], links(*gathers, forward)) == ["awaited by forward of 3"]


def test_queueing_and_a_late_cpu_are_told_apart() -> None:
    one, two = op(0, Op.FWD, "layers.0", 0, 1), op(1, Op.FWD, "layers.1", 1, 2)
    late = op(2, Op.FWD, "layers.2", 3, 4, issue_s=3.0)
    record = links(one, two, late)
    assert [reasons(event, record) for event in (one, two, late)] == [
        [], ["queued behind forward of 0"], ["began as soon as it was issued"]
    ]  # fmt: skip


def test_the_rank_that_came_last_to_a_collective_is_named() -> None:
    both = [
        op(0, Op.ALL_GATHER, "u", 2, 3, rank=rank, group_size=2, issue_s=issued) for rank, issued in ((0, 0), (1, 2))
    ]
    assert reasons(both[0], links(*both)) == ["began as soon as it was issued on rank 1, the last to come"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bytes": 2**30, "dtype": "bf16", "group_size": 8}, "1.00 GiB bf16 among 8 ranks, 2.1 GB/s"),
        ({"bytes": 2**20}, "1.00 MiB, 0.002 GB/s"),
        ({"bytes": 2**20, "end_s": 0.0}, "1.00 MiB"),
        ({"bytes": 2**37}, "128 GiB, 275 GB/s"),
    ],
)
def test_bytes_come_with_the_bandwidth_they_make(fields: dict[str, object], text: str) -> None:
    event = Event(**{"seq": 0, "rank": 0, "op": Op.ALL_GATHER, "lane": Lane.ALL_GATHER, "end_s": 0.5} | fields)
    assert payload(event) == text


def test_no_text_of_a_user_is_markup() -> None:
    evil = "<img src=x>"
    one = op(0, Op.ALL_GATHER, evil, 0, 1, bytes=1, dtype=evil, source=evil)
    two = op(1, Op.FWD, "u", 1, 2, waits_on=(0,))
    assert "<img" not in details(one, links(one, two)) + details(two, links(one, two))
