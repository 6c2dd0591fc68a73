"""What can keep compute waiting: the culprits that a diagnosis knows."""

from __future__ import annotations

from fsdp_sim.timeline import Word


class Culprit(Word):
    """Why compute stood idle. The value is what people read."""

    FIRST_ALL_GATHER = "first all-gather"  # nothing had been computed that could hide it
    LAST_REDUCTIONS = "last reductions"  # the optimizer needs what nothing is left to hide
    LAST_ALL_GATHERS = "last all-gathers"  # ZeRO: the updated parameters are gathered with nothing left to compute
    IN_OPTIMIZER = "collectives of the optimizer"  # a norm to clip by, Muon's matrices: it goes on when they end
    HEAD_OF_LINE = "queued behind a reduction"  # the gather stood behind a reduction on their communicator
    RATE_LIMITER = "rate limiter"  # FSDP1's limiter held the CPU back before it issued the gather
    CPU_LATE = "issued late by the CPU"  # the device was done before the CPU had issued more
    LAUNCHES = "kernels launched late by the CPU"  # as CPU_LATE, inside of an operation
    COMPUTING_THREAD = "issued late by the computing thread"  # on a CPU: who computes cannot issue meanwhile
    SYNCHRONOUS = "synchronous collective"  # torch on a CPU: the thread stays in the collective until it is over
    ASYNCHRONOUS = "asynchronous all-gather"  # issued on the compute stream, it starts after what was computed before
    RS_BUFFER = "reduce-scatter buffer"  # gradients wait until an earlier reduce-scatter has read its input buffer
    REDUCTION = "reduction"  # compute goes on only after a reduction of earlier gradients
    TOKENS = "tokens of experts"  # an all-to-all: tokens travel to the ranks of their experts, or back
    IN_LINE = "collective between computations"  # it begins when compute ends, and compute goes on when it ends
    PIPELINE = "neighbour in the pipeline"  # activations or gradients of another stage
    NETWORK = "network too slow"  # the gather started as early as it could, and lasts longer than what could hide it
    SMALL = "unit too small"  # as NETWORK, but the message is so small that fixed costs dominate
    SLOW_RANK = "slower rank"  # the collective waits for the last rank of its group
    CPU_OPTIMIZER = "optimizer on the CPU"  # offloaded: until it returns, the thread that issues is in it
    CPU_SUMS = "sums on the CPU"  # offloaded: gradients of another micro-batch are added there, and compute waits
    ACTIVATIONS = "copies of activations"  # offloaded: on their way to the CPU, or back
    COPIES = "copies"  # the gather waited for a copy or cast of its input, or compute for one
    HOST = "host gap"  # no FSDP in it: the optimizer, data, logging, Python between operations
    BETWEEN_KERNELS = "between kernels"  # the microseconds a device takes from one operation to the next
    UNKNOWN = "unknown"  # the timeline does not say
