"""What laws speak of: seconds, bytes, counts, each a function of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from fsdp_sim.cost import kept_of
from fsdp_sim.schedule import policy_of
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import COLLECTIVES, Lane, Memory, Op, ring_share
from tests.laws.law import Outcome

SEGMENTS = (Op.FWD, Op.BWD, Op.RECOMPUTE)
REDUCTIONS = (Op.REDUCE_SCATTER, Op.ALL_REDUCE)
COPIES = frozenset(Op) - {*SEGMENTS, *COLLECTIVES, Op.OPTIM}


def busy(ops: Container[Op]) -> Callable[[Simulation], float]:
    """Seconds of operations, each as if it ran alone."""
    return lambda sim: sum(sim.costs.seconds(i) for i in sim.program.ops if i.op in ops)


def sent(ops: Container[Op]) -> Callable[[Simulation], float]:
    """Bytes that a rank sends in these collectives."""
    return lambda sim: sum(ring_share(i.op, i.group_size) * i.bytes for i in sim.program.ops if i.op in ops)


def moved(ops: Container[Op]) -> Callable[[Simulation], int]:
    """Bytes of the messages of collectives, of the data of copies."""
    return lambda sim: sum(i.bytes for i in sim.program.ops if i.op in ops)


def count(ops: Container[Op]) -> Callable[[Simulation], int]:
    return lambda sim: sum(i.op in ops for i in sim.program.ops)


def state(category: Memory) -> Callable[[Simulation], int]:
    return lambda sim: sum(b for (c, _), b in sim.program.state_bytes.items() if c is category)


def most(*categories: Memory) -> Callable[[Simulation], int]:
    """The most bytes of these categories at one moment."""
    return lambda sim: sim.memory.peak_of(categories)


def kept(sim: Simulation) -> int:
    """Bytes that one micro-batch's forward keeps for the backward."""
    again = {i.unit for i in sim.program.ops if i.op is Op.RECOMPUTE}
    policy = policy_of(sim.plan)
    return sum(
        w.output_bytes + kept_of(w.outputs, policy).bytes if name in again else w.saved_bytes
        for name, w in sim.workload.work.items()
    )


def flops(sim: Simulation) -> float:
    return sum(w.forward_flops + w.backward_flops for w in sim.workload.work.values())


def memory_bytes_of_kernels(sim: Simulation) -> float:
    kernels = (k for w in sim.workload.work.values() for k in (*w.forward, *w.backward))
    return sum(k.bytes * k.count for k in kernels)


def order(sim: Simulation) -> Any:
    """Which operations, on which streams; without bytes, ranks and dtypes."""
    return [(i.op, i.unit, i.lane, i.phase, i.micro_batch) for i in sim.program.ops]


def exposed(sim: Simulation) -> float:
    return sim.exposed_comm_s


STEP = Outcome("the step time", lambda sim: sim.step_time_s)
REPLAY = Outcome("the time of a step's operations", lambda sim: sim.run.step_time_s())
BETWEEN = Outcome("the time between steps", lambda sim: sim.between_steps_s)
THROUGHPUT = Outcome("the throughput", lambda sim: sim.tokens_per_s_per_gpu)
MFU = Outcome("the MFU", lambda sim: sim.mfu)
EXPOSED = Outcome("the exposed communication", exposed)
COMPUTE = Outcome("the time of computing", busy(SEGMENTS))
FORWARD = Outcome("the time of the forward", busy({Op.FWD}))
BACKWARD = Outcome("the time of the backward", busy({Op.BWD}))
AGAIN = Outcome("the time of recomputing", busy({Op.RECOMPUTE}))
COPYING = Outcome("the time of copies", busy(COPIES))
OPTIMIZER = Outcome("the time of the optimizer", busy({Op.OPTIM}))
COMM = Outcome("the time of collectives", busy(COLLECTIVES))
GATHERING = Outcome("the time of all-gathers", busy({Op.ALL_GATHER}))
REDUCING = Outcome("the time of reductions", busy(REDUCTIONS))
ISSUING = Outcome("the CPU's time to issue", lambda sim: sum(sim.costs.issue_s(i) for i in sim.program.ops))

PROGRAM = Outcome("the program", lambda sim: sim.program.instructions)
ORDER = Outcome("the order of operations", order)
OPS = Outcome("the number of operations", lambda sim: len(sim.program.ops))
GATHERS = Outcome("the number of all-gathers", count({Op.ALL_GATHER}))
REDUCTION_COUNT = Outcome("the number of reductions", count(REDUCTIONS))
RECOMPUTATIONS = Outcome("the number of recomputations", count({Op.RECOMPUTE}))
SENT = Outcome("what a rank sends", sent(COLLECTIVES))
SENT_GATHERED = Outcome("what a rank sends in all-gathers", sent({Op.ALL_GATHER}))
SENT_REDUCED = Outcome("what a rank sends in reductions", sent(REDUCTIONS))
GATHERED = Outcome("what all-gathers gather", moved({Op.ALL_GATHER}))
SCATTERED = Outcome("what is reduce-scattered", moved({Op.REDUCE_SCATTER}))
ALL_REDUCED = Outcome("what is all-reduced", moved({Op.ALL_REDUCE}))
TO_HOST = Outcome("what is copied to the host and back", moved({Op.H2D, Op.D2H}))

PEAK = Outcome("the peak of memory", lambda sim: sim.peak_memory_bytes)
SHARDS = Outcome("the memory of parameters between steps", state(Memory.SHARDED))
STATES = Outcome("the memory of optimizer states", state(Memory.OPTIMIZER))
WHOLE = Outcome("the most of whole parameters at once", most(Memory.UNSHARDED, Memory.AG_OUTPUT))
GRADIENTS = Outcome("the most of gradients at once", most(Memory.UNSHARDED_GRAD, Memory.RS_INPUT, Memory.RS_OUTPUT))
WHOLE_GRADIENTS = Outcome("the most of whole gradients at once", most(Memory.UNSHARDED_GRAD))
ACTIVATIONS = Outcome("the most of activations at once", most(Memory.ACTIVATION, Memory.CHECKPOINT, Memory.LOGITS))
KEPT = Outcome("what a forward keeps", kept)
LIMIT = Outcome("the memory that can be used", lambda sim: sim.memory_limit_bytes)

PARAMS = Outcome("the number of parameters", lambda sim: sim.workload.param_count)
UNITS = Outcome("the number of units", lambda sim: len(sim.workload.units))
FLOPS = Outcome("the work of a micro-batch", flops)
KERNEL_BYTES = Outcome("what kernels read and write", memory_bytes_of_kernels)
TOKENS = Outcome("the number of tokens", lambda sim: sim.workload.tokens)

TIMES = (STEP, COMPUTE, COPYING, OPTIMIZER, COMM, ISSUING, EXPOSED)
ALL = (*TIMES, PROGRAM, PEAK, KEPT, PARAMS, FLOPS)
LANES = (Lane.COMPUTE, Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE)
