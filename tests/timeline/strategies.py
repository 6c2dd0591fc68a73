"""Timelines for property tests: every field of an event takes every kind of value it may have."""

import msgspec
from hypothesis import strategies as st

from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Timeline

times_s = st.floats(0.0, 1e6, allow_nan=False)
texts = st.text(max_size=8)
counts = st.integers(0, 2**40)


@st.composite
def events(draw: st.DrawFn, seq: int, rank: int) -> Event:
    issue_s, start_s, end_s = sorted(draw(st.tuples(times_s, times_s, times_s)))
    return Event(
        seq=seq,
        rank=rank,
        op=draw(st.sampled_from(Op)),
        lane=draw(st.sampled_from(Lane)),
        unit=draw(texts),
        step=draw(st.integers(0, 3)),
        micro_batch=draw(st.integers(0, 2)),
        phase=draw(st.sampled_from(Phase)),
        bytes=draw(counts),
        group_size=draw(st.integers(1, 8)),
        dtype=draw(texts),
        issue_s=issue_s,
        start_s=start_s,
        end_s=end_s,
        waits_on=tuple(draw(st.lists(st.integers(0, 20), max_size=3))),
        source=draw(texts),
        stack=tuple(draw(st.lists(texts, max_size=3))),
        category=draw(st.sampled_from(Memory)),
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    found = [draw(events(seq, rank)) for rank, n_events in enumerate(sizes) for seq in range(n_events)]
    header = Header(
        producer=draw(texts),
        clock=draw(st.sampled_from(["simulated", "measured"])),
        world_size=len(sizes),
        title=draw(texts),
        versions=draw(st.dictionaries(texts, texts, max_size=2)),
    )
    return Timeline(header, draw(st.permutations(found)))


def op(start_s: float, end_s: float, kind: Op = Op.FWD, lane: Lane = Lane.COMPUTE, **fields: object) -> Event:
    """An operation of rank 0 issued when it starts."""
    plain = {"seq": 0, "rank": 0, "op": kind, "lane": lane, "issue_s": start_s, "start_s": start_s, "end_s": end_s}
    return Event(**plain | fields)  # type: ignore[arg-type]


def gather(start_s: float, end_s: float, **fields: object) -> Event:
    return op(start_s, end_s, Op.ALL_GATHER, Lane.ALL_GATHER, **fields)


def timeline_of(*found: Event, clock: str = "simulated") -> Timeline:
    """The events, numbered as given where none has a number."""
    if not any(event.seq for event in found):
        found = tuple(msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(found))
    world_size = 1 + max((event.rank for event in found), default=0)
    return Timeline(Header(producer="tests", clock=clock, world_size=world_size), found)
