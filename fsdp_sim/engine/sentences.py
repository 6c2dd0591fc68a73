"""`sentences`: an explanation in words. What costs most comes first; every sentence names units and milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fsdp_sim.engine.explain import Explanation, Reason, Wait
from fsdp_sim.schedule import Instruction, Param
from fsdp_sim.spec import Plan
from fsdp_sim.spec.plan import shards_of
from fsdp_sim.words import human_ms, percent


def sentences(found: Explanation) -> list[str]:
    """The explanation in words."""
    return [
        *_summary(found),
        *_waits(found),
        _path(found),
        *_units(found),
        _gains(found),
        *_padding(found),
    ]


def _summary(found: Explanation) -> list[str]:
    step_s, e = found.step_time_s, found.exposure
    idle_s = step_s - e.compute_s
    lines = [
        f"The step takes {human_ms(step_s)}. Compute is busy for {human_ms(e.compute_s)} of it "
        f"({percent(e.compute_s, step_s)}) and "
        f"waits for {human_ms(idle_s)} ({percent(idle_s, step_s)})."
    ]
    if found.between_steps_s:
        lines.append(
            f"Between two steps the training loop takes another {human_ms(found.between_steps_s)}, for data, clipping "
            f"and logging, in which FSDP has no part."
        )
    if e.comm_s and e.exposed_s > 1e-6 * step_s:
        lines.append(
            f"Communication is in flight for {human_ms(e.comm_s)}; {human_ms(e.exposed_s)} of that "
            f"({percent(e.exposed_s, e.comm_s)}) are exposed: compute waits meanwhile."
        )
    elif e.comm_s:
        lines.append(f"Communication is in flight for {human_ms(e.comm_s)}, all of it hidden behind compute.")
    return lines


def _waits(found: Explanation) -> list[str]:
    by_reason: dict[Reason, list[Wait]] = {}
    for wait in found.waits:
        by_reason.setdefault(wait.reason, []).append(wait)
    totals = {reason: sum(w.seconds for w in waits) for reason, waits in by_reason.items()}
    in_order = [reason for reason in SAY if reason in totals]
    largest_first = sorted(in_order, key=lambda reason: -round(totals[reason], 9))
    worth_saying = [reason for reason in largest_first if totals[reason] >= 1e-3 * found.step_time_s]
    return [SAY[reason](by_reason[reason], totals[reason], found) for reason in worth_saying]


PADDED = 1.25  # times its size from which a unit's padding is worth a sentence


def _padding(found: Explanation) -> list[str]:
    """Dimension 0 is cut into one piece per rank: of 8 experts on 64 ranks 56 hold nothing, but all are sent."""
    program = found.run.program
    shards = shards_of(program.plan, program.world_size)
    if program.plan.api != "fsdp2" or shards == 1:
        return []
    times_of: dict[str, float] = {}
    worst: dict[str, Param] = {}
    for unit in program.units:
        own = sum(p.bytes for p in unit.params)
        padded = sum(p.padded_bytes(shards) for p in unit.params)
        if own and padded >= PADDED * own:
            times_of[unit.name] = padded / own
            worst[unit.name] = max(unit.params, key=lambda p: p.padded_bytes(shards) - p.bytes)
    if not times_of:
        return []
    first = max(times_of, key=lambda name: times_of[name])
    param = worst[first]
    return [
        f"{names(list(times_of))} {'is' if len(times_of) == 1 else 'are'} padded to up to {times_of[first]:.1f} times "
        f"{'its' if len(times_of) == 1 else 'their'} size, in what is sent, kept and stepped: {param.name} has "
        f"{param.shape[0]} rows for {shards} shards. Fewer shards (shard_size), or shards of another dimension "
        f"(shard_placement_fn), need less."
    ]


def _first_all_gather(waits: list[Wait], total_s: float, found: Explanation) -> str:
    units = [w.on.unit for w in waits if w.on]
    return (
        f"The first all-gather{plural(units)} of the step ({names(units)}) cost{'s' if len(units) == 1 else ''} "
        f"{human_ms(total_s)}: forward has nothing to compute before "
        f"{'it arrives' if len(units) == 1 else 'they arrive'}."
    )


def _all_gather(waits: list[Wait], total_s: float, found: Explanation) -> str:
    units = [w.on.unit for w in waits if w.on]
    return (
        f"Compute waits {human_ms(total_s)} for all-gathers ({times(waits)}; most for {most(waits, lambda w: w.on)}): "
        f"they start as early as the program lets them and last longer than the compute beside them, so the network "
        f"is the bottleneck of {names(units)}."
    )


def _head_of_line(waits: list[Wait], total_s: float, found: Explanation) -> str:
    worst = max(waits, key=lambda w: w.seconds)
    assert worst.on is not None
    assert worst.behind is not None
    cure = ""
    if found.run.program.plan.api == "fsdp2" and not found.run.program.plan.separate_reduce_scatter_group:
        cure = " set_separate_reduce_scatter_group(True) gives the reduce-scatters a communicator of their own."
    return (
        f"All-gathers stand behind reductions on one communicator, where collectives run in issue order (head-of-line "
        f"blocking): compute waits {human_ms(total_s)} ({times(waits)}; most for {said(worst.on)}, behind "
        f"{said(worst.behind)}).{cure}"
    )


def _slower_rank(waits: list[Wait], total_s: float, found: Explanation) -> str:
    by_rank: Counter[int] = Counter()
    for wait in waits:
        by_rank[wait.rank] += 1
    (rank, count), *_ = by_rank.most_common(1)
    others = f", {count} of them for rank {rank}" if len(by_rank) > 1 else f", always for rank {rank}"
    return (
        f"Compute of rank {found.rank} waits {human_ms(total_s)} for slower ranks ({times(waits)}{others}; most for "
        f"{most(waits, lambda w: w.on)}): a collective starts when the last rank of its group has come to it."
    )


def _rate_limiter(waits: list[Wait], total_s: float, found: Explanation) -> str:
    return (
        f"The rate limiter (limit_all_gathers) holds the CPU back, which costs {human_ms(total_s)} ({times(waits)}; "
        f"most before {most(waits, lambda w: w.waiting)}): an all-gather is issued only when compute has passed the "
        f"unit before the last. Without it memory grows."
    )


def _computing_thread(waits: list[Wait], total_s: float, found: Explanation) -> str:
    units = [w.on.unit for w in waits if w.on]
    return (
        f"On a CPU the thread that computes also issues. The all-gather{plural(units)} of {names(units)} "
        f"{'is' if len(units) == 1 else 'are'} issued only when needed, and nothing computes until the parameters are "
        f"there: {human_ms(total_s)} ({times(waits)}). Explicit prefetch issues them before the compute "
        f"that can hide them."
    )


def _reduce_scatter_buffer(waits: list[Wait], total_s: float, found: Explanation) -> str:
    plan: Plan = found.run.program.plan
    buffers = plan.reduce_scatter_max_input_buffers
    return (
        f"Compute stalls {human_ms(total_s)} ({times(waits)}; most at {most(waits, lambda w: w.waiting)}) before it "
        f"copies gradients for their reduce-scatter: {buffers} input buffer{'s' * (buffers > 1)} may be alive, and the "
        f"earlier reduce-scatter ({most(waits, lambda w: w.on)}) has not read its own. "
        f"set_reduce_scatter_max_input_buffers({buffers + 1}) lets compute run ahead for one more buffer of memory."
    )


def _asynchronous(waits: list[Wait], total_s: float, found: Explanation) -> str:
    return (
        f"Compute waits {human_ms(total_s)} for all-gathers that are issued on its own stream (unshard_async_op; "
        f"{times(waits)}, most for {most(waits, lambda w: w.on)}): they start after the compute before them, which "
        f"therefore hides nothing. Explicit prefetch issues them before it."
    )


def _reduction(waits: list[Wait], total_s: float, found: Explanation) -> str:
    return (
        f"Compute waits {human_ms(total_s)} for reductions of earlier gradients ({times(waits)}; most before "
        f"{most(waits, lambda w: w.waiting)}, for {most(waits, lambda w: w.on)})."
    )


def _last_reductions(waits: list[Wait], total_s: float, found: Explanation) -> str:
    units = [w.on.unit for w in waits if w.on and w.on.unit]
    of = f" ({names(units)})" if units else ""
    return (
        f"The last reductions{of} cost {human_ms(total_s)}: no backward is left to hide them, and the step cannot end "
        f"without them."
    )


def _last_all_gathers(waits: list[Wait], total_s: float, found: Explanation) -> str:
    return (
        f"Gathering the parameters that the optimizer has updated costs {human_ms(total_s)} at the end of the step: "
        f"nothing is left to compute that could hide it."
    )


def _cpu_issue(waits: list[Wait], total_s: float, found: Explanation) -> str:
    if found.run.on_cpu:
        return (
            f"Compute waits {human_ms(total_s)} ({times(waits)}; most before {most(waits, lambda w: w.waiting)}) while "
            f"collectives are issued by the thread that computes. Larger units or fewer micro-batches need fewer."
        )
    return (
        f"The CPU is too slow for {human_ms(total_s)} ({times(waits)}; most before "
        f"{most(waits, lambda w: w.waiting)}): the "
        f"GPU has finished what was issued before more is. Larger units, a larger micro-batch or compiling help."
    )


def _other(waits: list[Wait], total_s: float, found: Explanation) -> str:
    worst = max(waits, key=lambda w: w.seconds)
    on = f", which waits for {said(worst.on)}" if worst.on else ""
    before = f" (most before {said(worst.waiting)}{on})" if worst.waiting else ""
    return f"Compute waits {human_ms(total_s)} for other work{before}."


SAY: dict[Reason, Callable[[list[Wait], float, Explanation], str]] = {
    "first all-gather": _first_all_gather,
    "all-gather": _all_gather,
    "head of line": _head_of_line,
    "slower rank": _slower_rank,
    "rate limiter": _rate_limiter,
    "computing thread": _computing_thread,
    "reduce-scatter buffer": _reduce_scatter_buffer,
    "asynchronous all-gather": _asynchronous,
    "reduction": _reduction,
    "last reductions": _last_reductions,
    "last all-gathers": _last_all_gathers,
    "CPU issue": _cpu_issue,
    "other": _other,
}


def _path(found: Explanation) -> str:
    spent = sorted(
        ((kind, s) for kind, s in found.critical_s.items() if s >= 1e-3 * found.step_time_s), key=lambda one: -one[1]
    )
    shares = ", ".join(f"{percent(seconds, found.step_time_s)} {kind}" for kind, seconds in spent)
    return f"The critical path, the chain of operations that the step's time consists of, is {shares or 'empty'}."


def _units(found: Explanation) -> list[str]:
    counts = Counter(found.bound.values())
    if len(counts) < 2:
        return []
    of_kind = {"network": "the network", "CPU": "the CPU"}
    words = [
        f"{count} {'are ' * (number == 0)}bound by {of_kind.get(kind, kind)} "
        f"({names([unit for unit, bound in found.bound.items() if bound == kind])})"
        for number, (kind, count) in enumerate(counts.most_common())
    ]
    return [f"Of the {len(found.bound)} units on it {', '.join(words)}."]


def _gains(found: Explanation) -> str:
    gains = sorted(found.gains.items(), key=lambda one: -one[1])
    words = {name: "CPU" if name == "cpu" else name for name, _ in gains}
    least = 1e-4 * found.step_time_s
    said = [
        f"10% faster {words[name]} would save {human_ms(gain)} ({percent(gain, found.step_time_s)})"
        if gain > 0
        else f"10% faster {words[name]} would cost {human_ms(-gain)}"
        for name, gain in gains
        if abs(gain) >= least
    ]
    nothing = [words[name] for name, gain in gains if abs(gain) < least]
    if nothing:
        said.append(f"10% faster {' or '.join(nothing)} would change nothing")
    return f"{'; '.join(said)}."


# -- words


def names(units: list[str]) -> str:
    """Up to three names, each once."""
    distinct = list(dict.fromkeys(unit or "the optimizer" for unit in units))
    more = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + more


def plural(units: list[str]) -> str:
    return "" if len(units) == 1 else "s"


def times(waits: list[Wait]) -> str:
    return "once" if len(waits) == 1 else f"{len(waits)} times"


def most(waits: list[Wait], which: Callable[[Wait], Instruction | None]) -> str:
    worst = max(waits, key=lambda w: w.seconds)
    return said(which(worst))


def said(i: Instruction | None) -> str:
    """An operation as a figure labels it."""
    if i is None:
        return "the end of the step"
    return f"{i.op}({i.unit})" if i.communicator else f"{i.op} {i.unit}".rstrip()
