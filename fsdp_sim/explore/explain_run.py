"""`explain_run`: from what a log says of a run, which settings that it does not say fit best.

A configuration says one thing, the numbers of a log another. Each `suspects.Suspect` is simulated, alone and, where
none alone explains what was measured, with another; they are ranked by how likely the measured numbers are under them,
times how likely each is beforehand. For the first two, of all that could be measured next, what tells them apart best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from fsdp_sim.explore.suspects import RunSettings, Suspect, suspects
from fsdp_sim.simulation import Fit, Simulation, in_short, simulate
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.words import did_you_mean, human_bytes, human_ms

Z80 = 1.2816
# Peaks of the published runs, which are predicted to within some 4% (`fsdp-sim validate`), as a standard deviation.
OF_MEMORY = 0.04
# How much a ratio of two step times of one run may be off by: what both have in common is not in it.
OF_RATIO = 0.05
# A measured number of `BAD` standard deviations is not explained.
BAD = 2.0
LIKELY = 0.05
MOST_PAIRED = 6  # of the likeliest suspects each is tried with every other
FREEDOM = 4.0  # of Student's t: a number that is far off rules a suspect out less than in a normal distribution
T80 = 1.5332  # of that distribution what `Z80` is of the normal one, so that both put four of five in an interval
ASIDE = "what the configuration says"


@dataclass(frozen=True)
class Measured:
    """What a log says; None is what it does not.

    Attributes:
        step_time_s: seconds of an optimizer step.
        peak_bytes: ``torch.cuda.max_memory_allocated()``.
        reserved_bytes: ``torch.cuda.max_memory_reserved()``, as torchtitan logs.

    Raises:
        ValueError: nothing was measured, or a number is not above 0.
    """

    step_time_s: float | None = None
    peak_bytes: float | None = None
    reserved_bytes: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in self.__dict__.items() if value is not None}
        if not given:
            raise ValueError("nothing was measured; give a step time, tokens a second or a peak of memory")
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be a number above 0")
        peak, held = self.peak_bytes, self.reserved_bytes
        if peak is not None and held is not None and held < 0.99 * peak:  # logs round
            raise ValueError(
                f"{human_bytes(held)} reserved are less than {human_bytes(peak)} allocated, a part of them; give both "
                f"peaks of one run, the larger as reserved"
            )


@dataclass(frozen=True)
class Account:
    """One way to account for the numbers: the run with some suspects, simulated.

    Attributes:
        by: the suspects; none is the run as the configuration says.
        off: of each measured number, by how many standard deviations the prediction is off.
        likelihood: the share of this account among all that were simulated.
    """

    by: tuple[Suspect, ...]
    run: RunSettings
    sim: Simulation
    off: dict[str, float]
    likelihood: float = 0.0

    @property
    def what(self) -> str:
        return "; ".join(suspect.what for suspect in self.by) or ASIDE

    @property
    def worst(self) -> float:
        return max(self.off.values())


class NextMeasurement(NamedTuple):
    """What tells two accounts apart best.

    Attributes:
        what: to measure, or to look at.
        first, second: what either predicts, in words.
        apart: by how many standard deviations of a number; None for a look, which says outright which of them is so.
    """

    what: str
    first: str
    second: str
    apart: float | None


@dataclass(frozen=True)
class RunExplained:
    """Accounts of a run, the likeliest first, and what to measure next.

    Attributes:
        options: of `simulate`, with which all were simulated.
    """

    measured: Measured
    accounts: tuple[Account, ...]
    options: dict[str, Any]

    @property
    def is_explained(self) -> bool:
        """Whether an account that is at least `LIKELY` predicts every number to within `BAD` standard deviations."""
        return any(account.worst <= BAD and account.likelihood >= LIKELY for account in self.accounts)

    @cached_property
    def decides(self) -> NextMeasurement | None:
        """A number, if one tells the first two apart by `BAD` standard deviations; else what to look at in the run.

        None where there is one account alone.
        """
        if len(self.accounts) < 2:
            return None
        first, second = self.accounts[:2]
        return next_measurement(first, second, self.measured, self.options) or look(first, second)


def explain_run(
    model: Model, cluster: Cluster, plan: Plan, measured: Measured, known: Sequence[str] = (), **options: Any
) -> RunExplained:
    """Rank what a run may do unlike its configuration by how well each accounts for what was measured.

    Args:
        known: names of suspects (fields of the plan, ``dtype``, ``wire``, ``compute``) that are known to be as said.
        options: of `simulate`.

    Raises:
        ValueError: the request cannot be simulated as it is; no such GPU can have done what was measured; ``known``
            has a name that is none of a suspect.

    Example:
        >>> said = Plan(param_dtype="bf16", seq_len=4096, activation_checkpointing="full")
        >>> run = Model.preset("llama3-8b"), Cluster("H100", gpus=8), said
        >>> did = simulate(run[0], run[1], replace(said, activation_checkpointing=None))
        >>> found = explain_run(*run, Measured(did.step_time_s, did.peak_memory_bytes))
        >>> found.accounts[0].what
        'no block is computed again: checkpointing is off'
    """
    asked = RunSettings(model, cluster, plan)
    names = list(dict.fromkeys(suspect.name for suspect in suspects(asked)))
    if unknown := [name for name in known if name not in names]:
        raise ValueError(
            f"known is {unknown[0]!r}, which is nothing that is doubted of this run; "
            f"{did_you_mean(unknown[0], names, 'that is')}"
        )
    accounts = [_beside(Account((), asked, simulate(*asked, **options), {}), measured)]
    _check_possible(measured, accounts[0].sim)
    alone = [s for s in suspects(asked) if s.name not in known]
    accounts += _accounts(((s,) for s in alone), asked, measured, options)
    if min(account.worst for account in accounts) > BAD:
        likely = [a.by[0] for a in sorted(accounts, key=_weight, reverse=True) if a.by][:MOST_PAIRED]
        pairs = (p for p in itertools.combinations(alone, 2) if p[0] in likely or p[1] in likely)
        accounts += _accounts(pairs, asked, measured, options)
    weights = [_weight(account) for account in accounts]
    most = max(weights)
    shares = [math.exp(weight - most) for weight in weights]
    ranked = [replace(a, likelihood=share / sum(shares)) for a, share in zip(accounts, shares, strict=True)]
    return RunExplained(measured, tuple(sorted(ranked, key=lambda account: -account.likelihood)), options)


def _check_possible(measured: Measured, sim: Simulation) -> None:
    """Refuse a step faster than the GPU's highest peak, and more memory than it has: the log means something else."""
    gpu, plan = sim.cluster.gpu, sim.plan
    if measured.step_time_s is not None:
        flops = sim.workload.model_flops_per_token * sim.workload.tokens * plan.grad_accum
        times = flops / measured.step_time_s / max(gpu.peak_flops(dtype) for dtype in gpu.dtypes)
        if times > 1:
            raise ValueError(
                f"a step of {human_ms(measured.step_time_s)} is {times:.3g} times as fast as {gpu.name} computes at "
                f"its peak, with {plan.micro_batch} x {plan.seq_len:,} tokens a rank in each of {plan.grad_accum} "
                f"micro-batches; give all GPUs' tokens as --tokens-per-s, or the run's micro_batch, seq_len and "
                f"grad_accum"
            )
    peak = max(measured.peak_bytes or 0.0, measured.reserved_bytes or 0.0)
    if peak > gpu.mem_bytes:
        raise ValueError(f"a peak of {human_bytes(peak)} is more than the {human_bytes(gpu.mem_bytes)} of {gpu.name}")


def _accounts(
    chosen: Iterable[tuple[Suspect, ...]], asked: RunSettings, measured: Measured, options: dict[str, Any]
) -> list[Account]:
    """Of the suspects that this run can have."""
    found = []
    for by in chosen:
        if len({suspect.name for suspect in by}) < len(by):
            continue
        run = asked
        try:
            for suspect in by:
                run = suspect.run(run)
            found.append(_beside(Account(by, run, simulate(*run, **options), {}), measured))
        except ValueError:  # settings that do not go together: no run has them
            continue
    return found


def _beside(account: Account, measured: Measured) -> Account:
    sim, off = account.sim, {}
    if measured.step_time_s is not None:
        off["step_time_s"] = abs(math.log(sim.step_time_s / measured.step_time_s)) / _of_time(sim)
    if measured.peak_bytes is not None:
        off["peak_bytes"] = abs(math.log(sim.peak_memory_bytes / measured.peak_bytes)) / OF_MEMORY
    if measured.reserved_bytes is not None:
        off["reserved_bytes"] = abs(math.log(sim.memory.reserved_bytes / measured.reserved_bytes)) / OF_MEMORY
    if sim.fit is Fit.DOES_NOT_FIT:  # and the run ran
        off["room"] = math.log(sim.peak_memory_bytes / sim.memory_limit_bytes) / OF_MEMORY
    return replace(account, off=off)


def _of_time(sim: Simulation) -> float:
    """The standard deviation of a step time's logarithm, which its 80% interval says."""
    low, high = sim.step_time_interval_s
    return math.log(high / low) / 2 / Z80


def _weight(account: Account) -> float:
    """The logarithm of how likely the numbers are, times how likely the suspects are beforehand."""
    of_t = [off * T80 / Z80 for off in account.off.values()]
    of_numbers = sum(-(FREEDOM + 1) / 2 * math.log1p(t * t / FREEDOM) for t in of_t)
    wide = [_of_time(account.sim)] if "step_time_s" in account.off else []
    return of_numbers - sum(map(math.log, wide)) + sum(math.log(suspect.prior) for suspect in account.by)


# -- what to measure next


def next_measurement(
    first: Account, second: Account, measured: Measured, options: dict[str, Any]
) -> NextMeasurement | None:
    """Of the numbers that one can measure of the same run, the one that tells two accounts apart best, and well."""
    found = [one for one in _measurements(first, second, measured, options) if one and (one.apart or 0.0) >= BAD]
    return max(found, key=lambda one: one.apart or 0.0, default=None)


def look(first: Account, second: Account) -> NextMeasurement | None:
    """Where one sees at once which of two accounts is so: at a setting that they have otherwise."""
    one, other = ({suspect.name: suspect for suspect in account.by} for account in (first, second))
    for name in one | other:
        mine, theirs = one.get(name), other.get(name)
        if mine != theirs and (shown := mine or theirs):
            said = [ASIDE if suspect is None else suspect.what for suspect in (mine, theirs)]
            return NextMeasurement(shown.check, said[0], said[1], apart=None)
    return None


def _measurements(
    first: Account, second: Account, measured: Measured, options: dict[str, Any]
) -> Iterable[NextMeasurement | None]:
    def of(
        what: str, value: Callable[[Account], float | None], said: Callable[[float], str], deviation: float
    ) -> NextMeasurement | None:
        a, b = value(first), value(second)
        if not a or not b:
            return None
        return NextMeasurement(what, said(a), said(b), abs(math.log(a / b)) / deviation)

    if measured.step_time_s is None:
        deviation = max(_of_time(first.sim), _of_time(second.sim))
        yield of("the step time", lambda a: a.sim.step_time_s, human_ms, deviation)
    if measured.peak_bytes is None and measured.reserved_bytes is None:
        what = "the peak of memory, torch.cuda.max_memory_allocated()"
        yield of(what, lambda a: float(a.sim.peak_memory_bytes), human_bytes, OF_MEMORY)
    now = first.run.plan
    for what, name, value in (
        ("twice the micro-batch", "micro_batch", 2 * now.micro_batch),
        ("half the sequence", "seq_len", now.seq_len // 2),
    ):
        ratio = partial(_ratio, new={name: value}, options=options)
        yield of(f"the step time with {what}, beside that now", ratio, lambda times: f"{times:.2f} times", OF_RATIO)
    yield of(
        "the time that compute waits for communication in a profiled step (fsdp-sim diagnose)",
        lambda a: max(a.sim.exposed_comm_s, 1e-3 * a.sim.step_time_s), human_ms, 0.25,
    )  # fmt: skip


def _ratio(account: Account, new: dict[str, Any], options: dict[str, Any]) -> float | None:
    model, cluster, plan = account.run
    try:
        changed = simulate(model, cluster, in_short(replace(plan, **new)), **options)
    except ValueError:  # such as a sequence for which the model has no positions
        return None
    now = simulate(model, cluster, in_short(plan), **options)
    return changed.step_time_s / now.step_time_s if changed.fits else None
