"""What two timelines have in common and where they part, in sentences."""

from __future__ import annotations

from fsdp_sim.timeline import Comparison, Event, Timeline
from fsdp_sim.viz import theme
from fsdp_sim.words import human_ms, signed_ms

SAME_S = 1e-9  # what clocks of different origin may round
TELLING = 0.005  # of the longer step: differences below it are not worth a clause


def name_of(timeline: Timeline) -> str:
    """What a timeline is called where nobody named it."""
    clock = {"simulated": "predicted"}.get(timeline.header.clock, timeline.header.clock)
    return timeline.header.title or clock or timeline.header.producer


def headline(found: Comparison, names: tuple[str, str]) -> str:
    """One sentence: which is faster, by how much, and the largest cause."""
    sentence = _headline(found, _quoted(names))
    return sentence[:1].upper() + sentence[1:]


def _quoted(names: tuple[str, str]) -> tuple[str, str]:
    """Names that can stand in a sentence, whatever words they are made of."""
    return f"“{names[0]}”", f"“{names[1]}”"


def _headline(found: Comparison, names: tuple[str, str]) -> str:
    a_s, b_s = found.a.step_s, found.b.step_s
    difference_s = found.step_difference_s
    if found.identical:
        return f"{names[0]} and {names[1]} {_alike(found)}: {len(found.pairs):,} operations, {human_ms(a_s)} a step."
    if abs(difference_s) <= TELLING * max(a_s, b_s):
        return f"{names[1]} takes as long as {names[0]}: {human_ms(b_s)} a step."
    share = f" ({abs(difference_s) / a_s:.0%})" if a_s else ""
    shorter = "shorter" if difference_s < 0 else "longer"
    first = f"a step of {names[1]} is {human_ms(abs(difference_s))}{share} {shorter} than one of {names[0]}"
    causes, _ = _clauses(found)
    return f"{first}: {causes[0]}." if causes else f"{first}."


def _alike(found: Comparison) -> str:
    return "are identical" if max(pair.apart_s for pair in found.pairs) <= SAME_S else "run alike"


def finding(found: Comparison, names: tuple[str, str]) -> str:
    """The whole story: step times, causes, units, the first divergence, where times part."""
    a, b, names = found.a, found.b, _quoted(names)
    if found.identical:
        same = f"{names[0]} and {names[1]} {_alike(found)}: the same {len(found.pairs):,} operations in the same order"
        apart_s = max(pair.apart_s for pair in found.pairs)
        apart = f", none more than {human_ms(apart_s)} apart" if apart_s > SAME_S else ""
        return f"{same}{apart}; a step takes {human_ms(a.step_s)}."
    steps = f"A step takes {human_ms(a.step_s)} in {names[0]} and {human_ms(b.step_s)} in {names[1]}"
    share = f", {found.step_difference_s / a.step_s:+.0%}".replace("-", "−") if a.step_s else ""
    sentences = [f"{steps} ({signed_ms(found.step_difference_s)}{share})."]
    causes, against = _clauses(found)
    lines = [_listed(clauses) for clauses in (causes, against) if clauses]
    if lines:
        sentences.append(f"In {names[1]}, {'; against that, '.join(lines)}.")
    sentences += _of_units(found)
    order = [_of_order(found, names), _of_times(found, names)]
    return " ".join(sentences) + "\n\n" + " ".join(filter(None, order))


def _clauses(found: Comparison) -> tuple[list[str], list[str]]:
    """The causes of the difference that are worth telling, the largest first, and what works against them."""
    causes, least_s = found.causes, TELLING * max(found.a.step_s, found.b.step_s)
    exposed = f"{human_ms(abs(causes.exposed_s))} {'more' if causes.exposed_s > 0 else 'less'} communication is exposed"
    if abs(causes.comm_s) > least_s:
        exposed += f" (communicating is {human_ms(abs(causes.comm_s))} {_longer(causes.comm_s)})"
    parts = [
        (causes.compute_s, f"computing, with copies, is {human_ms(abs(causes.compute_s))} {_longer(causes.compute_s)}"),
        (causes.exposed_s, exposed),
        (causes.idle_s, f"the rank idles {human_ms(abs(causes.idle_s))} {_longer(causes.idle_s)}"),
    ]
    worth = [one for one in sorted(parts, key=lambda one: -abs(one[0])) if abs(one[0]) > least_s]
    sign = 1 if found.step_difference_s >= 0 else -1
    return [text for s, text in worth if s * sign > 0], [text for s, text in worth if s * sign <= 0]


def _longer(seconds: float) -> str:
    return "longer" if seconds > 0 else "shorter"


def _listed(clauses: list[str]) -> str:
    return clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"


def _of_units(found: Comparison) -> list[str]:
    """In how many units communication is now better or worse hidden, and in which most."""
    least_s = TELLING * max(found.a.step_s, found.b.step_s) / 10
    talking = [u for u in found.units if (u.a and u.a.comm_s) or (u.b and u.b.comm_s)]
    sentences = []
    for sign, verb in ((-1, "shrinks"), (1, "grows")):
        moved = [u for u in talking if sign * u.exposed_s > least_s]
        if moved:
            most = max(moved, key=lambda u: abs(u.exposed_s))
            gone = sum(u.b is None or u.b.exposed_s <= least_s for u in moved)
            sentences.append(
                f"The exposed part {verb} in {len(moved)} of the {len(talking)} units that communicate"
                + (f" (to nothing in {gone})" if gone and sign < 0 else "")
                + f", most in {most.unit or 'the unnamed one'} ({signed_ms(most.exposed_s)})."
            )
    return sentences


def _of_order(found: Comparison, names: tuple[str, str]) -> str:
    at = found.divergence
    if at is None:
        copies = len(found.only_a) + len(found.only_b)
        but = f" but for {copies:,} copies and casts that only one of them records" if copies else ""
        return f"Both issue the same operations in the same order{but}."
    sentences = [f"{name} {_issues(event)}" for name, event in zip(names, (at.a, at.b), strict=True)]
    alone = {
        "only in a": f", and {names[1]} never does what {names[0]} does there",
        "only in b": f", and {names[0]} never does what {names[1]} does there",
        "different": ", each something that the other never does",
        "order": "; both do both, in another order",
    }[at.why]
    only = zip(names, (found.only_a, found.only_b), strict=True)
    counts = [f"{len(some):,} are only in {name}" for name, some in only if some]
    of = f" Of all operations, {' and '.join(counts)}." if counts else ""
    return f"The issue orders first differ after {at.place:,} operations: {sentences[0]} and {sentences[1]}{alone}.{of}"


def _issues(event: Event | None) -> str:
    return "has ended" if event is None else f"issues {theme.OP_NAMES[event.op]} {event.unit}".rstrip()


def _of_times(found: Comparison, names: tuple[str, str]) -> str:
    at = found.parted
    if at is None:
        return f"What is in both runs at the same times, within {human_ms(found.tolerance_s)}."
    what = f"{theme.OP_NAMES[at.a.op]} {at.a.unit}".rstrip()
    if abs(at.start_later_s) > found.tolerance_s:
        how = f"starts {human_ms(abs(at.start_later_s))} {'later' if at.start_later_s > 0 else 'earlier'}"
    else:
        how = f"ends {human_ms(abs(at.end_later_s))} {'later' if at.end_later_s > 0 else 'earlier'}"
    return f"Times first part by more than {human_ms(found.tolerance_s)} at {what}, which {how} in {names[1]}."
