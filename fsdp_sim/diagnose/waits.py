"""`waits`: each time in which a rank's compute lane stands idle, and the culprit.

The operation that ends the idle time says what it waited for; if that is a collective, it is asked in turn why it did
not end earlier. Where the operation was issued only after what it waited for had ended, the idle time is cut in two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from fsdp_sim.diagnose.bandwidth import Speeds
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.timeline import COLLECTIVES, Event, Interval, Lane, Op, Phase, communicates, in_turn, uncovered

# What is done to the input of a collective before, and to its output after it.
_COPIES = frozenset(
    {Op.H2D, Op.D2H, Op.AG_CAST, Op.AG_COPY_IN, Op.AG_COPY_OUT, Op.RS_COPY_IN, Op.RS_COPY, Op.GRAD_CAST, Op.CLONE}
    | {Op.UPCAST, Op.ACCUMULATE, Op.DIV, Op.NORM, Op.CLIP}
)


class Wait(NamedTuple):
    """A time in which the compute lane stands idle.

    Attributes:
        start_s, end_s: when.
        culprit: what kept it waiting.
        waiting: the operation that waits; None after the last one.
        on: what it waits for, if that is known.
        behind: what that one had to wait for, if that is the reason.
        rank: the rank that came last, where that is the reason and known; else -1.
    """

    start_s: float
    end_s: float
    culprit: Culprit
    waiting: Event | None = None
    on: Event | None = None
    behind: Event | None = None
    rank: int = -1

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def waits(peers: Peers, rank: int, step: int, window: Interval, speeds: Speeds) -> list[Wait]:
    """The idle times of a rank's compute lane in a window, in order of time; they do not overlap."""
    view = peers.view(rank)
    found: list[Wait] = []
    reached = window[0]
    paced = _paced(view)
    for e in view.computing:
        start_s, end_s = e.start_s, e.end_s
        if end_s <= window[0] or start_s >= window[1]:
            continue
        if start_s > reached:
            gap = (reached, start_s)
            if e.seq in paced:
                found.append(Wait(*gap, _issued_late(peers, view, e), e))
            else:
                found += _inside(peers, view, e, gap) if view.synchronous else _before(peers, view, e, gap, speeds)
        if end_s > reached:
            reached = end_s
    if window[1] > reached:
        gap = (reached, window[1])
        found += _inside(peers, view, None, gap) if view.synchronous else _after_all(view, step, gap)
    return found


def _paced(view: RankView) -> set[int]:
    """The operations whose start does not matter: that, or one right behind them, ends when the CPU has launched it."""
    found: set[int] = set()
    behind: Event | None = None
    for e in reversed(view.computing if view.simulated else []):
        if e.unlaunched_s or (behind is not None and behind.seq in found and behind.start_s <= e.end_s):
            found.add(e.seq)
        behind = e
    return found


def _inside(peers: Peers, view: RankView, e: Event | None, gap: Interval) -> list[Wait]:
    """What a thread did that neither computed nor, while it was in a collective, could do anything else."""
    found: list[Wait] = []
    reached = gap[0]
    for on in view.collectives_in(gap):
        start, end = max(on.start_s, reached), min(on.end_s, gap[1])
        if end <= start:
            continue
        if start > reached:
            found.append(Wait(reached, start, Culprit.HOST, e))
        late = peers.lateness(on)
        slow = late.seconds >= on.duration_s / 2 and late.event is not None
        rank = late.event.rank if slow and late.event else -1
        found.append(Wait(start, end, Culprit.SLOW_RANK if slow else Culprit.SYNCHRONOUS, e, on, None, rank))
        reached = end
    if gap[1] > reached:
        over = e is None and not any(op.end_s > reached for op in view.ops)
        found.append(Wait(reached, gap[1], Culprit.SLOW_RANK if over else Culprit.HOST, e))
    return found


def _before(peers: Peers, view: RankView, e: Event, gap: Interval, speeds: Speeds) -> list[Wait]:
    """Why the compute lane is idle until an operation starts."""
    cause = view.cause(e)
    on = view.op(cause)
    if cause.why == "lane":
        return [Wait(*gap, Culprit.BETWEEN_KERNELS, e)]
    if cause.why == "CPU" or (on is None and e.issue_s >= gap[1]):
        ended = [op for _, op in view.before(e) if gap[0] < op.end_s <= gap[1]] or _stood_by(view, gap)
        earlier = max(ended, key=_end, default=None)
        if earlier is None or gap[1] - earlier.end_s <= view.launch_s:
            if earlier is None:
                return [Wait(*gap, _issued_late(peers, view, e), e)]
            return [_for(peers, view, e, earlier, gap, speeds)]
        middle = earlier.end_s
        first = _for(peers, view, e, earlier, (gap[0], middle), speeds)
        return [first, Wait(middle, gap[1], _issued_late(peers, view, e), e)]
    if on is None:
        return [Wait(*gap, Culprit.UNKNOWN, e)]
    return [_for(peers, view, e, on, gap, speeds)]


def _stood_by(view: RankView, gap: Interval) -> list[Event]:
    """The collectives of which a CPU's thread awaited the end: it did nothing else until the last was over, and then
    went on. That is `Work.wait`, which a recording does not tie to what comes after it."""
    if view.simulated or not view.on_cpu:
        return []
    ended = [e for e in view.collectives_in(gap) if e.end_s <= gap[1]]
    return ended if ended and gap[1] - max(map(_end, ended)) <= (gap[1] - gap[0]) / 10 else []


def _in_line(view: RankView, e: Event, on: Event, gap: Interval) -> bool:
    """Whether a collective that no annotation explains began when the compute before it ended, though its CPU had
    issued it earlier: its input came from there, or it was put behind it."""
    if view.on_cpu or on.op not in COLLECTIVES or e.op is Op.OPTIM or not view.computed_before(on):
        return False
    queued = on.issue_s < on.start_s - view.launch_s / 2
    return queued and abs(on.start_s - gap[0]) <= view.launch_s / 5


def _end(e: Event) -> float:
    return e.end_s


def _issued_late(peers: Peers, view: RankView, e: Event) -> Culprit:
    """Which kind of lateness it is that the CPU issued an operation so late."""
    if peers.stops(view.rank).limited(e):
        return Culprit.RATE_LIMITER
    if e.op is Op.OPTIM or view.on_cpu:
        return Culprit.HOST
    return Culprit.CPU_LATE


def _for(peers: Peers, view: RankView, e: Event, on: Event, gap: Interval, speeds: Speeds) -> Wait:
    """Why the compute lane waits for ``on``."""
    seconds = gap[1] - gap[0]
    if on.lane is Lane.CPU:
        return Wait(*gap, Culprit.CPU_SUMS if on.op is Op.ACCUMULATE else Culprit.CPU_OPTIMIZER, e, on)
    if on.op is Op.ACT_D2H or on.op is Op.ACT_H2D:
        return Wait(*gap, Culprit.ACTIVATIONS, e, on)
    if on.op in COLLECTIVES:
        late = peers.lateness(on)
        if late.seconds >= seconds / 2 and late.seconds > view.launch_s:
            return Wait(*gap, Culprit.SLOW_RANK, e, on, None, late.event.rank if late.event else -1)
    if on.op in (Op.RECV, Op.SEND):
        return Wait(*gap, Culprit.PIPELINE, e, on)
    if not view.header.api and not view.simulated and _in_line(view, e, on, gap):
        return Wait(*gap, Culprit.IN_LINE, e, on)
    if on.op is Op.ALL_TO_ALL:
        return Wait(*gap, Culprit.TOKENS, e, on)
    if e.op is Op.RS_COPY_IN and on.op is not Op.ALL_GATHER:
        return Wait(*gap, Culprit.RS_BUFFER, e, on)
    if e.phase is Phase.OPTIMIZER and on.phase is Phase.OPTIMIZER and on.op in COLLECTIVES:
        late_cpu = view.cause(on).why == "CPU"  # it was over at once
        return Wait(*gap, Culprit.CPU_LATE if late_cpu else Culprit.IN_OPTIMIZER, e, None if late_cpu else on)
    if e.op is Op.OPTIM or (view.simulated and e.phase is Phase.OPTIMIZER):
        # One rank reduces nothing: what is left is the copy of its gradients.
        alone = on.op in _COPIES and not any(communicates(o.op, o.lane) for o in view.ops if o.step == e.step)
        return Wait(*gap, Culprit.COPIES if alone else Culprit.LAST_REDUCTIONS, e, on)
    if on.op in COLLECTIVES and on.op is not Op.ALL_GATHER:
        return Wait(*gap, Culprit.REDUCTION, e, on)
    if on.op is not Op.ALL_GATHER:
        return Wait(*gap, Culprit.COPIES if on.op in _COPIES else Culprit.UNKNOWN, e, on)
    # The rank that came last says why it did not come earlier; a measured clock is not exact enough to ask it.
    last = late.event if view.simulated and late.event else on
    culprit, behind = _gather_culprit(peers, last, gap, speeds)
    return Wait(*gap, culprit, e, on, behind)


def _gather_culprit(peers: Peers, on: Event, gap: Interval, speeds: Speeds) -> tuple[Culprit, Event | None]:
    """Why an all-gather did not end earlier, and what it had to wait for."""
    view, seconds = peers.view(on.rank), gap[1] - gap[0]
    cause = view.cause(on)
    why, behind = cause.why, view.op(cause)
    if behind is not None and behind.op not in COLLECTIVES and _on_compute_stream(view, on):
        return Culprit.ASYNCHRONOUS, behind
    if view.on_cpu and (on.issue_s == on.start_s if view.simulated else on.issue_s >= gap[0] - view.launch_s):
        return Culprit.COMPUTING_THREAD, behind
    limited = why == "CPU" and peers.stops(on.rank).limited(on)
    if limited and view.issued_late_s(on, but=Lane.COMPUTE) >= seconds / 2:
        return Culprit.RATE_LIMITER, behind  # what it came after on the compute lane is what the CPU waited for
    if why == "CPU" and view.issued_late_s(on) >= seconds / 2:
        return Culprit.COMPUTING_THREAD if view.on_cpu else Culprit.CPU_LATE, behind
    if why == "communicator" and behind is not None and behind.op is not Op.ALL_GATHER:
        return Culprit.HEAD_OF_LINE, behind
    if not view.computed_before(on) and on.phase in (Phase.FORWARD, Phase.NONE):
        return Culprit.FIRST_ALL_GATHER, behind
    if _copied_s(view, on, gap) >= seconds / 2:
        return Culprit.COPIES, behind
    return Culprit.SMALL if speeds.too_small(on) else Culprit.NETWORK, behind


def _on_compute_stream(view: RankView, gather: Event) -> bool:
    """Whether an all-gather was issued on the compute stream, as ``unshard(async_op=True)`` does: so was its copy-in,
    and it started when what was computed before had ended."""
    before = [op for _, op in view.before(gather)]
    copy_in = next((op for op in before if op.op is Op.AG_COPY_IN), None)
    return view.api == "fsdp2" and copy_in is not None and copy_in.lane is Lane.COMPUTE


def _copied_s(view: RankView, gather: Event, gap: Interval) -> float:
    """How much of an idle time a gather waited for copies and casts of its own input."""
    place = {op.seq: op for _, op in view.before(gather) if op.op in _COPIES and op.lane is not Lane.COMPUTE}
    seconds, seen = 0.0, set(place)
    while place:
        _, op = place.popitem()
        seconds += max(0.0, min(op.end_s, gap[1]) - max(op.start_s, gap[0]))
        for why, before in view.before(op):
            if why == "lane" and before.op in _COPIES and before.unit == op.unit and before.seq not in seen:
                place[before.seq] = before
                seen.add(before.seq)
    return seconds


def _after_all(view: RankView, step: int, gap: Interval) -> list[Wait]:
    """Why a step goes on after the last of its compute."""
    late = [e for e in view.ops if e.step == step and e.end_s > gap[0] and e.start_s < gap[1]]
    on_cpu = [e for e in late if e.lane is Lane.CPU and e.phase is Phase.OPTIMIZER]
    if on_cpu and (begin_s := max(gap[0], on_cpu[0].start_s)) < gap[1]:
        before = _after_all(view, step, (gap[0], begin_s)) if begin_s > gap[0] else []
        return [*before, Wait(begin_s, gap[1], Culprit.CPU_OPTIMIZER, on=on_cpu[-1])]
    comm = [e for e in late if communicates(e.op, e.lane)]
    if not comm:
        return [Wait(*gap, Culprit.COPIES if late else Culprit.SLOW_RANK, on=max(late, key=_end, default=None))]
    last = max(comm, key=_end)
    culprit = Culprit.LAST_ALL_GATHERS if last.op is Op.ALL_GATHER else Culprit.LAST_REDUCTIONS
    found = [Wait(gap[0], min(gap[1], last.end_s), culprit, on=last)]
    if last.end_s < gap[1]:  # other ranks, or what is done to its output
        found.append(Wait(last.end_s, gap[1], Culprit.COPIES if max(late, key=_end) is not last else Culprit.SLOW_RANK))
    return found


def exposed(
    comm: Sequence[Event], idle: Sequence[Wait], busy: Sequence[Interval]
) -> list[tuple[Event, Wait | None, float]]:
    """What of the collectives no compute hides: of each the seconds, taken apart by the wait they fall into.

    Of two collectives in flight the one that started first counts, so that the seconds add up to the time in which
    there is communication and no compute.
    """
    found: list[tuple[Event, Wait | None, float]] = []
    ends = [wait.end_s for wait in idle]
    first = 0  # of what keeps compute busy, the first that may still matter
    for e, own in in_turn(comm):
        while first < len(busy) and busy[first][1] <= own[0]:
            first += 1
        for since, until in uncovered(*own, busy, first):
            place, at = bisect_left(ends, since), since
            while place < len(idle) and idle[place].start_s < until:
                wait = idle[place]
                begin, end = max(at, wait.start_s), min(until, wait.end_s)
                if begin > at:
                    found.append((e, None, begin - at))
                if end > begin:
                    found.append((e, wait, end - begin))
                    at = end
                place += 1
            if until > at:
                found.append((e, None, until - at))
    return found
