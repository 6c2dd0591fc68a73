"""A diagnosis in words: the headline, a sentence for each culprit and each collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from fsdp_sim.diagnose.advice import SATURATED, Facts, tips
from fsdp_sim.diagnose.bandwidth import gbps
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.findings import Blame, Diagnosis
from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.diagnose.rank_view import REDUCTIONS
from fsdp_sim.diagnose.waits import Wait
from fsdp_sim.timeline import Event, Op, Phase, exposure_of
from fsdp_sim.words import human_bytes, human_ms, percent

QUEUE = 3  # reductions after backward from which it is the queue that costs, not the last one's size
LITTLE = 0.005  # of a step: what costs less is not in the headline


def blames(found: StepObservation) -> list[Blame]:
    """The culprits, those that cost most first."""
    by_culprit: dict[Culprit, list[Wait]] = {}
    for wait in found.idle:
        by_culprit.setdefault(wait.culprit, []).append(wait)
    if launches := pauses(found):
        by_culprit[Culprit.LAUNCHES] = launches
    exposed: Counter[Culprit] = Counter()
    for _, at, seconds in found.exposed:
        culprit = at.culprit if at else Culprit.UNKNOWN
        exposed[culprit] += seconds  # type: ignore[assignment]
        by_culprit.setdefault(culprit, [])
    facts = Facts.of(found)
    blamed = [
        Blame(
            culprit=culprit,
            idle_s=sum(w.seconds for w in waits),
            exposed_s=float(exposed[culprit]),
            times=len(waits),
            units=_units(waits),
            sentence=SAY[culprit](waits, found) if waits else "Communication is in flight between two steps.",
            advice=tips(culprit, facts),
        )
        for culprit, waits in by_culprit.items()
    ]
    # Rounded, so that of two that cost the same the earlier comes first.
    return sorted(blamed, key=lambda blame: (-round(blame.idle_s, 9), -round(blame.exposed_s, 9)))


def pauses(found: StepObservation) -> list[Wait]:
    """Of each operation the time in which the CPU had not launched its next kernel, put at its end: the record says how
    long that was, not when."""
    return [Wait(e.end_s - e.unlaunched_s, e.end_s, Culprit.LAUNCHES, e) for e in found.computing if e.unlaunched_s]


def headline(d: Diagnosis) -> str:
    """The finding in two or three sentences."""
    step = f"Step {d.step} takes {human_ms(d.step_s)} on rank {d.rank}"
    sentence = f"{step}{_communication(d)}"
    worst = next((b for b in d.culprits if b.idle_s >= LITTLE * d.step_s), None)
    if worst is None:
        return f"{sentence}. Compute is busy {percent(d.compute_s, d.step_s)} of the time: only faster compute helps."
    idle_s = d.step_s - d.compute_s
    sentence = (
        f"{sentence}. Compute waits {human_ms(idle_s)}, {human_ms(worst.idle_s)} of it for this: {worst.culprit}."
    )
    if d.comm_s < SATURATED * d.step_s or d.exposed_s < 0.05 * d.step_s:
        return sentence
    return (
        f"{sentence} A collective is in flight {percent(d.comm_s, d.step_s)} of the step, so no other order makes it "
        f"shorter: only fewer bytes, a faster network, or more compute per byte."
    )


def _communication(d: Diagnosis) -> str:
    """What is said of a step's communication, as the end of a sentence."""
    exposed, in_flight = human_ms(d.exposed_s), human_ms(d.comm_s)
    match exposure_of(d.comm_s, d.exposed_s, d.step_s, LITTLE):
        case "none":
            return ", without any communication"
        case "next to none":
            return f", with next to no communication: {in_flight} are in flight, {exposed} of them exposed"
        case "hidden":
            return f", and its communication is hidden: {exposed} of {in_flight} are exposed"
        case _:
            share = percent(d.exposed_s, d.step_s)
            return f"; {exposed} ({share}) are exposed communication, of {in_flight} in flight"


def collective_sentence(
    what: tuple[Phase, Op, str], total_s: float, exposed_s: float, culprit: Culprit | None, alone_s: float
) -> str:
    """What a collective costs.

    Args:
        what: phase, operation and unit.
        total_s, exposed_s, culprit: see `CollectiveCost`.
        alone_s: seconds in which it is in flight and nothing computes. Of two in flight one counts as exposed: the
            other may be alone with it, and cost nothing beside it.
    """
    phase, op, unit = what
    name = f"{op}({unit})" if unit else str(op)
    where = f" in {phase}" if phase else ""
    if exposed_s <= 0 < alone_s:
        return f"{name}{where} is in flight beside another collective that is exposed ({human_ms(total_s)})."
    if exposed_s <= 0:
        return f"{name}{where} is hidden behind compute ({human_ms(total_s)})."
    return f"{name}{where} is exposed for {human_ms(exposed_s)} of its {human_ms(total_s)}: {culprit}."


# -- one sentence per culprit


def _first_all_gather(waits: list[Wait], found: StepObservation) -> str:
    return f"Forward cannot begin before {_ons(waits)} arrives, and has nothing to compute meanwhile: {_cost(waits)}."


def _last_reductions(waits: list[Wait], found: StepObservation) -> str:
    begin_s, end_s = min(w.start_s for w in waits), max(w.end_s for w in waits)
    queued = [e for e in found.events if e.op in REDUCTIONS and begin_s < e.end_s and e.start_s < end_s]
    units = ", ".join(_units(waits)[:3])
    of = f" ({units})" if units else ""
    if len(queued) > QUEUE:
        return (
            f"When backward is over {len(queued)} reductions are still in flight or queued, the last{of} behind all "
            f"others, and nothing is left to hide them: {_cost(waits)}."
        )
    return f"The last reductions{of} have no backward left to hide behind: {_cost(waits)}."


def _last_all_gathers(waits: list[Wait], found: StepObservation) -> str:
    return f"The updated parameters are gathered ({_ons(waits)}) when nothing is left to compute: {_cost(waits)}."


def _head_of_line(waits: list[Wait], found: StepObservation) -> str:
    worst = max(waits, key=_seconds)
    return (
        f"All-gathers stand behind reductions on one communicator, which runs them in issue order: {_cost(waits)}; "
        f"most for {_label(worst.on)}, behind {_label(worst.behind)}."
    )


def _rate_limiter(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"The CPU stands still in FSDP1's rate limiter, until compute has passed the unit before the last, before it "
        f"issues the next all-gather: {_cost(waits)}; most before {_worst(waits)}."
    )


def _cpu_late(waits: list[Wait], found: StepObservation) -> str:
    stops = found.peers.stops(found.view.rank)
    late = [(w, w.on or w.waiting) for w in waits]
    sync_s = sum(w.seconds for w, e in late if e and stops.synchronised(e))
    why = (
        f" For {human_ms(sync_s)} of it the CPU had waited for the device to be done with everything: a host sync."
        if sync_s > 0.2 * sum(map(_seconds, waits))
        else ""
    )
    return f"The device was done before the CPU had issued more: {_cost(waits)}; most before {_worst(waits)}.{why}"


def _launches(waits: list[Wait], found: StepObservation) -> str:
    worst = max(waits, key=_seconds)
    assert worst.waiting is not None
    return (
        f"Inside operations the device had run all kernels that were launched before the CPU had launched the next: "
        f"{human_ms(sum(map(_seconds, waits)))} in {len(waits)} operations; most in {_worst(waits)}, "
        f"{human_ms(worst.seconds)} of its {human_ms(worst.waiting.duration_s)}."
    )


def _computing_thread(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"On a CPU the thread that computes also issues, so {_ons(waits)} {'was' if len(waits) == 1 else 'were'} "
        f"issued only when needed: {_cost(waits)}."
    )


def _synchronous(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"torch's FSDP on a CPU stays in each collective until it is over, so nothing can be computed meanwhile: "
        f"{_cost(waits)}; most in {_worst_on(waits)}. On GPUs the same program overlaps."
    )


def _asynchronous(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"All-gathers were issued on the compute stream (unshard_async_op), so they start after the compute before "
        f"them: {_cost(waits)}; most for {_worst_on(waits)}."
    )


def _rs_buffer(waits: list[Wait], found: StepObservation) -> str:
    reduced = sum(e.op in REDUCTIONS for e in found.comm)
    often = " Reductions take longer than backward hides." if 2 * len(waits) >= reduced else ""
    return (
        f"Gradients wait to be copied until an earlier reduce-scatter has read its input buffer: {_cost(waits)}; most "
        f"before {_worst(waits)}, for {_worst_on(waits)}.{often}"
    )


def _reduction(waits: list[Wait], found: StepObservation) -> str:
    return f"Compute waits for reductions of earlier gradients: {_cost(waits)}; most for {_worst_on(waits)}."


def _tokens(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"Compute waits for tokens that travel to the ranks of their experts, or back: {_cost(waits)}; most for "
        f"{_worst_on(waits)}. Nothing but experts that compute every token can run meanwhile."
    )


def _in_line(waits: list[Wait], found: StepObservation) -> str:
    kinds = ", ".join(str(op) for op, _ in Counter(w.on.op for w in waits if w.on).most_common(3))
    return (
        f"A collective ({kinds}) begins when the compute before it ends, and compute goes on when it ends, so nothing "
        f"runs beside it: {_cost(waits)}. Either its input comes from that compute, as with tensor or sequence "
        f"parallelism, or it was put behind it, as a compiled graph that prefetches nothing does."
    )


def _pipeline(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"Compute waits for what another stage of the pipeline sends: {_cost(waits)}; most before {_worst(waits)}. "
        f"That is the pipeline's bubble, or a stage that is slower."
    )


def _network(waits: list[Wait], found: StepObservation) -> str:
    worst = max(waits, key=_seconds)
    assert worst.on is not None
    speed = gbps(worst.on.op, worst.on.bytes, worst.on.group_size, worst.on.duration_s)
    rate = f" at {speed:,.0f} Gbit/s" if speed >= 10 else f" at {speed:.2g} Gbit/s" if speed > 0 else ""
    return (
        f"All-gathers start as early as they can and last longer than the compute beside them: {_cost(waits)}; most "
        f"for {_worst_on(waits)}, which takes {human_ms(worst.on.duration_s)}{rate}."
    )


def _small(waits: list[Wait], found: StepObservation) -> str:
    worst = max(waits, key=_seconds)
    assert worst.on is not None
    line = found.speeds.line(worst.on.group_size, worst.on.op)
    fixed = f" of which about {human_ms(line.fixed_s)} are fixed costs, whatever the size" if line else ""
    return (
        f"For a group of {worst.on.group_size} ranks messages are so small that latency is most of their time: "
        f"{_cost(waits)}; most for {_worst_on(waits)}, "
        f"{human_bytes(worst.on.bytes)} in {human_ms(worst.on.duration_s)},{fixed}."
    )


def _slow_rank(waits: list[Wait], found: StepObservation) -> str:
    ranks = Counter(w.rank for w in waits if w.rank >= 0)
    who = ""
    if ranks:
        (rank, count), *others = ranks.most_common()
        who = f", {count} times for rank {rank}" if others else f", always for rank {rank}"
    named = [w for w in waits if w.on]
    if not named:
        return f"Rank {found.view.rank} is done before other ranks are: {_cost(waits)}."
    most = f"; most for {_worst_on(named)}"
    return f"A collective starts when the last rank of its group has come: {_cost(waits)}{who}{most}."


def _cpu_optimizer(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"The optimizer runs on the CPU, in the thread that issues: the device has nothing to do until it returns: "
        f"{_cost(waits)}."
    )


def _cpu_sums(waits: list[Wait], found: StepObservation) -> str:
    return (
        f"Gradients of a later micro-batch are added up on the CPU. The thread that issues waits for the reduction and "
        f"the copy of each, and issues nothing meanwhile: {_cost(waits)}; most before {_worst(waits)}."
    )


def _activations(waits: list[Wait], found: StepObservation) -> str:
    forward_s = sum([w.seconds for w in waits if w.on and w.on.op is Op.ACT_D2H])
    return (
        f"Activations on their way to the CPU's memory and back take longer than the compute beside them: "
        f"{_cost(waits)}, of it {human_ms(forward_s)} in forward; most before {_worst(waits)}."
    )


def _copies(waits: list[Wait], found: StepObservation) -> str:
    which = "before or after a collective" if found.comm else "of parameters and gradients"
    return f"Copies and casts {which} hold compute up: {_cost(waits)}; most before {_worst(waits)}."


def _host(waits: list[Wait], found: StepObservation) -> str:
    who = "The thread that computes" if found.view.on_cpu else "The host"
    return f"{who} was busy with something else: {_cost(waits)}; most before {_worst(waits)}."


def _between_kernels(waits: list[Wait], found: StepObservation) -> str:
    return f"A device takes microseconds from one operation to the next: {_cost(waits)} in all."


def _unknown(waits: list[Wait], found: StepObservation) -> str:
    return f"The timeline does not say what compute waits for: {_cost(waits)}; most before {_worst(waits)}."


SAY: dict[Culprit, Callable[[list[Wait], StepObservation], str]] = {
    Culprit.FIRST_ALL_GATHER: _first_all_gather,
    Culprit.LAST_REDUCTIONS: _last_reductions,
    Culprit.LAST_ALL_GATHERS: _last_all_gathers,
    Culprit.HEAD_OF_LINE: _head_of_line,
    Culprit.RATE_LIMITER: _rate_limiter,
    Culprit.CPU_LATE: _cpu_late,
    Culprit.LAUNCHES: _launches,
    Culprit.COMPUTING_THREAD: _computing_thread,
    Culprit.SYNCHRONOUS: _synchronous,
    Culprit.ASYNCHRONOUS: _asynchronous,
    Culprit.RS_BUFFER: _rs_buffer,
    Culprit.REDUCTION: _reduction,
    Culprit.TOKENS: _tokens,
    Culprit.IN_LINE: _in_line,
    Culprit.PIPELINE: _pipeline,
    Culprit.NETWORK: _network,
    Culprit.SMALL: _small,
    Culprit.SLOW_RANK: _slow_rank,
    Culprit.CPU_OPTIMIZER: _cpu_optimizer,
    Culprit.CPU_SUMS: _cpu_sums,
    Culprit.ACTIVATIONS: _activations,
    Culprit.COPIES: _copies,
    Culprit.HOST: _host,
    Culprit.BETWEEN_KERNELS: _between_kernels,
    Culprit.UNKNOWN: _unknown,
}


# -- words


def _seconds(wait: Wait) -> float:
    """Rounded, so that of two that last equally long the earlier counts as the longest."""
    return round(wait.seconds, 12)


def _cost(waits: Sequence[Wait]) -> str:
    times = "" if len(waits) == 1 else f", {len(waits)} times"
    return f"{human_ms(sum([w.seconds for w in waits]))}{times}"


def _label(e: Event | None) -> str:
    return e.label if e else "the end of the step"


def _worst(waits: Sequence[Wait]) -> str:
    return _label(max(waits, key=_seconds).waiting)


def _worst_on(waits: Sequence[Wait]) -> str:
    on = max(waits, key=_seconds).on
    return on.label if on else "what the timeline does not name"


def _ons(waits: Iterable[Wait]) -> str:
    """What is waited for, each once, up to three."""
    labels = list(dict.fromkeys(w.on.label for w in waits if w.on))
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return ", ".join(labels[:3]) + more or "a collective"


def _units(waits: Iterable[Wait]) -> list[str]:
    """Units of what is waited for, or else of what waits; those that wait longest first."""
    seconds: dict[str, float] = {}
    for w in waits:
        of = w.on or w.waiting
        if of is not None and of.unit:
            seconds[of.unit] = seconds.get(of.unit, 0.0) + w.seconds
    return sorted(seconds, key=lambda unit: -round(seconds[unit], 12))
