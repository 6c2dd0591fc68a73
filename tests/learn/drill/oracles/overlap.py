"""Answers about overlap: queues stepped through by hand, torch's recorded program, and brute force."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from fsdp_sim import engine
from fsdp_sim.learn.drill.questions.overlap.common import blocks
from fsdp_sim.learn.drill.questions.overlap.hidden import REMEDIES
from fsdp_sim.learn.drill.questions.overlap.price import BOUNDS
from fsdp_sim.spec import Model, param_shapes
from fsdp_sim.timeline import Op, Phase
from tests.learn.drill.oracles.schedule import between, lines_of


def forward_s(gathers_s: list[float], forwards_s: list[float], ahead: int = 10**9) -> tuple[float, float]:
    """A wire and a compute queue: when the last forward ends, and how long compute stood idle.

    Args:
        ahead: before which block's forward a gather is issued: 0 its own, 1 that of the block before.
    """
    wire = compute = idle = 0.0
    starts: list[float] = []
    for i, (gather, forward) in enumerate(zip(gathers_s, forwards_s, strict=True)):
        issued = compute if ahead == 0 else starts[i - ahead] if i >= ahead else 0.0
        wire = max(wire, issued) + gather
        idle += max(0.0, wire - compute)
        starts.append(max(wire, compute))
        compute = starts[-1] + forward
    return compute, idle


@functools.cache
def tokens_that_hide(flops_per_s: float, bytes_per_s: float, ranks: int, **_: object) -> float:
    """Bisection over tokens: only the first gather of three blocks of a million parameters may leave compute idle."""
    gather_s = sum(2 * 1e6 / ranks / bytes_per_s for _step in range(ranks - 1))  # a ring, chunk by chunk
    low, high = 1.0, 1e8
    while high / low > 1.001:
        tokens = math.sqrt(low * high)
        idle = forward_s([gather_s] * 3, [2 * 1e6 * tokens / flops_per_s] * 3)[1]
        low, high = (low, tokens) if idle <= gather_s * (1 + 1e-9) else (tokens, high)
    return high


@functools.cache
def forward_time(layers: int, gather_s: float, forward_s: float, **_: object) -> float:
    return forward_through(layers, gather_s, forward_s, 10**9)


def forward_through(layers: int, gather_s: float, each_s: float, ahead: int) -> float:
    return forward_s([gather_s] * layers, [each_s] * layers, ahead)[0]


@functools.cache
def exposed_s(layers: int, wire_s: float, forward_s: float) -> float:
    """A step from end to end of its pieces, in ticks: how long the wire works and compute does not.

    The wire takes, in this order, gathers of forward, and in backward the gather of the next block before the
    reduce-scatter of this one; a gather of backward is asked for when the block behind it begins.
    """
    tick = 1e-3
    wire_ticks, forward_ticks = round(wire_s / tick), round(forward_s / tick)
    orders = [("gather", i) for i in range(layers)] + [("again", layers - 1)]
    for i in reversed(range(layers)):
        orders += [("again", i - 1)] * (i > 0) + [("reduce", i)]
    work = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    needs = {("forward", i): ("gather", i) for i in range(layers)}
    needs |= {("backward", i): ("again", i) for i in range(layers)} | {
        ("reduce", i): ("backward", i) for i in range(layers)
    }
    after = {("again", i): ("begun", i + 1) for i in range(layers - 1)} | {
        ("again", layers - 1): ("forward", layers - 2)
    }
    done: set[tuple[str, int]] = set()
    queues = {"wire": orders, "compute": work}
    running: dict[str, tuple[tuple[str, int], int]] = {}
    now = exposed = 0
    while queues["wire"] or queues["compute"] or running:
        for queue in queues:
            if queue in running and running[queue][1] <= now:
                done.add(running.pop(queue)[0])
        for queue, waiting in queues.items():
            if queue not in running and waiting and {needs.get(waiting[0]), after.get(waiting[0])} <= done | {None}:
                one = waiting.pop(0)
                length = {"forward": forward_ticks, "backward": 2 * forward_ticks}.get(one[0], wire_ticks)
                running[queue] = (one, now + length)
                if one[0] == "backward":
                    done.add(("begun", one[1]))
        if "wire" not in running and queues["wire"] and {needs.get(orders[0]), after.get(orders[0])} <= done | {None}:
            continue  # a backward that has just begun asks for the next gather in the same tick
        if not running:
            break
        until = min(end for _, end in running.values())
        exposed += (until - now) * ("wire" in running and "compute" not in running)
        now = until
    return exposed * tick


def exposed_in_a_step(layers: int, wire_s: float, forward_s: float, **_: object) -> float:
    return exposed_s(layers, wire_s, forward_s)


@functools.cache
def who_sets_the_pace(tokens: int, tflops: int, gbytes: float, reduce_bytes: int, reshard: bool, **_: object) -> str:
    """The engine plays torch's program, blocks of a billion parameters: in which pass does compute idle?"""
    takes_s = {
        Op.ALL_GATHER: 2e9 / (gbytes * 1e9), Op.REDUCE_SCATTER: reduce_bytes * 1e9 / (gbytes * 1e9),
        Op.FWD: 2e9 * tokens / (tflops * 1e12), Op.BWD: 4e9 * tokens / (tflops * 1e12),
    }  # fmt: skip
    program = blocks(16, reshard_after_forward=reshard)
    run = engine.run(program, lambda i: takes_s.get(i.op, 0.0) if i.unit.startswith("layers") else 0.0)
    words = []
    for phase, op in ((Phase.FORWARD, Op.FWD), (Phase.BACKWARD, Op.BWD)):
        starts = [
            float(start) for i, start in zip(run.ops, run.columns.start_s, strict=True)
            if i.op is op and i.phase is phase and i.unit.startswith("layers")
        ]  # fmt: skip
        words.append("the network" if (starts[12] - starts[6]) / 6 > takes_s[op] * 1.01 else "compute")
    if words[0] == words[1]:
        return f"{words[0]} in both passes"
    return f"{words[0]} in forward, {words[1]} in backward"


@functools.cache
def forward_on_a_late_cpu(layers: int, gather_s: float, forward_s: float, explicit: bool, **_: object) -> float:
    return forward_through(layers, gather_s, forward_s, 1 if explicit else 0)


@functools.cache
def held_by_prefetch(model: str, depth: int, **_: object) -> float:
    """Buffers alive in the forward that torch itself issued, block by block, times a block's tensors."""
    settings: dict[str, Any] = {"forward_prefetch": depth} if depth else {}
    alive = most = 0
    for line in between(lines_of(8, **settings), "forward"):
        if "(layers" in line and line.split()[2].startswith(("ag_output", "unsharded")):
            alive += {"alloc": 1, "free": -1}.get(line.split()[0], 0)
            most = max(most, alive)
    of_model = Model.preset(model)
    one_more = dataclasses.replace(of_model, n_layer=of_model.n_layer + 1)
    block = sum(math.prod(shape) for _, *shape in param_shapes(one_more, 1024))
    return most * 2 * (block - sum(math.prod(shape) for _, *shape in param_shapes(of_model, 1024)))


@functools.cache
def further_block_of_backward(mode: str, more: int, wire_s: float, backward_s: float, **_: object) -> float:
    """Backward of twenty blocks and of some more, as recurrences of when each collective and each block ends."""
    separate, none = "separate" in mode, "switched off" in mode

    def ends(n: int) -> float:
        gather_queue = reduce_queue = compute = copied_out = reduced = 0.0
        gathered = wire_s if not none else 0.0
        gather_queue = gathered
        for _block in range(n):
            if none:  # asked for when it is needed, behind the reduce-scatter of the block before
                gathered = max(gather_queue, reduce_queue) + wire_s
            copied_out = max(compute, gathered)
            compute = copied_out + backward_s
            if not none:  # the next one is asked for when this one has been copied out, before this reduce-scatter
                gathered = max(gather_queue, copied_out, 0.0 if separate else reduce_queue) + wire_s
                gather_queue = gathered
                compute = max(compute, reduced)  # one buffer: the last reduce-scatter must have ended
            reduced = max(compute, reduce_queue, 0.0 if separate else gather_queue) + wire_s
            reduce_queue = reduced
            if none:
                gather_queue = reduced
        return reduced

    return ends(20 + more) - ends(20)


@functools.cache
def what_bounds_the_gathers(mode: str, **_: object) -> str:
    """From the program that torch itself issued: what stops whom between two all-gathers."""
    if mode == "FSDP2":
        forward = between(lines_of(4), "forward")
        compute_events = {
            line.split()[2] for line in forward if line.startswith("record") and line.split()[1] == "compute"
        }
        waits = [line.split()[2] for line in forward if line.startswith("wait ") and line.split()[1] == "all_gather"]
        return BOUNDS["event" if set(waits) & compute_events else "nothing"]
    forward = between(lines_of(4, api="fsdp1", limit_all_gathers=mode.endswith("True")), "forward")
    return BOUNDS["cpu" if any(line.startswith("CPU_BLOCK") for line in forward) else "nothing"]


def what_would_hide_it(before: int, needed: int, issued: int, queue: int, takes: int) -> str:
    """Which single cause, taken away, lets the gather end in time; tried on a line of milliseconds."""

    def in_time(issued: int, queue: int) -> bool:
        left = takes
        for now in range(needed):
            left -= now >= issued and now >= queue
        return left <= 0

    if in_time(issued, queue):
        return REMEDIES["none"]
    found = [name for name, ok in (("earlier", in_time(before, queue)), ("own queue", in_time(issued, before))) if ok]
    assert len(found) < 2
    return REMEDIES[found[0] if found else "fewer bytes"]


@functools.cache
def latency_of_small_units(layers: int, micros: int, **_: object) -> float:
    """What torch itself issues for two units more, all of it latency."""
    few, many = (
        sum(f" {op}(" in line for line in lines_of(n) for op in ("ALL_GATHER", "REDUCE_SCATTER")) for n in (2, 4)
    )
    each = (many - few) / 2
    return sum(each * micros * 1e-6 for _unit in range(7 * layers - layers))


@functools.cache
def bytes_worth_their_latency(micros: int, gbytes: int, share: int, **_: object) -> float:
    low, high = 1.0, 1e12
    while high / low > 1.0001:
        n_bytes = math.sqrt(low * high)
        latency_s = micros * 1e-6
        low, high = (
            (low, n_bytes) if latency_s / (latency_s + n_bytes / (gbytes * 1e9)) <= share / 100 else (n_bytes, high)
        )
    return high
