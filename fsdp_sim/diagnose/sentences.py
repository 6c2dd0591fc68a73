"""A diagnosis in words: the headline, a sentence for each culprit and each collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fsdp_sim.diagnose.advice import tips
from fsdp_sim.diagnose.bandwidth import gbps
from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.findings import Blame, Diagnosis
from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.diagnose.rank_view import REDUCTIONS
from fsdp_sim.diagnose.tip import SATURATED, Facts
from fsdp_sim.diagnose.waits import Wait
from fsdp_sim.timeline import Event, Op, Phase, exposure_of
from fsdp_sim.words import human_bytes, human_ms, percent

QUEUE = 3  # reductions after backward from which it is the queue that costs, not the last one's size
LITTLE = 0.005  # of a step: what costs less is not in the headline


class Waits(list[Wait]):
    """What one culprit costs, wait by wait, and the words that its sentence has of them."""

    @property
    def seconds(self) -> float:
        return sum([wait.seconds for wait in self])

    @property
    def cost(self) -> str:
        times = "" if len(self) == 1 else f", {len(self):,} times"
        return f"{human_ms(self.seconds)}{times}"

    @property
    def longest(self) -> Wait:
        """Rounded, so that of two that last equally long it is the earlier."""
        return max(self, key=lambda wait: round(wait.seconds, 12))

    @property
    def worst(self) -> str:
        """What waits longest."""
        return _label(self.longest.waiting)

    @property
    def worst_on(self) -> str:
        """What is waited for longest."""
        on = self.longest.on
        return on.label if on else "what the timeline does not name"

    @property
    def worst_behind(self) -> str:
        return _label(self.longest.behind)

    @property
    def ons(self) -> str:
        """What is waited for, each once, up to three."""
        labels = list(dict.fromkeys(wait.on.label for wait in self if wait.on))
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        return ", ".join(labels[:3]) + more or "a collective"

    @property
    def units(self) -> list[str]:
        """Units of what is waited for, or else of what waits; those that wait longest first."""
        seconds: dict[str, float] = {}
        for wait in self:
            of = wait.on or wait.waiting
            if of is not None and of.unit:
                seconds[of.unit] = seconds.get(of.unit, 0.0) + wait.seconds
        return sorted(seconds, key=lambda unit: -round(seconds[unit], 12))


def _label(e: Event | None) -> str:
    return e.label if e else "the end of the step"


def blames(found: StepObservation) -> list[Blame]:
    """The culprits, those that cost most first."""
    by_culprit: dict[Culprit, Waits] = {}
    for wait in found.idle:
        by_culprit.setdefault(wait.culprit, Waits()).append(wait)
    if launches := pauses(found):
        by_culprit[Culprit.LAUNCHES] = Waits(launches)
    exposed: Counter[Culprit] = Counter()
    for _, at, seconds in found.exposed:
        culprit = at.culprit if at else Culprit.UNKNOWN
        exposed[culprit] += seconds  # type: ignore[assignment]
        by_culprit.setdefault(culprit, Waits())
    facts = Facts.of(found)
    blamed = [
        Blame(
            culprit=culprit,
            idle_s=waits.seconds,
            exposed_s=float(exposed[culprit]),
            times=len(waits),
            units=waits.units,
            sentence=_sentence(culprit, waits, found),
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

SAID = {  # where it says no more than what was waited for, how long, and where most
    Culprit.LAST_ALL_GATHERS: (
        "The updated parameters are gathered ({0.ons}) when nothing is left to compute: {0.cost}."
    ),
    Culprit.IN_OPTIMIZER: (
        "Between backward and the next forward are collectives of their own, such as of a norm to clip by or of Muon's "
        "matrices, with nothing to compute beside them: {0.cost}; most for {0.worst_on}."
    ),
    Culprit.HEAD_OF_LINE: (
        "All-gathers stand behind reductions on one communicator, which runs them in issue order: {0.cost}; most for "
        "{0.worst_on}, behind {0.worst_behind}."
    ),
    Culprit.RATE_LIMITER: (
        "The CPU stands still in FSDP1's rate limiter, until compute has passed the unit before the last, before it "
        "issues the next all-gather: {0.cost}; most before {0.worst}."
    ),
    Culprit.SYNCHRONOUS: (
        "torch's FSDP on a CPU stays in each collective until it is over, so nothing can be computed meanwhile: "
        "{0.cost}; most in {0.worst_on}. On GPUs the same program overlaps."
    ),
    Culprit.ASYNCHRONOUS: (
        "All-gathers were issued on the compute stream (unshard_async_op), so they start after the compute before "
        "them: {0.cost}; most for {0.worst_on}."
    ),
    Culprit.REDUCTION: "Compute waits for reductions of earlier gradients: {0.cost}; most for {0.worst_on}.",
    Culprit.TOKENS: (
        "Compute waits for tokens that travel to the ranks of their experts, or back: {0.cost}; most for {0.worst_on}. "
        "Nothing but experts that compute every token can run meanwhile."
    ),
    Culprit.PIPELINE: (
        "Compute waits for what another stage of the pipeline sends: {0.cost}; most before {0.worst}. That is the "
        "pipeline's bubble, or a stage that is slower."
    ),
    Culprit.CPU_OPTIMIZER: (
        "The optimizer runs on the CPU, in the thread that issues: the device has nothing to do until it returns: "
        "{0.cost}."
    ),
    Culprit.CPU_SUMS: (
        "Gradients of a later micro-batch are added up on the CPU. The thread that issues waits for the reduction and "
        "the copy of each, and issues nothing meanwhile: {0.cost}; most before {0.worst}."
    ),
    Culprit.BETWEEN_KERNELS: "A device takes microseconds from one operation to the next: {0.cost} in all.",
    Culprit.UNKNOWN: "The timeline does not say what compute waits for: {0.cost}; most before {0.worst}.",
}  # fmt: skip


def _first_all_gather(waits: Waits, found: StepObservation) -> str:
    arrive = "arrive" if len({wait.on.label for wait in waits if wait.on}) > 1 else "arrives"
    return f"Forward cannot begin before {waits.ons} {arrive}, and has nothing to compute meanwhile: {waits.cost}."


def _last_reductions(waits: Waits, found: StepObservation) -> str:
    begin_s, end_s = min(w.start_s for w in waits), max(w.end_s for w in waits)
    queued = [e for e in found.events if e.op in REDUCTIONS and begin_s < e.end_s and e.start_s < end_s]
    units = ", ".join(waits.units[:3])
    of = f" ({units})" if units else ""
    if len(queued) > QUEUE:
        return (
            f"When backward is over {len(queued)} reductions are still in flight or queued, the last{of} behind all "
            f"others, and nothing is left to hide them: {waits.cost}."
        )
    return f"The last reductions{of} have no backward left to hide behind: {waits.cost}."


def _cpu_late(waits: Waits, found: StepObservation) -> str:
    stops = found.peers.stops(found.view.rank)
    late = [(w, w.on or w.waiting) for w in waits]
    sync_s = sum(w.seconds for w, e in late if e and stops.synchronised(e))
    why = (
        f" For {human_ms(sync_s)} of it the CPU had waited for the device to be done with everything: a host sync."
        if sync_s > 0.2 * waits.seconds
        else ""
    )
    return f"The device was done before the CPU had issued more: {waits.cost}; most before {waits.worst}.{why}"


def _launches(waits: Waits, found: StepObservation) -> str:
    worst = waits.longest
    assert worst.waiting is not None
    return (
        f"Inside operations the device had run all kernels that were launched before the CPU had launched the next: "
        f"{human_ms(waits.seconds)} in {len(waits):,} operation{'s' * (len(waits) > 1)}; most in {waits.worst}, "
        f"{human_ms(worst.seconds)} of its {human_ms(worst.waiting.duration_s)}."
    )


def _computing_thread(waits: Waits, found: StepObservation) -> str:
    return (
        f"On a CPU the thread that computes also issues, so {waits.ons} {'was' if len(waits) == 1 else 'were'} "
        f"issued only when needed: {waits.cost}."
    )


def _rs_buffer(waits: Waits, found: StepObservation) -> str:
    reduced = sum(e.op in REDUCTIONS for e in found.comm)
    often = " Reductions take longer than backward hides." if 2 * len(waits) >= reduced else ""
    return (
        f"Gradients wait to be copied until an earlier reduce-scatter has read its input buffer: {waits.cost}; most "
        f"before {waits.worst}, for {waits.worst_on}.{often}"
    )


def _in_line(waits: Waits, found: StepObservation) -> str:
    kinds = ", ".join(str(op) for op, _ in Counter(w.on.op for w in waits if w.on).most_common(3))
    return (
        f"A collective ({kinds}) begins when the compute before it ends, and compute goes on when it ends, so nothing "
        f"runs beside it: {waits.cost}. Either its input comes from that compute, as with tensor or sequence "
        f"parallelism, or it was put behind it, as a compiled graph that prefetches nothing does."
    )


def _network(waits: Waits, found: StepObservation) -> str:
    worst = waits.longest
    assert worst.on is not None
    speed = gbps(worst.on.op, worst.on.bytes, worst.on.group_size, worst.on.duration_s)
    rate = f" at {speed:,.0f} Gbit/s" if speed >= 10 else f" at {speed:.2g} Gbit/s" if speed > 0 else ""
    return (
        f"All-gathers start as early as they can and last longer than the compute beside them: {waits.cost}; most "
        f"for {waits.worst_on}, which takes {human_ms(worst.on.duration_s)}{rate}."
    )


def _small(waits: Waits, found: StepObservation) -> str:
    worst = waits.longest
    assert worst.on is not None
    line = found.speeds.line(worst.on.group_size, worst.on.op)
    fixed = f" of which about {human_ms(line.fixed_s)} are fixed costs, whatever the size" if line else ""
    return (
        f"For a group of {worst.on.group_size} ranks messages are so small that latency is most of their time: "
        f"{waits.cost}; most for {waits.worst_on}, "
        f"{human_bytes(worst.on.bytes)} in {human_ms(worst.on.duration_s)},{fixed}."
    )


def _slow_rank(waits: Waits, found: StepObservation) -> str:
    ranks = Counter(w.rank for w in waits if w.rank >= 0)
    who = ""
    if ranks:
        (rank, count), *others = ranks.most_common()
        who = f", {count} times for rank {rank}" if others else f", always for rank {rank}"
    named = Waits(w for w in waits if w.on)
    if not named:
        return f"Rank {found.view.rank} is done before other ranks are: {waits.cost}."
    most = f"; most for {named.worst_on}"
    return f"A collective starts when the last rank of its group has come: {waits.cost}{who}{most}."


def _activations(waits: Waits, found: StepObservation) -> str:
    forward_s = sum([w.seconds for w in waits if w.on and w.on.op is Op.ACT_D2H])
    return (
        f"Activations on their way to the CPU's memory and back take longer than the compute beside them: "
        f"{waits.cost}, of it {human_ms(forward_s)} in forward; most before {waits.worst}."
    )


def _copies(waits: Waits, found: StepObservation) -> str:
    which = "before or after a collective" if found.comm else "of parameters and gradients"
    return f"Copies and casts {which} hold compute up: {waits.cost}; most before {waits.worst}."


def _host(waits: Waits, found: StepObservation) -> str:
    who = "The thread that computes" if found.view.on_cpu else "The host"
    return f"{who} was busy with something else: {waits.cost}; most before {waits.worst}."


SAY: dict[Culprit, Callable[[Waits, StepObservation], str]] = {  # where it says more
    Culprit.FIRST_ALL_GATHER: _first_all_gather,
    Culprit.LAST_REDUCTIONS: _last_reductions,
    Culprit.CPU_LATE: _cpu_late,
    Culprit.LAUNCHES: _launches,
    Culprit.COMPUTING_THREAD: _computing_thread,
    Culprit.RS_BUFFER: _rs_buffer,
    Culprit.IN_LINE: _in_line,
    Culprit.NETWORK: _network,
    Culprit.SMALL: _small,
    Culprit.SLOW_RANK: _slow_rank,
    Culprit.ACTIVATIONS: _activations,
    Culprit.COPIES: _copies,
    Culprit.HOST: _host,
}


def _sentence(culprit: Culprit, waits: Waits, found: StepObservation) -> str:
    if not waits:
        return "Communication is in flight between two steps."
    return SAID[culprit].format(waits) if culprit in SAID else SAY[culprit](waits, found)
