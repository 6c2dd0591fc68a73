"""`contended`: several ranks played event by event, with rates that change as operations start and end.

The CPU of each rank issues onto queues, one for each stream (and for each communicator's asynchronous collectives). The
head of a queue is an operation, which runs, or a wait: the number of entries that another queue must have done. The
clock jumps to the next end of an operation or the next moment at which the CPU has issued what a stream waits for.
Where nothing slows anything the times are those of the passes in issue order, to the last digit.

Each rank costs several microseconds per operation: use this for a node, not for a thousand ranks. One rank that stands
for all needs no rendezvous and has a loop of its own, `fsdp_sim.engine.contended_rank`, which gives the same times.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from fsdp_sim.engine.contended_rank import contended_rank
from fsdp_sim.engine.contention import Contention, Rates
from fsdp_sim.engine.groups import group_of
from fsdp_sim.engine.run import OpTimes, at_rank
from fsdp_sim.engine.seconds import OpCosts
from fsdp_sim.schedule import Kind, Program
from fsdp_sim.timeline import Lane

SILENT = frozenset({Kind.HOOK, Kind.ALLOC, Kind.FREE, Kind.RECORD_STREAM})
Done = tuple[int, int]
"""A moment: a queue has done a number of entries."""


class _Running:
    """An operation in flight, on one queue or, a collective, on one of each rank of its group.

    Attributes:
        since: the moment from which ``left`` counts. ``left``: seconds it still takes at full rate.
        floor: the CPU has not issued all of it before; it cannot end earlier.
        version: goes up with each change of rate; an end foretold under an older one does not happen.
    """

    __slots__ = ("floor", "k", "left", "local", "members", "rate", "since", "version")

    def __init__(self, k: int, members: list[int], seconds: float, floor: float) -> None:
        self.k, self.members, self.left, self.floor = k, members, seconds, floor
        self.since = self.rate = 0.0
        self.version = 0
        self.local: dict[int, float] = {}  # the rate each rank allows it


def contended(program: Program, costs: OpCosts, on_cpu: bool, contention: Contention) -> OpTimes:
    """When each operation is issued, starts and ends, where operations slow each other down."""
    if costs.ranks == 1:
        return contended_rank(program, costs, on_cpu, contention)
    return _Machine(program, costs, on_cpu, contention).play()


class _Machine:
    def __init__(self, program: Program, costs: OpCosts, on_cpu: bool, contention: Contention) -> None:
        self.program, self.costs, self.on_cpu = program, costs, on_cpu
        self.rates = Rates(contention, program, costs.kinds)
        self.ranks = costs.ranks
        names = list(dict.fromkeys(i.communicator for i in costs.ops if i.communicator))
        self.number_of = {lane: n for n, lane in enumerate([*Lane, *(f"async {name}" for name in names)])}
        queues = len(self.number_of)
        self.queues = queues
        self.queue: list[list[int | Done]] = [[] for _ in range(queues * self.ranks)]
        self.done = [0] * (queues * self.ranks)
        self.busy = [False] * (queues * self.ranks)
        self.parked = [-1] * (queues * self.ranks)  # the entry for which a queue is in another's list of who waits
        self.timed = [-1] * (queues * self.ranks)  # the operation for whose issue a moment has been set
        self.waiting: list[list[int]] = [[] for _ in range(queues * self.ranks)]  # queues (or ~rank: its CPU) to wake
        # collectives of a communicator run in issue order: the number of the one whose turn it is, and who waits for it
        self.turn = [dict.fromkeys(names, 0) for _ in range(self.ranks)]
        self.due: list[dict[tuple[str, int], int]] = [{} for _ in range(self.ranks)]
        self.place: list[int] = []  # of each collective in its communicator
        count: dict[str, int] = {}
        for i in costs.ops:
            self.place.append(count.get(i.communicator, 0))
            count[i.communicator] = self.place[-1] + 1
        self.arrived: dict[tuple[int, int], list[int]] = {}
        self.in_flight: list[list[_Running]] = [[] for _ in range(self.ranks)]
        self.changed: set[int] = set()
        self.now = 0.0
        self.heap: list[tuple[float, int, _Running | int, int]] = []
        self.pushed = 0
        self.work: list[int] = []
        # the CPU of each rank: next instruction, its number as an operation, its clock, what it waits for, its events
        self.cursor = [0] * self.ranks
        self.op = [0] * self.ranks
        self.clock = [0.0] * self.ranks
        self.blocked: list[Done | None] = [None] * self.ranks
        self.recorded: list[dict[int, Done]] = [{} for _ in range(self.ranks)]
        columns = [[[0.0] * len(costs.ops) for _ in range(self.ranks)] for _ in range(4)]
        self.issue_s, self.clock_s, self.start_s, self.end_s = columns
        self.blocks: list[dict[int, tuple[float, float]]] = [{} for _ in range(self.ranks)]
        self.late: list[dict[int, float]] = [{} for _ in range(self.ranks)]

    def play(self) -> OpTimes:
        for rank in range(self.ranks):
            self.issue(rank)
        heap = self.heap
        while True:
            while self.work:
                self.advance(self.work.pop())
            if not heap or heap[0][0] > self.now:
                self.set_rates()
                if not heap:
                    break
            self.now, _, what, version = heappop(heap)
            if isinstance(what, int):
                self.work.append(what)
            elif what.version == version:
                self.finish(what)
        return self.columns()

    # -- the CPU

    def issue(self, rank: int) -> None:
        """Let a rank's CPU go on until it has to wait."""
        instructions, costs, base = self.program.instructions, self.costs, rank * self.queues
        recorded, queue, number_of = self.recorded[rank], self.queue, self.number_of
        clock = self.clock[rank]
        for number in range(self.cursor[rank], len(instructions)):
            i = instructions[number]
            kind = i.kind
            if kind in SILENT:
                continue
            target: Done | None = None  # what the CPU waits for
            if kind is Kind.OP:
                k = self.op[rank]
                self.op[rank] += 1
                cost = at_rank(costs.issue_s[k], rank)
                self.issue_s[rank][k] = clock + (cost if i.communicator or cost <= costs.launch_s else costs.launch_s)
                clock += cost
                self.clock_s[rank][k] = clock
                on = base + number_of[i.lane]
                if i.async_op:
                    own = base + number_of[f"async {i.communicator}"]
                    queue[own].append((on, len(queue[on])))
                    on = own
                queue[on].append(k)
                if i.async_op:
                    recorded[i.event] = (on, len(queue[on]))
                if self.done[on] == len(queue[on]) - 1 - i.async_op:  # else it comes to this by itself
                    self.work.append(on)
                if self.on_cpu and not i.communicator:
                    target = (on, len(queue[on]))
            elif kind is Kind.RECORD:
                on = base + number_of[i.lane]
                recorded[i.event] = (on, len(queue[on]))
            elif kind is Kind.WAIT or kind is Kind.WAIT_STREAM:
                on = base + number_of[i.lane]
                if kind is Kind.WAIT:
                    until = recorded[i.event]
                else:
                    other = base + number_of[i.other]
                    until = (other, len(queue[other]))
                if until[0] != on and until[1] > self.done[until[0]]:
                    queue[on].append(until)
                    if self.done[on] == len(queue[on]) - 1:
                        self.work.append(on)
                if self.on_cpu and i.lane is Lane.COMPUTE:
                    target = (on, len(queue[on]))
            elif kind is Kind.CPU_SYNC or kind is Kind.CPU_BLOCK:
                if i.event:
                    target = recorded[i.event]
                else:  # a whole stream, or the device: one entry that comes after all
                    on = base + number_of[i.lane or Lane.OTHER_COMM]
                    for other in range(base, base + self.queues) if i.lane is None else ():
                        queue[on].append((other, len(queue[other])))
                    self.work.append(on)
                    target = (on, len(queue[on]))
            if target is not None and self.done[target[0]] < target[1]:
                self.clock[rank], self.cursor[rank], self.blocked[rank] = clock, number + 1, target
                self.waiting[target[0]].append(~rank)
                return
        self.clock[rank], self.cursor[rank] = clock, len(instructions)

    def resume(self, rank: int) -> None:
        """The CPU waits no longer; it goes on, at the earliest now."""
        number = self.cursor[rank] - 1
        if self.now > self.clock[rank]:
            if self.program.instructions[number].kind is not Kind.OP:
                self.blocks[rank][number] = (self.clock[rank], self.now)
            self.clock[rank] = self.now
        if self.program.instructions[number].kind is Kind.OP:
            self.clock_s[rank][self.op[rank] - 1] = self.clock[rank]
        self.blocked[rank] = None
        self.issue(rank)

    # -- the streams

    def advance(self, on: int) -> None:
        """Let a queue do what it can now."""
        if self.busy[on]:
            return
        queue, done = self.queue[on], self.done[on]
        rank = on // self.queues
        while done < len(queue):
            head = queue[done]
            if isinstance(head, tuple):
                other, count = head
                if self.done[other] < count:
                    if self.parked[on] != done:
                        self.parked[on] = done
                        self.waiting[other].append(on)
                    break
                done += 1
                continue
            if self.issue_s[rank][head] > self.now:
                if self.timed[on] != head:
                    self.timed[on] = head
                    self.push(self.issue_s[rank][head], on)
            else:
                self.start(on, rank, head)
            break
        if done > self.done[on]:
            self.done[on] = done
            self.wake(on)

    def start(self, on: int, rank: int, k: int) -> None:
        i, costs = self.costs.ops[k], self.costs
        if not i.communicator:
            seconds, cost = at_rank(costs.seconds[k], rank), at_rank(costs.issue_s[k], rank)
            floor = 0.0
            if cost > costs.launch_s:
                floor = self.clock_s[rank][k] + seconds * costs.launch_s / cost
            self.run(_Running(k, [on], seconds, floor))
            return
        if self.turn[rank][i.communicator] != self.place[k]:
            self.due[rank][i.communicator, self.place[k]] = on
            return
        self.busy[on] = True  # it has come to the rendezvous, and stays
        group = group_of(i, rank, self.program.world_size, self.ranks)
        here = self.arrived.setdefault((k, group[0]), [])
        here.append(on)
        if len(here) == len(group):
            self.run(_Running(k, here, max([at_rank(costs.seconds[k], r) for r in group]), 0.0))

    def run(self, one: _Running) -> None:
        one.since = self.now
        for on in one.members:
            rank = on // self.queues
            self.busy[on] = True
            self.start_s[rank][one.k] = self.now
            self.in_flight[rank].append(one)
            self.changed.add(rank)

    def finish(self, one: _Running) -> None:
        i = self.costs.ops[one.k]
        for on in one.members:
            rank = on // self.queues
            self.end_s[rank][one.k] = self.now
            if one.since + one.left / one.rate < one.floor:
                self.late[rank][one.k] = self.clock_s[rank][one.k]
            self.in_flight[rank].remove(one)
            self.changed.add(rank)
            self.busy[on] = False
            self.done[on] += 1
            if i.communicator:
                self.turn[rank][i.communicator] += 1
                turn = (i.communicator, self.turn[rank][i.communicator])
                if turn in self.due[rank]:
                    self.work.append(self.due[rank].pop(turn))
            self.wake(on)
            self.work.append(on)

    def wake(self, on: int) -> None:
        """Whoever waits for this queue looks again."""
        if not self.waiting[on]:
            return
        woken, self.waiting[on] = self.waiting[on], []
        for who in woken:
            if who >= 0:
                self.parked[who] = -1
                self.work.append(who)
            else:
                target = self.blocked[~who]
                if target is not None and self.done[target[0]] >= target[1]:
                    self.resume(~who)
                else:
                    self.waiting[on].append(who)

    # -- the rates

    def set_rates(self) -> None:
        """Something started or ended: what runs beside it goes on at another rate."""
        if not self.changed:
            return
        kind_of, now = self.rates.kind_of, self.now
        touched: dict[int, _Running] = {}
        for rank in self.changed:
            running = self.in_flight[rank]
            for one, rate in zip(running, self.rates.of(tuple([kind_of[one.k] for one in running])), strict=True):
                one.local[rank] = rate
                touched[id(one)] = one
        self.changed.clear()
        for one in touched.values():
            rate = min(one.local.values())
            if rate == one.rate:
                continue
            one.left = max(0.0, one.left - (now - one.since) * one.rate)
            one.since, one.rate = now, rate
            one.version += 1
            end = now + one.left / rate
            self.push(end if end > one.floor else one.floor, one, one.version)

    def push(self, time: float, what: _Running | int, version: int = 0) -> None:
        self.pushed += 1  # so that equal times are taken in the order they were foretold
        heappush(self.heap, (time, self.pushed, what, version))

    def columns(self) -> OpTimes:
        tables = [self.issue_s, self.clock_s, self.start_s, self.end_s]
        issue_s, clock_s, start_s, end_s = [list(np.array(table).T.copy()) for table in tables]
        never = (-np.inf, -np.inf)
        waits = [np.array([b.get(n, never) for b in self.blocks]).T for n in sorted(set().union(*self.blocks))]
        blocks = {n: (w[0], w[1]) for n, w in zip(sorted(set().union(*self.blocks)), waits, strict=True)}
        late = {k: np.array([one.get(k, np.nan) for one in self.late]) for k in set().union(*self.late)}
        return OpTimes(issue_s, clock_s, start_s, end_s, blocks, late)
