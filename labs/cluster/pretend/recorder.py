"""What rank 0 did when: the work of its compute stream without a gap, and its collectives.

A mark says what the compute stream does from there on. On CPUs that stream is the thread, which copies, too; its marks
are times of day. On a GPU they are events on the compute stream, read when all is over.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_sim.timeline import COLLECTIVES, Event, Header, Lane, Op, Phase, Timeline
from fsdp_sim.timeline.kinds import lane_of

Piece = tuple[Op, str]
"""Operation and unit; of a forward or backward the segment; of a collective what its issue takes the thread."""


class Clock(Protocol):
    """When something is."""

    def now(self) -> Any:
        """A moment: of the compute stream, if that is not the thread."""

    def seconds(self, moment: Any) -> float:
        """A moment in seconds, once it is over."""


class ThreadClock:
    """The thread is the compute stream."""

    def now(self) -> float:
        return time.monotonic()

    def seconds(self, moment: float) -> float:
        return moment


class GpuClock:
    """Events on the GPU's compute stream: the one that is current now. Untested without a GPU."""

    def __init__(self) -> None:
        self.compute = torch.cuda.current_stream()
        self.begin = self.now()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute)
        return event

    def seconds(self, moment: torch.cuda.Event) -> float:
        moment.synchronize()
        return float(self.begin.elapsed_time(moment)) * 1e-3


class PretendedMark(NamedTuple):
    """From ``moment`` on the compute stream does this; ``op`` is None while it waits."""

    moment: Any
    op: Op | None
    unit: str
    step: int
    phase: Phase


class PretendedCollective(NamedTuple):
    """A collective, with its moments."""

    op: Op
    unit: str
    n_bytes: int
    group_size: int
    issue: Any
    start: Any
    end: Any
    step: int
    phase: Phase


class PretendedTape:
    """The recording of a run.

    Attributes:
        step, phase: written into what follows.
        marks, collectives: so far, in order.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.on_thread = isinstance(clock, ThreadClock)
        self.step, self.phase = 0, Phase.NONE
        self.marks: list[PretendedMark] = []
        self.collectives: list[PretendedCollective] = []

    def mark(self, op: Op | None, unit: str = "") -> None:
        """From now on the compute stream does this."""
        self.marks.append(PretendedMark(self.clock.now(), op, unit, self.step, self.phase))

    def thread(self, op: Op, unit: str) -> None:
        """From now on the thread does this, which on a GPU is no work of the compute stream."""
        if self.on_thread:
            self.mark(op, unit)

    def end(self) -> None:
        """What the compute stream did is over. The thread is never idle: what follows there is part of it."""
        if not self.on_thread:
            self.mark(None)

    @contextmanager
    def waiting(self, then: Piece | None = None) -> Iterator[None]:
        """Around a wait of the thread; afterwards it does ``then``, or goes on with what it did."""
        before = self.marks[-1] if self.marks else None
        self.mark(None)
        yield
        if then is not None:
            self.mark(*then)
        elif before is not None:
            self.mark(before.op, before.unit)

    def collective(self, op: Op, unit: str, n_bytes: int, group_size: int, issue: Any, start: Any, end: Any) -> None:
        self.collectives.append(
            PretendedCollective(op, unit, n_bytes, group_size, issue, start, end, self.step, self.phase)
        )  # fmt: skip

    def spans(self) -> list[tuple[PretendedMark, float, float]]:
        """Marks with start and end in seconds; without waits. The last mark only ends what was before it."""
        moments = [self.clock.seconds(mark.moment) for mark in self.marks]
        spans = zip(self.marks, moments, moments[1:], strict=False)
        return [(mark, start, end) for mark, start, end in spans if mark.op is not None]

    def pieces(self) -> list[dict[Piece, float]]:
        """What each piece took in each step, in seconds; what occurs several times is summed."""
        of_steps: dict[int, dict[Piece, float]] = defaultdict(lambda: defaultdict(float))
        for mark, start_s, end_s in self.spans():
            if mark.op is not None:
                of_steps[mark.step][mark.op, mark.unit] += end_s - start_s
        return [dict(of_steps[step]) for step in sorted(of_steps)]

    def timeline(self, world_size: int, hardware: str, device: str) -> Timeline:
        """The run as rank 0's events, in the order of issue; the first starts at 0."""
        clock, rows = self.clock, []
        for mark, start_s, end_s in self.spans():
            if mark.op is not None and mark.op not in COLLECTIVES:
                lane = Lane.COMPUTE if mark.op is Op.OPTIM else lane_of(mark.op)
                rows.append(
                    Event(seq=0, rank=0, op=mark.op, lane=lane, unit=mark.unit, step=mark.step, phase=mark.phase,
                          issue_s=start_s, start_s=start_s, end_s=end_s)
                )  # fmt: skip
        for c in self.collectives:
            issue_s, start_s, end_s = (clock.seconds(moment) for moment in (c.issue, c.start, c.end))
            rows.append(
                Event(seq=0, rank=0, op=c.op, lane=lane_of(c.op), unit=c.unit, step=c.step, phase=c.phase,
                      bytes=c.n_bytes, group_size=c.group_size, issue_s=issue_s, start_s=start_s, end_s=end_s)
            )  # fmt: skip
        rows.sort(key=lambda event: event.issue_s)
        header = Header(
            producer="pretend", clock="measured", world_size=world_size, title=TITLE, hardware=hardware, api="fsdp2",
            device="gpu" if device == "cuda" else "cpu",
        )  # fmt: skip
        zero_s = rows[0].issue_s if rows else 0.0
        return Timeline(header, [_moved(event, seq, zero_s) for seq, event in enumerate(rows)])


TITLE = "pretended cluster: the wire is modelled, the loss means nothing"


def _moved(event: Event, seq: int, zero_s: float) -> Event:
    times = {name: getattr(event, name) - zero_s for name in ("issue_s", "start_s", "end_s")}
    return Event(**{name: getattr(event, name) for name in event.__struct_fields__} | times | {"seq": seq})
