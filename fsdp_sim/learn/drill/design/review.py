"""`Design`: what is said to an open design question; numbers are judged by simulating the candidate's own plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_sim.learn.drill.design.extract import ASKED, Said, extract
from fsdp_sim.learn.drill.design.question import DesignQuestion
from fsdp_sim.learn.drill.listening.words import read
from fsdp_sim.learn.drill.result import place
from fsdp_sim.learn.quantity import written
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Plan

MEMORY = 0.15
"""How far off memory may be; of a time, the simulator's own interval of 80% counts."""
WITH_GRADIENTS = 16 / 12
"""Bytes of states with the gradients, over those that stay between steps: both are called states."""
ROUGH = 1.5
"""A factor within which a number that is off has at least the right order."""
TAKEN: dict[str, Any] = {
    "sharding": "full",
    "micro_batch": 1,
    "seq_len": 8192,
    "param_dtype": "bf16",
    "activation_checkpointing": "full",
}
"""What is taken where a candidate does not say even when asked."""
NAMES = {
    "states_bytes": "states per GPU",
    "peak_bytes": "peak memory per GPU",
    "step_s": "seconds per step",
    "mfu": "MFU",
    "tokens": "tokens in the time",
}
OPEN = {"risks": "What can go wrong?", "first": "And what would you measure first?"}
"""What is asked for where none of a question's was named."""


@dataclass(frozen=True)
class Judgement:
    """A number of the candidate against the simulator's.

    Attributes:
        low, high: what counts as right.
    """

    name: str
    claimed: float
    simulated: float
    low: float
    high: float

    @property
    def right(self) -> bool:
        return self.low <= self.claimed <= self.high

    def __str__(self) -> str:
        factor = max(self.claimed, self.simulated) / max(min(self.claimed, self.simulated), 1e-12)
        more = "more" if self.claimed > self.simulated else "less"
        off = "close" if factor < ROUGH else f"{factor:.1f} times {more} than that"
        said, truth, low, high = (
            _written(self.name, value) for value in (self.claimed, self.simulated, self.low, self.high)
        )
        shown, span = f"{NAMES[self.name]}: you say {said}, the simulator {truth}", f" ({low} to {high})"
        return f"✓ {shown}{span}." if self.right else f"✗ {shown}{span}: {off}."


def _written(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return written(value, "bytes")
    if name == "mfu":
        return f"{value:.0%}"
    return f"{value / 1e9:,.0f} billion" if name == "tokens" else f"{value:.3g} s"


@dataclass
class Design:
    """An open question and what was said to it. ``say`` until ``asks`` is empty, then read ``report``.

    Attributes:
        said: the plan and the numbers that were read so far.
        texts: all that was said.
    """

    question: DesignQuestion
    said: dict[str, Said] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    _tried: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> str:
        """The name of what is asked for now; empty at the beginning and the end."""
        if not self.texts:
            return ""
        known = {*self.said, *self._tried, *(["seq_len"] if self.question.seq_len else [])}
        heard = {*self.named()[0]}
        known |= {part for part in OPEN if heard & {*getattr(self.question, part)}}
        return next((name for name in (*ASKED, *OPEN) if name not in known), "")

    @property
    def asks(self) -> str:
        """What the interviewer asks; empty when all was asked."""
        if not self.texts:
            return self.question.question
        return {**ASKED, **OPEN}[self.waiting] if self.waiting else ""

    def say(self, text: str) -> dict[str, Said]:
        """Answer; what was read of it, by name."""
        waiting = self.waiting
        found = extract(text, waiting if waiting in ASKED else "")
        if waiting:
            self._tried.append(waiting)
        self.texts.append(text)
        self.said |= found
        return found

    @property
    def taken(self) -> dict[str, Any]:
        """What was not said, and is taken instead."""
        return {name: value for name, value in TAKEN.items() if name not in self.said and name != self._fixed}

    @property
    def _fixed(self) -> str:
        return "seq_len" if self.question.seq_len else ""

    def _choice(self, name: str, default: Any = None) -> Any:
        if name == "seq_len" and self.question.seq_len:
            return self.question.seq_len
        return self.said[name].value if name in self.said else TAKEN.get(name, default)

    @property
    def cluster(self) -> Cluster:
        """The GPUs that the candidate uses."""
        gpus = min(self._choice("gpus", self.question.gpus), self.question.gpus)
        return Cluster(self.question.gpu, gpus, inter=self.question.inter or None)

    @property
    def plan(self) -> Plan:
        """The candidate's plan.

        Raises:
            ValueError: its choices do not go together.
        """
        sharding, dtype = self._choice("sharding"), self._choice("param_dtype")
        recompute = self._choice("activation_checkpointing")
        of_sharding: dict[Any, dict[str, Any]] = {
            "full": {},
            "ddp": {"api": "ddp"},
            "zero2": {"reshard_after_forward": False},
            "node": {"shard_size": min(8, self.cluster.gpus)},
        }
        chosen = of_sharding.get(sharding, {"shard_size": sharding})
        if sharding != "ddp":
            chosen |= {"param_dtype": {"fp32": None, "fp8": "bf16"}.get(dtype, dtype), "reduce_dtype": "fp32"}
        return Plan(
            micro_batch=self._choice("micro_batch"),
            seq_len=self._choice("seq_len"),
            grad_accum=self._choice("grad_accum", 1),
            activation_checkpointing=None if recompute == "none" else recompute,
            cpu_offload=self._choice("cpu_offload", False),
            expert_parallel=self._choice("expert_parallel", 1),
            loss_chunks=self._choice("loss_chunks", 1),
            **chosen,
        )

    def simulate(self) -> Simulation:
        """The candidate's plan, simulated.

        Raises:
            ValueError: it cannot be; says why.
        """
        return simulate(self.question.model, self.cluster, self.plan)

    def judgements(self, step: Simulation) -> list[Judgement]:
        """Each number of the candidate that the simulator knows."""
        low, high = step.step_time_interval_s
        tokens = step.tokens_per_s_per_gpu * self.cluster.gpus * self.question.days * 86400
        states = float(sum(step.memory.states.values()))
        slow, fast = step.step_time_s / high, step.step_time_s / low
        truths = {
            "states_bytes": (states, states * (1 - MEMORY), states * WITH_GRADIENTS * (1 + MEMORY)),
            "peak_bytes": (
                step.peak_memory_bytes,
                step.peak_memory_bytes * (1 - MEMORY),
                step.peak_memory_bytes * (1 + MEMORY),
            ),
            "step_s": (step.step_time_s, low, high),
            "mfu": (step.mfu, step.mfu * slow, step.mfu * fast),
            "tokens": (tokens, tokens * slow, tokens * fast),
        }
        return [
            Judgement(name, float(self.said[name].value), *truths[name])
            for name in NAMES
            if name in self.said and truths[name][0]
        ]

    def named(self) -> tuple[list[str], list[str]]:
        """The risks and measurements that were named, and those that were not."""
        words = read(" . ".join(self.texts))
        heard = {said for said, lines in self.question.patterns().items() if any(line.find(words) for line in lines)}
        every = [*self.question.risks, *self.question.first]
        return [said for said in every if said in heard], [said for said in every if said not in heard]

    def report(self) -> list[str]:
        """What a reviewer writes: the plan as it was understood, its numbers, whether it fits, what was not named."""
        lines = [f"Your plan, as I understood it: {self._understood()}."]
        if self.taken:
            taken = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.taken.items())
            lines.append(f"You did not say, so I took: {taken}.")
        try:
            step = self.simulate()
        except ValueError as error:
            return [*lines, f"✗ It cannot be simulated: {error}."]
        limit = step.memory_limit_bytes or 0.0
        fits = f"{step.peak_memory_bytes / 1e9:.1f} of {limit / 1e9:.0f} GB at the peak"
        lines.append(f"✓ It fits: {fits}." if step.fits else f"✗ It does not fit: {fits}.")
        exposed = step.exposed_comm_s / step.step_time_s
        low, high = step.step_time_interval_s
        lines.append(
            f"Simulated: {step.step_time_s:.3g} s a step (80%: {low:.3g} to {high:.3g}), MFU {step.mfu or 0:.0%}, "
            f"{exposed:.0%} of it exposed communication."
        )
        if self.question.days:
            tokens = step.tokens_per_s_per_gpu * self.cluster.gpus * self.question.days * 86400
            days = f"{self.question.days:g} day{'s' * (self.question.days != 1)}"
            lines.append(f"In {days} that is {tokens / 1e9:,.0f} billion tokens, if nothing fails.")
        lines += map(str, self.judgements(step))
        unsaid = [NAMES[name] for name in ("states_bytes", "peak_bytes", "step_s", "mfu") if name not in self.said]
        if unsaid:
            lines.append(f"✗ No number for: {', '.join(unsaid)}.")
        named, missing = self.named()
        return [*lines, *(f"✓ Named: {line}" for line in named), *(f"✗ Not named: {line}" for line in missing)]

    def review(self) -> list[str]:
        """The report with its verdict, and where to read on."""
        verdict = "✓ That would convince." if self.good else "✗ That would not convince yet."
        return [*self.report(), verdict, f"Read: {', '.join(map(place, self.question.read))}."]

    def _understood(self) -> str:
        recompute = self._choice("activation_checkpointing")
        sharding, accumulated = self._choice("sharding"), self._choice("grad_accum", 1)
        how = {
            "full": "fully sharded",
            "node": "sharded within a node",
            "ddp": "DDP",
            "zero2": "kept whole after forward",
        }
        return ", ".join(
            [
                f"{getattr(self.question.model, 'name', self.question.model)} on {self.cluster.gpus} GPUs",
                how.get(sharding, f"sharded over {sharding}"),
                f"{self._choice('micro_batch')} x {self._choice('seq_len'):,} tokens per GPU",
                f"{accumulated} micro-batch{'es' * (accumulated != 1)} a step",
                str(self._choice("param_dtype")),
                {"none": "no recomputation", "full": "full recomputation"}.get(recompute, f"{recompute} recomputation"),
                *(["offload to the CPU"] if self._choice("cpu_offload", False) else []),
            ]
        )

    @property
    def good(self) -> bool:
        """Whether it would convince: it fits, most numbers hold, and half of the risks and measurements are named."""
        try:
            step = self.simulate()
        except ValueError:
            return False
        judged, (named, missing) = self.judgements(step), self.named()
        return (
            bool(step.fits)
            and len(judged) >= 2
            and 2 * sum(j.right for j in judged) >= len(judged)
            and len(named) >= len(missing)
        )
