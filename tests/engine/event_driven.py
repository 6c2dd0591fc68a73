"""A second replay that shares nothing with the first: it moves a clock from event to event.

Every rank has a CPU that issues and streams that hold queues. At each moment whatever can move moves; then the
clock jumps to the next moment at which something ends. Simple rather than fast: every queue is looked at every time.
"""

import math
from collections import defaultdict, deque

from fsdp_sim.schedule import Kind
from fsdp_sim.timeline import Lane

SILENT = (Kind.HOOK, Kind.ALLOC, Kind.FREE, Kind.RECORD_STREAM)


def replay_event_driven(program, durations, ranks, on_cpu=False, issue_s=0.0, launch_s=math.inf):
    """Start and end of each op: {(rank, number of the op in the program): (start_s, end_s)}.

    ``issue_s`` is a number or a function of the instruction.
    """
    instructions = [i for i in program if i.kind not in SILENT]
    numbers = {k: n for n, k in enumerate(k for k, i in enumerate(instructions) if i.kind is Kind.OP)}
    everyone = range(ranks)
    order = [defaultdict(list) for _ in everyone]  # rank -> communicator -> its collectives, in issue order
    for rank in everyone:
        for k, i in enumerate(instructions):
            if i.communicator:
                order[rank][i.communicator].append(k)
    queue = [defaultdict(deque) for _ in everyone]  # rank -> stream -> what was issued on it
    cursor = [0] * ranks  # what each CPU issues next
    ready_at = [0.0] * ranks  # when each CPU is done with what it does now
    issuing = [""] * ranks  # whether ready_at has the cost of the first kernel ("first"), or of all ("all")
    blocked_on = [None] * ranks
    all_issued = {}  # (rank, op) -> when its last kernel was issued
    running = {}  # (rank, stream) -> (end, instruction)
    passed = [set() for _ in everyone]  # instructions done, and (stream, number of issues) of wait_stream marks
    happened = [set() for _ in everyone]  # events
    times = {}

    def seconds(i, rank):
        value = durations[i.op, i.unit]
        return value[rank] if isinstance(value, (list, tuple)) else value

    def cost(i):
        return issue_s(i) if callable(issue_s) else issue_s

    def group(i, rank):
        """The ranks of a collective: blocks of consecutive ones, or those at equal positions of the blocks."""
        if i.communicator == "replicate":
            block = program.world_size // i.group_size
            return tuple(r for r in everyone if r % block == rank % block)
        return tuple(r for r in everyone if r // i.group_size == rank // i.group_size)

    def issue(rank, now):
        if blocked_on[rank] is not None:
            kind, what = blocked_on[rank]
            if not what <= (passed[rank] if kind == "passed" else happened[rank]):
                return False
            blocked_on[rank] = None
        if ready_at[rank] > now or cursor[rank] == len(instructions):
            return False
        k = cursor[rank]
        i = instructions[k]
        whole = cost(i) if i.kind is Kind.OP else 0.0
        first = whole if i.communicator else min(whole, launch_s)
        if first and not issuing[rank]:
            issuing[rank], ready_at[rank] = "first", now + first
            return True
        if issuing[rank] != "all":
            enqueue(rank, k, i)
            all_issued[rank, k] = now + (whole - first)
            if whole > first:
                issuing[rank], ready_at[rank] = "all", now + (whole - first)
                return True
        issuing[rank] = ""
        cursor[rank] += 1
        computes = i.kind is Kind.OP and not i.communicator
        waits = i.kind in (Kind.WAIT, Kind.WAIT_STREAM) and i.lane is Lane.COMPUTE
        if on_cpu and (computes or waits):
            blocked_on[rank] = ("passed", {k})
        if i.kind in (Kind.CPU_SYNC, Kind.CPU_BLOCK):
            marks = {("mark", (k, lane)) for lane in waited_for(rank, i)}
            blocked_on[rank] = ("happened", {i.event}) if i.event else ("passed", marks)
        return True

    def waited_for(rank, i):
        """The queues whose end the CPU waits for: a stream, or all of the device."""
        return [i.lane] if i.lane is not None else list(queue[rank])

    def enqueue(rank, k, i):
        if i.kind in (Kind.CPU_SYNC, Kind.CPU_BLOCK):
            for lane in waited_for(rank, i) if not i.event else ():
                queue[rank][lane].append(("mark", (k, lane)))
            return
        if i.kind is Kind.WAIT_STREAM:
            queue[rank][i.other].append(("mark", k))
        if i.async_op:
            group_stream = f"process group {i.communicator}"
            queue[rank][i.lane].append(("mark", k))
            queue[rank][group_stream] += [(Kind.WAIT_STREAM, k), (Kind.OP, k), (Kind.RECORD, k)]
            return
        queue[rank][i.lane].append((i.kind, k))

    def advance(rank, lane, now):
        line = queue[rank][lane]
        if (rank, lane) in running or not line:
            return False
        kind, k = line[0]
        if kind == "mark":
            passed[rank].add(("mark", k))
            line.popleft()
            return True
        i = instructions[k]
        if kind is Kind.OP:
            if i.communicator:  # moved by rendezvous
                return False
            end = now + seconds(i, rank)
            kernels = max(1.0, cost(i) / launch_s)
            if kernels > 1:
                end = max(end, all_issued[rank, k] + seconds(i, rank) / kernels)
            running[rank, lane] = (end, k)
            times[rank, numbers[k]] = (now, end)
            return True
        if kind is Kind.RECORD:
            happened[rank].add(i.event)
        elif not (i.event in happened[rank] if kind is Kind.WAIT else ("mark", k) in passed[rank]):
            return False
        passed[rank].add(k)
        line.popleft()
        return True

    def place_of(rank, k):
        """The stream of a collective, if it is its turn there and on its communicator."""
        i = instructions[k]
        lane = f"process group {i.communicator}" if i.async_op else i.lane
        line = queue[rank][lane]
        if (rank, lane) in running or not line or line[0] != (Kind.OP, k):
            return None
        if any(r == rank and instructions[j].communicator == i.communicator for (r, _), (_, j) in running.items()):
            return None
        return lane

    def rendezvous(rank, name, now):
        if not order[rank][name]:
            return False
        k = order[rank][name][0]
        i = instructions[k]
        members = group(i, rank)
        lanes = [place_of(r, k) if order[r][name][:1] == [k] else None for r in members]
        if None in lanes:
            return False
        end = now + max(seconds(i, r) for r in members)
        for r, lane in zip(members, lanes, strict=True):
            running[r, lane] = (end, k)
            times[r, numbers[k]] = (now, end)
            order[r][name].pop(0)
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
                for name in order[rank]:
                    moved |= rendezvous(rank, name, now)
        now = min([end for end, _ in running.values()] + [t for t in ready_at if t > now], default=math.inf)
        if now == math.inf:
            break
    assert len(times) == ranks * len(numbers), "the reference is stuck"
    return times
