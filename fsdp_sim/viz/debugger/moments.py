"""`moment`: all there is to know about a run when one of its events has just been issued. Pure: it can go back in time.

Events are stepped in issue order, the order in which a rank's CPU came to them. So "now" is when the event was issued,
and what is alive is what the CPU has allocated and not yet freed, as torch's caching allocator counts it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TypeAlias

from fsdp_sim.timeline import COLLECTIVES, Event, Lane, Memory, Op, Timeline, computes, subtract, total_s

MOST_OTHERS = 15
"""So many other ranks are looked up: of a thousand nobody reads more."""

LiveBytes: TypeAlias = dict[tuple[Memory, str], int]
"""Bytes by what they are for and by unit."""


@dataclass(frozen=True)
class OtherRank:
    """Another rank at the same moment.

    Attributes:
        issued: the last event its CPU has issued by now, None before the first.
        running: the operations that run there now.
        match: its counterpart of this event (the same collective, the same piece of compute), if it has one.
    """

    rank: int
    issued: Event | None
    running: tuple[Event, ...]
    match: Event | None


@dataclass(frozen=True)
class Moment:
    """A rank when it has just issued ``event``.

    Attributes:
        events: all events of the rank, in issue order; ``event`` is the one at ``position``.
        live: what is alive once the event has been issued, nothing that is 0.
        change: bytes by which the event changes that; negative for a free.
        peak_bytes: the most that was alive until now. ``top_bytes``: the most that ever will be.
        waits_on: what the event names as having waited for; ``behind`` is the event before it on its lane.
        waited_by: what names this event; ``ahead`` is the event after it on its lane.
        hidden_s: for a collective, seconds of it during which this rank computed.
        others: of the other ranks the first `MOST_OTHERS`; ``n_ranks`` counts all of the timeline.
    """

    event: Event
    position: int
    events: tuple[Event, ...] = field(repr=False)
    live: LiveBytes
    change: int
    peak_bytes: int
    top_bytes: int
    waits_on: tuple[Event, ...]
    behind: Event | None
    waited_by: tuple[Event, ...]
    ahead: Event | None
    hidden_s: float
    others: tuple[OtherRank, ...]
    n_ranks: int

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())

    @property
    def lag_s(self) -> float:
        """From when the CPU issued the event until it ran."""
        return max(0.0, self.event.start_s - self.event.issue_s)

    @property
    def held_up_by(self) -> Event | None:
        """Of all that had to be over first, what was over last; only where the event had to wait."""
        before = [e for e in (*self.waits_on, self.behind) if e is not None and e.end_s > self.event.issue_s]
        return max(before, key=lambda e: e.end_s, default=None) if self.lag_s else None


def moment(timeline: Timeline, rank: int, seq: int) -> Moment:
    """The run when ``rank`` has just issued its event ``seq``.

    Raises:
        ValueError: the rank has no event of that number.
    """
    events = events_of(timeline, rank)
    position = position_of(events, seq)
    event = events[position]
    by_seq = {e.seq: e for e in events}
    on_lane = [e for e in events if e.lane is event.lane and not e.is_memory]
    before = [e for e in on_lane if e.seq < seq]
    after = [e for e in on_lane if e.seq > seq]
    live, peak, top = _memory(events, position)
    return Moment(
        event=event,
        position=position,
        events=events,
        live=live,
        change=change_bytes(event),
        peak_bytes=peak,
        top_bytes=top,
        waits_on=tuple(by_seq[s] for s in event.waits_on if s in by_seq),
        behind=before[-1] if before and not event.is_memory else None,
        waited_by=tuple(e for e in events if seq in e.waits_on),
        ahead=after[0] if after and not event.is_memory else None,
        hidden_s=_hidden_s(events, event),
        others=tuple(_elsewhere(timeline, r, event) for r in _others(timeline, rank)),
        n_ranks=len(timeline.ranks),
    )


def events_of(timeline: Timeline, rank: int) -> tuple[Event, ...]:
    """A rank's events in issue order."""
    first = bisect_left(timeline.events, rank, key=lambda e: e.rank)
    return timeline.events[first : bisect_left(timeline.events, rank + 1, key=lambda e: e.rank)]


def position_of(events: tuple[Event, ...], seq: int) -> int:
    """Where in a rank's events the one of a number is.

    Raises:
        ValueError: there is none.
    """
    position = bisect_left(events, seq, key=lambda e: e.seq)
    if position == len(events) or events[position].seq != seq:
        has = f"its events are numbered {events[0].seq} to {events[-1].seq}" if events else "it has no events"
        raise ValueError(f"there is no event {seq} on this rank; {has}, and operations that never ended are left out")
    return position


def match(timeline: Timeline, event: Event, rank: int) -> Event | None:
    """The counterpart of an event on another rank: as many of its kind came before it there as here."""
    kind = _kind(event)
    number = sum(_kind(e) == kind for e in events_of(timeline, event.rank) if e.seq < event.seq)
    same = [e for e in events_of(timeline, rank) if _kind(e) == kind]
    return same[number] if number < len(same) else None


def next_of_unit(at: Moment) -> Event | None:
    """The next event of the same unit."""
    return next((e for e in at.events[at.position + 1 :] if e.unit == at.event.unit), None)


def next_on_lane(at: Moment) -> Event | None:
    """The next operation of the same lane; allocs and frees are passed over."""
    return next((e for e in at.events[at.position + 1 :] if e.lane is at.event.lane and not e.is_memory), None)


def change_bytes(event: Event) -> int:
    """By how much an event changes what is alive."""
    return event.bytes if event.op is Op.ALLOC else -event.bytes if event.op is Op.FREE else 0


def is_compute(event: Event) -> bool:
    """Whether an event is a piece of the model's own compute, or the optimizer's."""
    return event.op in (Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM)


def _memory(events: tuple[Event, ...], position: int) -> tuple[LiveBytes, int, int]:
    """What is alive after the event at a position, the most until then, and the most of the whole run."""
    live: LiveBytes = {}
    total = peak = peak_until = 0
    for number, event in enumerate(events):
        if event.is_memory:
            change = change_bytes(event)
            total += change
            peak = max(peak, total)
            if number <= position:
                key = event.category, event.unit
                live[key] = live.get(key, 0) + change
                peak_until = peak
    return {key: n_bytes for key, n_bytes in live.items() if n_bytes}, peak_until, peak


def _hidden_s(events: tuple[Event, ...], event: Event) -> float:
    if event.op not in COLLECTIVES:
        return 0.0
    busy = [
        (e.start_s, e.end_s)
        for e in events
        if e.end_s > event.start_s and e.start_s < event.end_s and not e.is_memory and computes(e.op, e.lane)
    ]
    return max(0.0, event.duration_s - total_s(subtract([(event.start_s, event.end_s)], busy)))


def _others(timeline: Timeline, rank: int) -> list[int]:
    return [r for r in timeline.ranks if r != rank][:MOST_OTHERS]


def _elsewhere(timeline: Timeline, rank: int, event: Event) -> OtherRank:
    events, now_s = events_of(timeline, rank), event.issue_s
    issued = max((e for e in events if e.issue_s <= now_s), key=lambda e: (e.issue_s, e.seq), default=None)
    running = tuple(e for e in events if e.start_s <= now_s < e.end_s and not e.is_memory)
    return OtherRank(rank, issued, running, match(timeline, event, rank))


def _kind(event: Event) -> tuple[Op, Lane, Memory, str, int, int, str]:
    return event.op, event.lane, event.category, event.unit, event.step, event.micro_batch, event.phase
