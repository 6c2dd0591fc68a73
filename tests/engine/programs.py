"""Programs for the engine's tests: small models, and hypothesis strategies for programs of every kind."""

import math
from collections import defaultdict

from hypothesis import strategies as st

from fsdp_sim.schedule import Instruction, Kind, Param, Program, Unit, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COMM_LANES, Lane, Memory, Op, Phase


def layers_only(n, rows=8):
    """A root without parameters over n equal layers."""
    return [Unit("root", segments=(...,)), *(Unit(f"layers.{i}", (Param("weight", (rows, 4)),)) for i in range(n))]


def durations(forward=25.0, backward=50.0, gather=10.0, scatter=10.0):
    """Seconds by kind of operation, the same for each unit; copies and the optimizer are free."""
    by_op = {Op.FWD: forward, Op.BWD: backward, Op.ALL_GATHER: gather, Op.REDUCE_SCATTER: scatter}

    class ByOp(defaultdict):
        def __missing__(self, key):
            return by_op.get(key[0], 0.0)

    return ByOp()


def by_hand(*instructions, world_size=1, plan=None):
    """A program of instructions given as dicts of their fields, in step 0."""
    at = {"step": 0, "micro_batch": 0, "phase": Phase.FORWARD}
    return Program((), plan or Plan(), world_size, tuple(Instruction(**at | fields) for fields in instructions))


@st.composite
def streams(draw):
    """Random operations, collectives, records and waits on random streams, and their durations on each rank."""
    ranks = draw(st.integers(1, 4))
    sizes = {"one": ranks, "shard": draw(st.sampled_from([d for d in (1, 2, 3, 4) if ranks % d == 0]))}
    sizes["replicate"] = ranks // sizes["shard"]
    lanes = list(Lane)
    comm = sorted(COMM_LANES)
    instructions, seconds, recorded = [], {}, []

    def add(kind, **fields):
        instructions.append(Instruction(kind=kind, step=0, micro_batch=0, phase=Phase.FORWARD, **fields))

    kinds = ["op", "op", "collective", "collective", "record", "wait", "wait_stream", "cpu", "silent"]
    for k in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(kinds))
        if kind in ("op", "collective"):
            together = kind == "collective"
            op = Op.ALL_GATHER if together else Op.FWD
            lane = draw(st.sampled_from(comm if together else lanes))
            name = draw(st.sampled_from(sorted(sizes))) if together else ""
            fields = {"communicator": name, "group_size": sizes[name]} if together else {}
            if together and draw(st.booleans()):
                recorded.append((len(recorded) + 1, lane))
                fields |= {"async_op": True, "event": len(recorded)}
            add(Kind.OP, lane=lane, op=op, unit=f"u{k}", **fields)
            seconds[op, f"u{k}"] = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
        elif kind == "record":
            lane = draw(st.sampled_from(lanes))
            recorded.append((len(recorded) + 1, lane))
            add(Kind.RECORD, lane=lane, event=len(recorded), event_lane=lane)
        elif kind == "wait" and recorded:
            event, lane = draw(st.sampled_from(recorded))
            add(Kind.WAIT, lane=draw(st.sampled_from(lanes)), event=event, event_lane=lane)
        elif kind == "cpu":  # for an event, a stream, or the device
            lane = draw(st.sampled_from([None, *lanes]))
            event, of = draw(st.sampled_from(recorded)) if recorded and draw(st.booleans()) else (0, None)
            waits_for = {"event": event, "event_lane": of} if event else {"lane": lane}
            add(draw(st.sampled_from([Kind.CPU_SYNC, Kind.CPU_BLOCK])), **waits_for)
        elif kind == "silent":
            lane, unit = draw(st.sampled_from(lanes)), f"u{k}"
            add(Kind.HOOK, hook="reshard", unit=unit)
            add(Kind.ALLOC, lane=lane, op=Op.ALLOC, unit=unit, bytes=8, category=Memory.UNSHARDED)
            add(Kind.FREE, lane=lane, op=Op.FREE, unit=unit, bytes=8, category=Memory.UNSHARDED)
            add(Kind.RECORD_STREAM, lane=draw(st.sampled_from(lanes)), unit=unit, category=Memory.UNSHARDED)
        else:
            lane, other = draw(st.permutations(lanes))[:2]
            add(Kind.WAIT_STREAM, lane=lane, other=other)
    return Program((), Plan(), ranks, tuple(instructions)), seconds, ranks


plans = st.one_of(
    st.builds(
        Plan,
        reshard_after_forward=st.sampled_from([True, False, None, 2]),
        forward_prefetch=st.sampled_from([None, 1, 2]),
        backward_prefetch=st.sampled_from([None, 1, 2]),
        grad_accum=st.integers(1, 2),
        shard_size=st.sampled_from([None, 2]),
        separate_reduce_scatter_group=st.booleans(),
        post_optim_event=st.booleans(),
        unshard_async_op=st.booleans(),
        reduce_scatter_max_input_buffers=st.integers(1, 2),
        cpu_offload=st.booleans(),
    ).filter(lambda plan: not (plan.reshard_after_forward == 2 and plan.shard_size == 2)),
    st.builds(
        Plan,
        api=st.just("fsdp1"),
        sharding_strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        backward_prefetch=st.sampled_from([None, "BACKWARD_POST", "none"]),
        limit_all_gathers=st.booleans(),
        grad_accum=st.integers(1, 2),
        param_dtype=st.sampled_from([None, "bf16"]),
    ),
)


@st.composite
def steps_of_training(draw):
    """Steps of the toy model with any plan, on some of 4 ranks."""
    ranks = draw(st.integers(1, 4))
    program = build(toy(draw(st.integers(1, 3))), draw(plans), 4, steps=draw(st.integers(1, 2)))
    keys = sorted({(i.op, i.unit) for i in program.ops})
    return program, {key: [draw(st.integers(0, 9)) for _ in range(ranks)] for key in keys}, ranks


anything = st.one_of(streams(), steps_of_training())
devices = st.sampled_from(["gpu", "cpu"])


@st.composite
def issuing(draw):
    """What issuing costs: (issue_s, launch_s), of numbers that halve exactly."""
    if draw(st.booleans()):
        return float(draw(st.integers(0, 2))), math.inf
    slow = draw(st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0]))
    quick = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return (lambda i: slow if i.op in (Op.FWD, Op.BWD, Op.ALL_GATHER) else quick), draw(
        st.sampled_from([math.inf, 1.0])
    )
