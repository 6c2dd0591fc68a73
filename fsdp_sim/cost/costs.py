"""`Costs`: seconds of every operation of a program, for one workload on one cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from fsdp_sim.cost.calibration import Calibration, fitted
from fsdp_sim.cost.collectives import channels, collective_s, offload_s
from fsdp_sim.cost.kernels import kernel_s
from fsdp_sim.cost.linears import orthogonalisation
from fsdp_sim.cost.work import Kernel, Workload, recomputed
from fsdp_sim.schedule import CHECKPOINT, DTYPE_BYTES, Instruction, matrices, policy_of
from fsdp_sim.spec import OPTIMIZERS, Cluster, Plan, shards_of
from fsdp_sim.timeline import COLLECTIVES, Lane, Op

# How often a copy moves its bytes: it reads them and writes them. A cast or a division does the same; adding reads
# two and writes one.
COPY_PASSES = {
    Op.AG_CAST: 2, Op.AG_COPY_IN: 2, Op.AG_COPY_OUT: 2, Op.CLONE: 2, Op.UPCAST: 2, Op.RS_COPY_IN: 2, Op.RS_COPY: 2,
    Op.DIV: 2, Op.GRAD_CAST: 2, Op.ACCUMULATE: 3, Op.NORM: 1, Op.CLIP: 2,
}  # fmt: skip
# What casting an fp32 shard to fp8 moves, for each byte of fp8, in eager kernels (torchao's float8_utils.py): times the
# scale, clamped, to fp8; and before that, where the scale is not known, the largest absolute value.
FP8_CAST_PASSES, AMAX_PASSES = 8 + 8 + 5, 8 + 4
COMPUTATIONS = frozenset({Op.FWD, Op.BWD, Op.RECOMPUTE})
OFFLOADS = frozenset({Op.H2D, Op.D2H, Op.ACT_D2H, Op.ACT_H2D})
_BWD, _OPTIM, _AG_CAST, _CPU = Op.BWD, Op.OPTIM, Op.AG_CAST, Lane.CPU  # Python 3.11 is slow to look them up
# How often a byte of a collective passes through the memory of a GPU: what arrives is written, and read to be sent on
# or copied out; a reduction also reads what it adds to.
MEMORY_PASSES = {Op.REDUCE_SCATTER: 3, Op.ALL_REDUCE: 5}
# The CPU's time to issue one counted kernel, with Python, autograd, the dispatcher, the small kernels that go with it
# and its part of FSDP's hooks; and a copy that FSDP issues itself. Fitted to `cpu_s` of tests/bench/one_h200.jsonl (16
# Xeon cores, torch 2.11): 97 us eager, 99 us compiled: a compiler saves kernels, not time for each.
LAUNCH_S, COPY_LAUNCH_S = 1e-4, 2e-5
MOST_LOST = 8.0  # of its own work a kernel loses at most this many times (`Calibration.kernel_gap_s`); rows cannot tell
# And a collective, with its hooks, buffers and events. With the copies a unit's step costs what torch's hooks were
# measured to take on a CPU, about 0.25 ms (tests/bench/bench_mini.py).
COLLECTIVE_ISSUE_S = 5e-5
# What the CPU computes, where shards are offloaded, reaches this part of its memory's peak if the ranks of a node share
# out its cores (unverified). torchrun gives a rank one thread unless it is told otherwise (OMP_NUM_THREADS): that is
# several times slower on a server.
HOST_FRACTION = 0.4
# Operator by operator, AdamW's temporaries are not there to be reused: 5 to 7 times the time of one pass
# (DeepSpeed 0.19.8, ops/adam/cpu_adam.py), where the bytes alone make 20 / 7.
HOST_TEMPORARIES = 2.1
FOREACH_FRACTION = 0.7  # of a copy's bandwidth torch's foreach kernels reach: AdamW of Llama 3.2 1B, 35 ms on one H200


# The rates of a CPU core are measured as they are used: `fsdp-sim calibrate`. What the CPU takes to issue a kernel is
# then part of the kernel's own time, for it is the CPU that computes.
MEASURED = Calibration(
    matmul_fraction=1.0, matmul_ramp_k=0.0, attention_fraction_other=1.0, eager_bytes=1.0,
    contention=0.0, slowest_per_doubling=0.0, kernel_gap_s=0.0, step_s=0.0,
)  # fmt: skip


class CollectiveCosts:
    """What collectives cost, and what computes beside them: of a cluster and a calibration alone, whatever is trained.

    `collective_costs` gives the same one to all that ask for the same, so that what was worked out is there.
    """

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self.cluster, self.calibration = cluster, calibration
        self._known: dict[tuple[Op, int, int, str], float] = {}

    def seconds(self, i: Instruction) -> float:
        """How long a collective takes by itself."""
        key = (i.op, i.bytes, i.group_size, i.communicator)
        found = self._known.get(key)
        if found is None:
            stride = i.stride_among(self.cluster.gpus)
            alone_s = collective_s(i.op.lower(), i.bytes, i.group_size, self.cluster, stride=stride)
            found = self._known[key] = alone_s / self.calibration.link_fraction
        return found

    def slowdown(self, slowed: Instruction, by: Instruction) -> float:
        """How many times as long an operation takes while a collective runs beside it.

        A collective takes its share of the memory's bandwidth; and its blocks of threads keep multiprocessors from what
        computes, for as long as it runs, whether bytes arrive or not.
        """
        if slowed.lane is Lane.CPU:
            return 1.0
        part = self.cluster.gpu
        taken: float = MEMORY_PASSES.get(by.op, 2) * by.bytes / max(self.seconds(by), 1e-9) / part.mem_bytes_per_s
        if slowed.op in COMPUTATIONS:
            kept = channels(by.group_size, self.cluster, stride=by.stride_among(self.cluster.gpus))
            taken += kept / (part.sms - kept) if part.sms > kept else 0.0
        return 1.0 + self.calibration.contention * taken

    def nic_share(self, collective: Instruction) -> float:
        """The share of the network card that a collective uses: all of it if it leaves the node, otherwise none."""
        span = self.cluster.spans(collective.group_size, collective.stride_among(self.cluster.gpus))
        return 1.0 if span.nodes > 1 else 0.0

    # Neither depends on the unit, so they are asked once per collective.
    slowdown.per_unit = nic_share.per_unit = False  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def collective_costs(cluster: Cluster, calibration: Calibration) -> CollectiveCosts:
    """What collectives cost on a cluster."""
    return CollectiveCosts(cluster, calibration)


class Costs:
    """What each instruction costs.

    Args:
        workload: the model's work.
        plan, cluster: how and on what it is trained.
        calibration: the fitted numbers; by default those fitted to all published measurements.

    `seconds` and `issue_s` take an instruction; equal operations are computed once.
    """

    def __init__(
        self, workload: Workload, plan: Plan, cluster: Cluster, calibration: Calibration | None = None
    ) -> None:
        self.workload = workload
        self.plan = plan
        self.cluster = cluster
        on_cpu = cluster.kind == "cpu"
        self.calibration = calibration or (MEASURED if on_cpu else fitted(plan.stack))
        self.launch_s = COPY_LAUNCH_S if on_cpu else LAUNCH_S
        part = cluster.gpu
        self._measured = on_cpu and part.launch_s is not None
        gap_s = part.launch_s if self._measured else self.calibration.kernel_gap_s
        backward_gap_s = part.backward_launch_s if self._measured else None
        self._gap_s = {True: gap_s if backward_gap_s is None else backward_gap_s, False: gap_s}  # backward or not
        self._doubtful_gap_s = 0.0 if self._measured else (calibration or fitted()).kernel_gap_s
        self._bytes_per_s: float = part.copy_bytes_per_s * self.calibration.copy_fraction
        self._host_bytes_per_s = self._bytes_per_s if on_cpu else HOST_FRACTION * cluster.host_mem_bytes_per_s
        self._slowest = 1.0 + self.calibration.slowest_per_doubling * math.log2(cluster.nodes)
        how = (plan.compile, plan.attention_impl, plan.float32_matmul_precision, plan.activation_checkpointing)
        known = workload.known(part, self.calibration, self._doubtful_gap_s, *how)
        self._segments, self._launches, self._gaps = known
        self.collectives = collective_costs(cluster, self.calibration)

    def seconds(self, i: Instruction) -> float:
        """How long the operation takes by itself."""
        op = i.op
        if op in COMPUTATIONS:
            return self._segment_s(op, i.unit)
        if op in COLLECTIVES:
            return self.collectives.seconds(i)
        if op is _OPTIM:
            return self._optimizer_s(i)
        if op in OFFLOADS:
            return offload_s(i.bytes if op in (Op.H2D, Op.D2H) else self.offloaded_bytes(i), self.cluster)
        passes = COPY_PASSES[op]
        if i.lane is _CPU:
            return passes * i.bytes / self._host_bytes_per_s
        if op is _AG_CAST and i.dtype == "fp8":
            passes = FP8_CAST_PASSES + (0 if self.plan.fp8_precompute_scale else AMAX_PASSES)
        return passes * i.bytes / self._bytes_per_s

    def offloaded_bytes(self, i: Instruction) -> int:
        """What a copy of activations moves."""
        return self.workload.work[i.unit].kept_bytes(i.detail == CHECKPOINT, policy_of(self.plan))

    def issue_s(self, i: Instruction) -> float:
        """How long the CPU takes to issue it."""
        op = i.op
        if self._measured:
            return (self.cluster.gpu.collective_s or 0.0) if op in COLLECTIVES else 0.0
        if op in COMPUTATIONS:
            work = self.workload.work[i.unit]
            kernels = work.backward if op is _BWD else work.forward
            launches = self._launches.get(id(kernels))
            if launches is None:
                launches = self._launches[id(kernels)] = sum([n for _, n in _launched(kernels, self.plan.compile)])
            return self.launch_s * launches
        return COLLECTIVE_ISSUE_S if op in COLLECTIVES else COPY_LAUNCH_S

    def _segment_s(self, op: Op, segment: str) -> float:
        work = self.workload.work[segment]
        key = (op, id(work))
        seconds = self._segments.get(key)
        if seconds is None:
            kernels: Iterable[Kernel] = work.backward if op is Op.BWD else work.forward
            if op is Op.RECOMPUTE:
                kernels = recomputed(work, self.plan)
            how: dict[str, Any] = {
                "backward": op is Op.BWD, "compiled": self.plan.compile, "attention": self.plan.attention_impl,
                "tf32": self.plan.float32_matmul_precision == "high",
            }  # fmt: skip
            gap_s, gaps_s = self._gap_s[op is Op.BWD], 0.0
            seconds = 0.0
            for launched, count in _launched(kernels, self.plan.compile):
                work_s = sum(kernel_s(k, self.cluster.gpu, self.calibration, **how) for k in launched)
                most_s = math.inf if self._measured else MOST_LOST * work_s
                seconds += work_s + min(count * gap_s, most_s)
                gaps_s += min(count * self._doubtful_gap_s, most_s)
            self._segments[key], self._gaps[key] = seconds, gaps_s
        return seconds * self._slowest

    def gaps_s(self) -> float:
        """What kernels of a step lose beside their work, as far as no measurement of a stack says: `fitted`'s gap."""
        segments = self.workload.once("segments of a work", lambda: Counter(map(id, self.workload.work.values())))
        of_each = [count * sum([self._gaps.get((op, i), 0.0) for op in COMPUTATIONS]) for i, count in segments.items()]
        return self.plan.grad_accum * sum(of_each)

    def _optimizer_s(self, i: Instruction) -> float:
        """Of a matrix of Muon's, what orthogonalising it takes; else the passes over parameters and states."""
        plan, part = self.plan, self.cluster.gpu
        if i.detail:
            rows, columns = map(int, i.detail.split("x"))
            kernels = orthogonalisation(rows, columns, shards_of(plan, self.cluster.gpus))
            return sum(kernel_s(k, part, self.calibration) for k in kernels)
        what = ("optimizer bytes", plan.optimizer, plan.optimizer_impl)
        moved = self.workload.once(what, self._optimizer_bytes) / shards_of(plan, self.cluster.gpus)
        rate = self._bytes_per_s
        if self._measured and part.stream_bytes_per_s:
            rate = part.stream_bytes_per_s  # one fused loop, as a copy
        elif plan.cpu_offload:
            rate = self._host_bytes_per_s
            if plan.optimizer_impl == "foreach" and OPTIMIZERS[plan.optimizer].foreach_temporary:
                rate /= HOST_TEMPORARIES
        elif plan.optimizer_impl == "foreach" and OPTIMIZERS[plan.optimizer].foreach_moves and not self._measured:
            rate *= FOREACH_FRACTION
        return moved / rate

    def _optimizer_bytes(self) -> float:
        """What a step of the optimizer reads and writes, on all ranks together."""
        plan, matrix = self.plan, OPTIMIZERS["muon"].moved_bytes(4, "fused")
        rest = OPTIMIZERS["adamw" if plan.optimizer == "muon" else plan.optimizer]
        of_each = {name: rest.moved_bytes(size, plan.optimizer_impl) for name, size in DTYPE_BYTES.items()}
        moved = sum([of_each[dtype] * count for dtype, count in self.workload.trained_of_dtype.items()])
        of_muon = [p for _, p in matrices(self.workload.units)] if plan.optimizer == "muon" else []
        return moved + sum([math.prod(p.shape) * (matrix - of_each[p.dtype]) for p in of_muon])


def _launched(kernels: Iterable[Kernel], compiled: bool) -> list[tuple[list[Kernel], int]]:
    """The kernels of each launch, and how often it is launched; a compiler fuses neighbours into one where it may."""
    launches: list[tuple[list[Kernel], int]] = []
    fusing = False
    for kernel in kernels:
        if compiled and kernel.fusable and fusing:
            launches[-1][0].append(kernel)
        else:
            launches.append(([kernel], 1 if compiled and kernel.fusable else kernel.count))
        fusing = kernel.fusable
    return launches
