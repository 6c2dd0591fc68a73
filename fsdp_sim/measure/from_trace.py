"""`calibrate_from`: the numbers of a user's own stack, from profiles of a step that ran, for predicting other sizes.

A trace says how long each kernel and each collective took; the model and the plan say what they had to do. The quotient
is what the simulator needs: how near to its peaks the GPU comes, what lies between kernels and between steps, what the
links carry, how much compute slows down beside a collective. What a trace does not show keeps its default, and is said.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_sim.cost import Calibration, Costs, kernel_s
from fsdp_sim.measure.fit import rounded
from fsdp_sim.measure.fit_link import fit_link
from fsdp_sim.measure.on_rank import CollectiveTime
from fsdp_sim.schedule import Instruction
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Gpu, Link, Model, Plan
from fsdp_sim.timeline import COLLECTIVES, Event, Op, Timeline, spans_of_steps
from fsdp_sim.timeline.kineto import KernelSeconds, kernel_seconds, read_kineto

COPIES = {Op.AG_COPY_IN, Op.AG_COPY_OUT, Op.RS_COPY_IN}  # their bytes are known, and nothing but memory bounds them
SHORT_S = 1e-9  # of a gap: short beside any kernel, so that no kernel bounds it (`cost.costs.MOST_LOST`)
TOLD_APART = 0.2  # how much more of one operation than of another has to be beside a collective to show what that costs
RATES = (
    "fp32_flops", "bf16_flops", "fp16_flops", "sustained_matmul_flops", "attention_flops", "mem_bytes_per_s",
    "stream_bytes_per_s",
)  # fmt: skip
GAPS = ("launch_s", "backward_launch_s")
DISAGREE = 1.1  # how many times as long as another a rank may compute before it is named


@dataclass(frozen=True)
class StackNumbers:
    """What a trace says of a stack.

    Attributes:
        cluster: the request's, with what the trace says of its GPU and links.
        numbers: fields of `Calibration` that the trace identifies.
        sources: of each number, and of each field of the cluster's GPU and link, what in the trace it is from.
        kept: what keeps its default, and why.
        notes: of the ranks, in sentences.
        measured_step_s, fitted_step_s: from the start of a step to the start of the next, and what the numbers make of
            it.
        collectives: of each kind and size what was measured.
    """

    cluster: Cluster
    numbers: dict[str, float]
    sources: dict[str, str]
    kept: dict[str, str]
    notes: list[str]
    measured_step_s: float
    fitted_step_s: float
    collectives: tuple[CollectiveTime, ...] = field(default=(), repr=False)

    def to_file(self, path: str | Path) -> None:
        """Write a cluster file with a table ``calibration``, which ``simulate --cluster FILE`` takes."""
        self.cluster.to_file(path)
        lines = [f"{name} = {value!r}" for name, value in self.numbers.items()]
        with Path(path).open("a") as file:
            file.write("\n".join(["", "[calibration]", *lines, ""]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "numbers": self.numbers, "sources": self.sources, "kept": self.kept, "notes": self.notes,
            "measured_step_s": self.measured_step_s, "fitted_step_s": self.fitted_step_s,
            "collectives": [time._asdict() for time in self.collectives],
        }  # fmt: skip


def calibrate_from(paths: Sequence[str | Path], model: Model, cluster: Cluster, plan: Plan) -> StackNumbers:
    """Fit the numbers of the stack that traces are of.

    Args:
        paths: traces of torch.profiler, one per rank; several steps of them show what lies between two.
        model, cluster, plan: what ran. The cluster's GPU and links are where the fit begins.

    Raises:
        ValueError: a file is broken, has no FSDP, or is of another run than the request says.
    """
    timeline = read_kineto(list(paths))
    sim = simulate(model, cluster, plan)
    names = _names(timeline, sim)
    first = min(timeline.steps) if len(timeline.steps) > 1 else -1  # in which caches are cold
    ops = [e for e in timeline.ops if e.step != first]
    fit = _Fit(sim, names, ops)
    _same_bytes(ops, sim, names)
    kernels = [k for path in paths for k in kernel_seconds(path) if k.step != first and k.unit in names]
    fit.copies()
    if kernels:
        fit.kernels(kernels)
        fit.gaps(kernels)
    else:
        fit.cores()
    fit.links()
    fit.between_steps(timeline)
    return fit.numbers_of(timeline)


OF_UNITS = frozenset({Op.ALL_GATHER, Op.AG_CAST, Op.AG_COPY_IN, Op.RS_COPY_IN})  # a rank alone has copies and no gather


def _names(timeline: Timeline, sim: Simulation) -> dict[str, str]:
    """The block of the model that each unit of the trace is, in the order of forward."""
    world, api = timeline.header.world_size, timeline.api
    if world != sim.cluster.gpus:
        raise ValueError(
            f"the trace is of {world} ranks, and the request has gpus={sim.cluster.gpus}; give gpus={world}"
        )
    if api in ("fsdp1", "fsdp2", "ddp") and api != sim.plan.api:
        raise ValueError(f"the trace is of {api}, and the plan of {sim.plan.api}; give --plan api={api}")
    if sim.plan.api not in ("fsdp1", "fsdp2"):
        raise ValueError(f"the plan is {sim.plan.api}; numbers of a stack are taken from traces of fsdp1 and fsdp2")
    blocks = [segment for segment, work in sim.workload.work.items() if work.is_block]
    below = {e.unit for e in timeline.ops if e.op in OF_UNITS} - {"root"}
    units = list(dict.fromkeys(e.unit for e in timeline.ops if e.op is Op.FWD and e.unit in below))
    if len(units) != len(blocks) or not units:
        raise ValueError(
            f"the trace has {len(units)} units beside the root, and {sim.workload.name} with this plan {len(blocks)} "
            f"blocks; name the model and the wrapping that ran"
        )
    return dict(zip(units, blocks, strict=True))


def _same_bytes(ops: Iterable[Event], sim: Simulation, names: dict[str, str]) -> None:
    expected = {i.unit: i.bytes for i in sim.program.ops if i.op is Op.ALL_GATHER}
    for e in ops:
        block = names.get(e.unit)
        if e.op is Op.ALL_GATHER and block and e.bytes and abs(e.bytes / expected[block] - 1) > 0.01:
            raise ValueError(
                f"an all-gather of {e.unit} has {e.bytes:,} bytes in the trace, and {expected[block]:,} with this "
                f"model and plan; name the model, the dtype (param_dtype) and the sharding that ran"
            )


class _Fit:
    """Numbers so far, and where they are from."""

    def __init__(self, sim: Simulation, names: dict[str, str], ops: list[Event]) -> None:
        self.sim, self.names, self.ops = sim, names, ops
        self.base = sim.costs.calibration
        self.slowest = 1.0 + self.base.slowest_per_doubling * math.log2(sim.cluster.nodes)
        self.gpu: Gpu = sim.cluster.gpu
        self.link: Link | None = None
        self.numbers: dict[str, float] = {}
        self.sources: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.collectives: tuple[CollectiveTime, ...] = ()
        block = next(iter(names.values()))
        self.block = {i.op: i for i in sim.program.ops if i.unit == block and i.op in (Op.FWD, Op.BWD)}
        self.work = sim.workload.work[block]

    def _of_kind(self, kind: str, op: Op, calibration: Calibration) -> float:
        """Seconds of a block's kernels of one kind, on the slowest of as many nodes."""
        kernels = self.work.backward if op is Op.BWD else self.work.forward
        kinds = {"matmul": ("matmul",), "attention": ("attention",)}.get(kind, ("memory", "cross_entropy", "embedding"))
        plan = self.sim.plan
        return self.slowest * sum(
            kernel_s(
                k, self.sim.cluster.gpu, calibration, backward=op is Op.BWD, compiled=plan.compile,
                attention=plan.attention_impl,
            )
            for k in kernels
            if k.kind in kinds
        )  # fmt: skip

    def kernels(self, kernels: Sequence[KernelSeconds]) -> None:
        """Matmuls, attention, and what moves bytes, each over what the default numbers make of it."""
        slowdowns = []
        over: dict[tuple[str, Op], float] = {}
        for kind in ("matmul", "attention", "memory"):
            for op in (Op.FWD, Op.BWD):
                expected_s = self._of_kind(kind, op, self.base)
                some = [k for k in kernels if (k.kind, k.op) == (kind, op)]
                if expected_s and some:
                    over[kind, op], slowdown = _alone(
                        [k.seconds / expected_s for k in some], [k.beside_s / k.seconds for k in some if k.seconds]
                    )
                    if slowdown is not None:
                        slowdowns.append((expected_s, slowdown))
        if matmuls := _mean(over, "matmul", lambda op: self._of_kind("matmul", op, self.base)):
            of_base = self.base.matmul_fraction
            self._found("matmul_fraction", of_base / matmuls, "kernels that multiply matrices in blocks")
        else:
            self.kept["matmul_fraction"] = "no kernel in the blocks has a name that says it multiplies matrices"
        self._attention(over)
        self._pointwise(over)
        self._contention(slowdowns)

    def _attention(self, over: dict[tuple[str, Op], float]) -> None:
        if self.sim.plan.attention_impl == "math":
            self.kept["attention_flops"] = "attention is composed (math) and counts among the matmuls"
            return
        if ("attention", Op.FWD) not in over:
            self.kept["attention_flops"] = "no kernel in the blocks has a name that says it is attention"
            return
        flops = sum(k.flops * k.count for k in self.work.forward if k.kind == "attention")
        forward_s = over["attention", Op.FWD] * self._of_kind("attention", Op.FWD, self.base) / self.slowest
        self.gpu = replace(self.gpu, attention_flops=rounded(flops / forward_s))
        self.sources["gpu.attention_flops"] = "attention kernels of forward"
        if ("attention", Op.BWD) in over:
            backward_s = over["attention", Op.BWD] * self._of_kind("attention", Op.BWD, self.base) / self.slowest
            backward = sum(k.flops * k.count for k in self.work.backward if k.kind == "attention")
            name = "attention_backward_flash1" if self.sim.plan.attention_impl == "flash1" else "attention_backward"
            self._found(
                name, backward_s / backward / (forward_s / flops), "attention kernels of backward over forward's"
            )

    def _pointwise(self, over: dict[tuple[str, Op], float]) -> None:
        name = "compiled_bytes" if self.sim.plan.compile else "eager_bytes"
        measured_s = sum(
            o * self._of_kind("memory", op, self.base) for (kind, op), o in over.items() if kind == "memory"
        )
        fixed_s = sum(
            self._of_kind("memory", op, replace(self.base, **{name: 0.0})) for kind, op in over if kind == "memory"
        )
        slope_s = sum(
            self._of_kind("memory", op, replace(self.base, **{name: 1.0})) for kind, op in over if kind == "memory"
        )
        slope_s -= fixed_s
        if slope_s <= 0 or measured_s <= fixed_s:
            self.kept[name] = "the blocks have no kernels that move bytes alone, or those are faster than memory allows"
            return
        self._found(name, (measured_s - fixed_s) / slope_s, "kernels of blocks that neither multiply nor attend")

    def _contention(self, slowdowns: list[tuple[float, float]]) -> None:
        if not slowdowns:
            self.kept["contention"] = (
                "all kernels of a kind were beside collectives for much the same share of their time"
            )
            return
        slowdown = sum(weight * s for weight, s in slowdowns) / sum(weight for weight, _ in slowdowns)
        costs = Costs(self.sim.workload, self.sim.plan, self.sim.cluster, replace(self.base, contention=1.0))
        collectives = [i for i in self.sim.program.ops if i.op in COLLECTIVES]
        times = [costs.seconds(i) for i in collectives]
        shares = [costs.collectives.slowdown(self.block[Op.FWD], i) - 1.0 for i in collectives]
        share = sum(t * s for t, s in zip(times, shares, strict=True)) / (sum(times) or 1.0)
        if share > 0:
            self._found(
                "contention", max(0.0, slowdown / share), "kernels beside collectives, over the same ones alone"
            )

    def gaps(self, kernels: Sequence[KernelSeconds]) -> None:
        """What of a block's forward and backward is no kernel, over the kernels that are counted."""
        busy: dict[tuple[Op, str, int], float] = defaultdict(float)
        beside: dict[tuple[Op, str, int], float] = defaultdict(float)
        for k in kernels:
            busy[k.op, k.unit, k.step] += k.seconds
            beside[k.op, k.unit, k.step] += k.beside_s
        span: dict[tuple[Op, str, int], float] = defaultdict(float)
        for e in self.ops:
            span[e.op, e.unit, e.step] += e.end_s - e.start_s
        ranks = len({e.rank for e in self.ops})
        found = []
        for op, i in self.block.items():
            with_gap, without = (self._seconds(i, kernel_gap_s=gap) for gap in (SHORT_S, 0.0))
            between = max(1.0, (with_gap - without) / SHORT_S - 1.0)  # kernels, in one forward or backward
            keys = [key for key in busy if key[0] is op and span.get(key)]
            keys = [key for key in keys if beside[key] < 0.1 * busy[key]] or keys
            found += [(span[key] - busy[key]) / ranks / self.sim.plan.grad_accum / between for key in keys]
        if found:
            self._found("kernel_gap_s", max(0.0, statistics.median(found)), "time between the kernels of a block")

    def _seconds(self, i: Instruction, **numbers: float) -> float:
        return Costs(self.sim.workload, self.sim.plan, self.sim.cluster, replace(self.base, **numbers)).seconds(i)

    def cores(self) -> None:
        """On CPU cores: one factor for all rates, from the forwards and backwards of blocks."""
        over = [
            (e.end_s - e.start_s) / self.sim.costs.seconds(self.block[e.op])
            for e in self.ops
            if e.op in self.block and e.unit in self.names
        ]
        slower = statistics.median(over)
        rates = {name: rounded(rate / slower) for name in RATES if (rate := getattr(self.gpu, name))}
        gaps = {name: rounded(gap * slower) for name in GAPS if (gap := getattr(self.gpu, name))}
        changed: dict[str, Any] = rates | gaps
        self.gpu = replace(self.gpu, **changed)
        self.sources["gpu"] = (
            f"forwards and backwards of blocks, {slower:.2f} times as long as the file or catalogue says"
        )
        self.kept["shares of the rates"] = (
            "on CPU cores a trace does not tell matmuls from what moves bytes: one factor"
        )

    def copies(self) -> None:
        """The rate of memory, by copies whose bytes are known."""
        expected = {(i.op, i.unit): self.sim.costs.seconds(i) for i in self.sim.program.ops if i.op in COPIES}
        over = [
            (e.end_s - e.start_s) / expected[e.op, block]
            for e in self.ops
            if e.op in COPIES and (block := self.names.get(e.unit)) and (e.op, block) in expected
        ]
        if self.sim.cluster.kind == "cpu":
            return
        if not over:
            self.kept["copy_fraction"] = "the trace shows no copies of known size"
            return
        fraction = self.base.copy_fraction / statistics.median(over)
        self._found("copy_fraction", min(1.0, fraction), "copies into and out of the buffers of collectives")
        self.base = replace(self.base, copy_fraction=self.numbers["copy_fraction"])

    def links(self) -> None:
        """What collectives take, over what the default numbers make of them."""
        seen: dict[tuple[Op, int, int], dict[tuple[object, ...], float]] = defaultdict(dict)
        for e in self.ops:
            if e.op in COLLECTIVES and e.bytes and e.group_size > 1:
                one, took = (e.step, e.unit, e.micro_batch, e.phase), e.end_s - e.start_s
                of = seen[e.op, e.bytes, e.group_size]
                of[one] = min(took, of.get(one, took))  # the rank that came last did not wait in it
        self.collectives = tuple(
            CollectiveTime(op=op.lower(), n_bytes=n_bytes, group_size=size, seconds=statistics.median(times.values()))
            for (op, n_bytes, size), times in seen.items()
        )
        if not self.collectives:
            self.kept["links"] = "the trace gives its collectives no sizes (record_shapes=True)"
            return
        if self.sim.cluster.kind == "cpu":
            try:
                self.link = fit_link(self.collectives, self.sim.cluster.intra_link, self.gpu)
            except ValueError as error:
                self.kept["links"] = str(error)
            else:
                self.sources["intra"] = "collectives by size"
            return
        expected = {(i.op, i.bytes, i.group_size): self.sim.costs.seconds(i) for i in self.sim.program.ops}
        pairs = [
            (expected[key], t.seconds)
            for t in self.collectives
            if (key := (Op(t.op.upper()), t.n_bytes, t.group_size)) in expected
        ]
        if not pairs:
            self.kept["link_fraction"] = "no collective of the trace has the size that the plan gives one"
            return
        fraction = self.base.link_fraction * sum(e for e, _ in pairs) / sum(m for _, m in pairs)
        self._found("link_fraction", fraction, f"collectives of {len(pairs)} sizes")

    def between_steps(self, timeline: Timeline) -> None:
        spans = spans_of_steps(timeline)
        steps = sorted(spans)
        gaps = [spans[b][0] - spans[a][1] for a, b in itertools.pairwise(steps) if b == a + 1]
        if gaps:
            self._found("step_s", max(0.0, statistics.median(gaps)), f"time between {len(steps)} steps")
        else:
            self.kept["step_s"] = "the trace has one step; record two or more to see what lies between them"

    def _found(self, name: str, value: float, source: str) -> None:
        self.numbers[name] = rounded(value)
        self.sources[name] = source

    def numbers_of(self, timeline: Timeline) -> StackNumbers:
        spans = spans_of_steps(timeline)
        steps = sorted(spans)[1:] or sorted(spans)
        measured_s = statistics.median(spans[step][1] - spans[step][0] for step in steps)
        cluster = replace(self.sim.cluster, gpu=self.gpu, intra=self.link or self.sim.cluster.intra)
        if cluster.kind == "cpu":
            cluster = self._hooks(cluster, measured_s)
            of_gpus: tuple[str, ...] = ()
        else:
            of_gpus = ("slowest_per_doubling", "contention", "kernel_gap_s")
        for name in of_gpus:
            if hasattr(self.base, name) and name not in self.numbers:
                self.kept.setdefault(name, "the trace is of one size and does not show it")
        fitted = simulate_with(self.numbers, self.sim, cluster)
        between_s = self.numbers.get("step_s", 0.0)
        return StackNumbers(
            cluster, self.numbers, self.sources, self.kept, _ranks(self.ops), measured_s + between_s,
            fitted.step_time_s - fitted.between_steps_s + between_s, self.collectives,
        )  # fmt: skip

    def _hooks(self, cluster: Cluster, measured_s: float) -> Cluster:
        """On CPU cores what is left of a step is what each collective costs its rank: hooks, being woken after it."""
        part = replace(cluster.gpu, launch_s=cluster.gpu.launch_s or 0.0, collective_s=0.0)
        cluster = replace(cluster, gpu=part)
        fitted = simulate_with(self.numbers, self.sim, cluster)
        left_s = measured_s - (fitted.step_time_s - fitted.between_steps_s)
        count = sum(i.op in COLLECTIVES for i in self.sim.program.ops)
        if left_s <= 0 or not count:
            return cluster
        self.sources["gpu.collective_s"] = "what is left of a step, over its collectives"
        return replace(cluster, gpu=replace(part, collective_s=rounded(left_s / count)))


def simulate_with(numbers: dict[str, float], sim: Simulation, cluster: Cluster) -> Simulation:
    """The same request on another cluster, with some numbers of its calibration replaced."""
    other = Simulation(sim.workload, cluster, sim.plan)
    return other.recalibrated(replace(other.costs.calibration, **numbers))


def _alone(over: Sequence[float], beside: Sequence[float]) -> tuple[float, float | None]:
    """How many times as long as expected kernels take alone, and how much longer than that beside a collective."""
    if len(over) == len(beside) and max(beside) - min(beside) > TOLD_APART:
        slope, alone = np.polyfit(beside, over, 1)
        if alone > 0:
            return float(alone), max(0.0, float(slope / alone))
    return statistics.median(over), None


def _mean(over: dict[tuple[str, Op], float], kind: str, weight: Any) -> float:
    """Over all passes, each counted as often as it takes time."""
    some = [(weight(op), o) for (k, op), o in over.items() if k == kind]
    whole = sum(w for w, _ in some)
    return sum(w * o for w, o in some) / whole if whole else 0.0


def _ranks(ops: Sequence[Event]) -> list[str]:
    """A sentence about a rank that computes for longer than another."""
    busy: dict[int, float] = defaultdict(float)
    for e in ops:
        if e.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
            busy[e.rank] += e.end_s - e.start_s
    slow, fast = max(busy, key=lambda r: busy[r]), min(busy, key=lambda r: busy[r])
    if busy[slow] < DISAGREE * busy[fast]:
        return []
    return [
        f"Ranks disagree: rank {slow} computes {busy[slow] / busy[fast] - 1:.0%} longer than rank {fast}. The numbers "
        f"are between theirs; look for what slows that rank down."
    ]
