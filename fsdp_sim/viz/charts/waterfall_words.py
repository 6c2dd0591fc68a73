"""What memory is made of, whether it fits and what would make it fit, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.cost import workload
from fsdp_sim.explore import changes_that_fit
from fsdp_sim.requests import Change
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.spec import Model
from fsdp_sim.viz import theme
from fsdp_sim.viz.charts.alive import AliveBars, AlivePart
from fsdp_sim.viz.theme import MEMORY
from fsdp_sim.words import human_bytes, human_rate

MAX_REMEDIES = 3


def headline(a: AliveBars) -> str:
    """One sentence: how much, of how much, and what dominates."""
    kind, n_bytes, _ = _dominant(a)
    share = n_bytes / a.total_bytes if a.total_bytes else 0.0
    room = f" of {human_bytes(a.limit_bytes)}" if a.limit_bytes else ""
    over = f", {a.verdict}" if a.verdict else ""
    what = a.what[0].upper() + a.what[1:]
    return f"{what} is {human_bytes(a.total_bytes)}{room}{over}: {share:.0%} of it is {kind}."


def headline_of_several(alive: dict[str, AliveBars]) -> str:
    """One sentence: the least and the most, and which do not fit."""
    least = min(alive, key=lambda name: alive[name].total_bytes)
    most = max(alive, key=lambda name: alive[name].total_bytes)
    low, high = alive[least].total_bytes, alive[most].total_bytes
    refused = sum(a.fit is Fit.DOES_NOT_FIT for a in alive.values())
    edge = sum(a.fit is Fit.EDGE for a in alive.values())
    fit = f"; {edge} of {len(alive)} on the edge" if edge else ""
    fit += f"; {refused} of {len(alive)} {'does' if refused == 1 else 'do'} not fit" if refused else ""
    if low == high:
        return f"All take {human_bytes(low)}{fit}."
    return f"Memory peaks at {human_bytes(low)} ({least}) to {human_bytes(high)} ({most}){fit}."


def finding(alive: dict[str, AliveBars], fixes: dict[str, list[Change] | None]) -> str:
    """A paragraph for each."""
    sentences = []
    for name, a in alive.items():
        text = _story(a, fixes.get(name))
        sentences.append(text if len(alive) == 1 else f"{name}: {text[0].lower()}{text[1:]}")
    return "\n\n".join(sentences)


def _story(a: AliveBars, fixes: list[Change] | None) -> str:
    if not a.total_bytes:
        return f"At {a.what} nothing is alive on rank {a.rank}."
    kind, n_bytes, parts = _dominant(a)
    when = f", during {theme.OP_NAMES[a.during.op]} {a.during.unit}".rstrip() if a.during is not None else ""
    sentences = [f"At {a.what}{when}, {human_bytes(a.total_bytes)} are alive on rank {a.rank}."]
    sentences.append(f"Most of it, {human_bytes(n_bytes)} ({n_bytes / a.total_bytes:.0%}), is {kind}{_divided(parts)}.")
    others = sorted(((sum(p.bytes for p in ps), MEMORY[c].name) for c, ps in a.by_category.items()), reverse=True)[1:3]
    if others:
        sentence = " and ".join(f"{human_bytes(b)} of {name}" for b, name in others)
        sentences.append(f"Then come {sentence}.")
    if a.too_much_bytes:
        device = human_bytes(a.limit_bytes)
        sentences.append(f"That is {human_bytes(a.too_much_bytes)} more than the device's {device}.")
    elif a.why:
        sentences.append(f"{a.why}.")
    elif a.limit_bytes:
        free = a.limit_bytes - a.total_bytes
        sentences.append(f"{human_bytes(free)} of the device's {human_bytes(a.limit_bytes)} stay free.")
    return " ".join([*sentences, *_cure(fixes)])


def _cure(fixes: list[Change] | None) -> list[str]:
    if fixes is None:
        return []
    if not fixes:
        return ["No change that was tried makes it fit."]
    sentences = [
        f"{c.what} ({human_bytes(c.peak_memory_bytes)}, {human_rate(c.tokens_per_s_per_gpu)} tokens/s per GPU)"
        for c in fixes[:MAX_REMEDIES]
    ]
    return [f"What would make it fit, the fastest first: {'; or '.join(sentences)}."]


def remedies(sim: Simulation) -> list[Change] | None:
    """What would make a simulation fit that does not, or is on the edge; None where it fits, or where its model is not
    of the catalogue.

    A simulation knows its workload and not the model that was asked for; that is the catalogue's model of the same name
    if that makes the very same workload.
    """
    if sim.fit is Fit.FITS:
        return None
    try:
        model = Model.preset(sim.workload.name)
        if workload(model, sim.plan) != sim.workload:
            return None
    except ValueError:
        return None
    return changes_that_fit(model, sim.cluster, sim.plan)


def groups(parts: Sequence[AlivePart]) -> list[tuple[int, list[str]]]:
    """Units by the size of their part, the sizes that make up most first."""
    found: dict[int, list[str]] = {}
    for part in parts:
        found.setdefault(part.bytes, []).append(part.unit)
    return sorted(found.items(), key=lambda one: -one[0] * len(one[1]))


def _dominant(a: AliveBars) -> tuple[str, int, list[AlivePart]]:
    if not a.by_category:
        return "nothing", 0, []
    category, parts = max(a.by_category.items(), key=lambda one: sum(p.bytes for p in one[1]))
    return MEMORY[category].name, sum(p.bytes for p in parts), parts


def _divided(parts: Sequence[AlivePart]) -> str:
    """``: 32 units hold 1.2 GiB each``."""
    (bytes_each, units), *_ = groups(parts)
    if len(units) > 1:
        return f": {len(units)} units, {units[0]} to {units[-1]}, have {human_bytes(bytes_each)} each"
    largest = max(parts, key=lambda p: p.bytes)
    return f", of {largest.unit}" if len(parts) == 1 and largest.unit else ""
