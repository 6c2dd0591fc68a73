"""A second replay that shares nothing with the first: it moves a clock from event to event.

Every rank has a CPU that issues and streams that hold queues. At each moment whatever can move moves; then the
clock jumps to the next moment at which something ends.
"""

import math
from collections import defaultdict, deque

from fsdp_sim.schedule import Kind
from fsdp_sim.timeline import Lane


def replay_event_driven(program, durations, ranks, on_cpu=False, issue_s=0.0):
    """Start and end of each op: {(rank, number of the op in the program): (start_s, end_s)}."""
    instructions = [i for i in program if i.kind not in (Kind.HOOK, Kind.ALLOC, Kind.FREE)]
    numbers = {k: n for n, k in enumerate(k for k, i in enumerate(instructions) if i.kind is Kind.OP)}
    order = defaultdict(deque)  # communicator -> its collectives, in issue order
    for k, i in enumerate(instructions):
        if i.communicator:
            order[i.communicator].append(k)
    everyone = range(ranks)
    queue = [defaultdict(deque) for _ in everyone]  # rank -> stream -> what was issued on it
    cursor = [0] * ranks  # what each CPU issues next
    ready_at = [0.0] * ranks  # when each CPU is done with what it does now
    issuing = [False] * ranks  # whether ready_at already has the cost of issuing
    blocked_on = [None] * ranks
    running = {}  # (rank, stream) -> (end, instruction)
    passed = [set() for _ in everyone]  # instructions done, and (stream, number of issues) of wait_stream marks
    happened = [set() for _ in everyone]  # events
    times = {}

    def seconds(i, rank):
        value = durations[i.op, i.unit]
        return value[rank] if isinstance(value, (list, tuple)) else value

    def issue(rank, now):
        if blocked_on[rank] is not None:
            if blocked_on[rank] not in passed[rank]:
                return False
            blocked_on[rank] = None
        if ready_at[rank] > now or cursor[rank] == len(instructions):
            return False
        k = cursor[rank]
        i = instructions[k]
        if i.kind is Kind.OP and issue_s and not issuing[rank]:
            issuing[rank], ready_at[rank] = True, now + issue_s
            return True
        issuing[rank] = False
        cursor[rank] += 1
        if i.kind is Kind.WAIT_STREAM:
            queue[rank][i.other].append(("mark", k))
        queue[rank][i.lane].append((i.kind, k))
        computes = i.kind is Kind.OP and not i.communicator
        waits = i.kind in (Kind.WAIT, Kind.WAIT_STREAM) and i.lane is Lane.COMPUTE
        if on_cpu and (computes or waits):
            blocked_on[rank] = k
        return True

    def advance(rank, lane, now):
        line = queue[rank][lane]
        if (rank, lane) in running or not line:
            return False
        kind, k = line[0]
        i = instructions[k]
        if kind is Kind.OP:
            if i.communicator:  # moved by rendezvous
                return False
            running[rank, lane] = (now + seconds(i, rank), k)
            times[rank, numbers[k]] = (now, now + seconds(i, rank))
            return True
        if kind == "mark":
            passed[rank].add(("mark", k))
        elif kind is Kind.RECORD:
            happened[rank].add(i.event)
        elif not (i.event in happened[rank] if kind is Kind.WAIT else ("mark", k) in passed[rank]):
            return False
        passed[rank].add(k)
        line.popleft()
        return True

    def rendezvous(name, now):
        if not order[name]:
            return False
        k = order[name][0]
        i = instructions[k]
        here = [(r, i.lane) for r in everyone]
        if any(place in running or not queue[place[0]][i.lane] or queue[place[0]][i.lane][0][1] != k for place in here):
            return False
        if any(instructions[j].communicator == name for _, j in running.values()):
            return False
        end = now + max(seconds(i, r) for r in everyone)
        for rank, lane in here:
            running[rank, lane] = (end, k)
            times[rank, numbers[k]] = (now, end)
        order[name].popleft()
        return True

    def finish(now):
        done = [place for place, (end, _) in running.items() if end <= now]
        for rank, lane in done:
            _, k = running.pop((rank, lane))
            queue[rank][lane].popleft()
            passed[rank].add(k)
        return bool(done)

    now = 0.0
    while True:
        moved = True
        while moved:
            moved = finish(now)
            for rank in everyone:
                moved |= issue(rank, now)
                for lane in list(queue[rank]):
                    moved |= advance(rank, lane, now)
            for name in order:
                moved |= rendezvous(name, now)
        now = min([end for end, _ in running.values()] + [t for t in ready_at if t > now], default=math.inf)
        if now == math.inf:
            break
    assert len(times) == ranks * len(numbers), "the reference is stuck"
    return times
