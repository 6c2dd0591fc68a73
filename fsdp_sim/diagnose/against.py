"""`against`: one run beside another, part by part: what grew, what shrank, and what the difference is made of.

A step is what its compute lane did and what it waited for. Both are cut into the same parts, so differences of parts
add up to the difference of the steps. Operations are matched by what they are and by how often that had been before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.findings import Diagnosis
from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.timeline import Event, Op, in_turn
from fsdp_sim.words import human_ms, percent, signed_ms

ALIKE = 0.01  # of the longer step: by how much steps differ that are said to be alike
LITTLE = 0.05  # of the difference: a part that is less is not in the sentences
_COMPUTE = {
    Op.FWD: "forward", Op.BWD: "backward", Op.RECOMPUTE: "forward again in backward", Op.OPTIM: "optimizer",
    Op.OTHER: "other kernels",
}  # fmt: skip
COPIES = "copies and casts"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step in both runs.

    Attributes:
        kind: ``compute``, or ``wait`` for what kept compute waiting.
        here_s, there_s: what it takes in the run that is diagnosed, and in the one it is held against.
        more_s: by how much it is longer here; these add up to the difference of the steps.
        exposed_here_s, exposed_there_s: of a wait the time in which communication is in flight.
    """

    kind: str
    name: str
    here_s: float
    there_s: float
    more_s: float
    exposed_here_s: float = 0.0
    exposed_there_s: float = 0.0


class OperationChange(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of one kind and unit that both have, and what all of them take, waiting included."""

    op: Op
    unit: str
    times: int
    here_s: float
    there_s: float
    more_s: float


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """One step held against that of another run.

    Attributes:
        step_here_s, step_there_s: how long they take; ``more_s``: here less there.
        parts: of both steps, those that differ most first; `Part.more_s` add up to ``more_s``.
        kernels: of forward and backward by kind of kernel, where both runs say it. They are in ``parts`` already.
        operations: that both have, those that differ most first.
        only_here, only_there: labels of operations that the other does not have, with how often.
        sentences: the same in words.
    """

    step_here_s: float
    step_there_s: float
    more_s: float
    parts: list[Part]
    kernels: list[Part]
    operations: list[OperationChange]
    only_here: dict[str, int]
    only_there: dict[str, int]
    sentences: list[str]


def against(here: tuple[StepObservation, Diagnosis], there: tuple[StepObservation, Diagnosis]) -> Against:
    """Hold a step against another's; both on the rank that was looked at."""
    (seen_here, found_here), (seen_there, found_there) = here, there
    parts = _parts("compute", _computed(seen_here), _computed(seen_there))
    parts += _waits(found_here, found_there)
    parts.sort(key=lambda part: -abs(part.more_s))
    kernels = _kernels(seen_here), _kernels(seen_there)
    operations, only_here, only_there = _operations(seen_here.events, seen_there.events)
    more_s = found_here.step_s - found_there.step_s
    plain = Against(
        step_here_s=found_here.step_s, step_there_s=found_there.step_s, more_s=more_s, parts=parts,
        kernels=_parts("compute", *kernels) if all(kernels) else [], operations=operations, only_here=only_here,
        only_there=only_there, sentences=[],
    )  # fmt: skip
    return msgspec.structs.replace(plain, sentences=_sentences(plain))


def _parts(kind: str, here: dict[str, float], there: dict[str, float]) -> list[Part]:
    return [
        Part(
            kind=kind, name=name, here_s=here.get(name, 0.0), there_s=there.get(name, 0.0),
            more_s=here.get(name, 0.0) - there.get(name, 0.0),
        )
        for name in dict.fromkeys((*here, *there))
    ]  # fmt: skip


def _computed(found: StepObservation) -> dict[str, float]:
    """What the compute lane worked for; of operations that overlap on it, time counts once."""
    seconds: Counter[str] = Counter()
    for e, (since_s, until_s) in in_turn(found.computing):
        seconds[_COMPUTE.get(e.op, COPIES)] += until_s - since_s - e.unlaunched_s  # type: ignore[assignment]
    return dict(seconds)


def _kernels(found: StepObservation) -> dict[str, float]:
    """Forward and backward by kind of kernel; empty where the record has none."""
    seconds = dict.fromkeys(("matmul kernels", "attention kernels", "other kernels"), 0.0)
    for e in found.computing:
        if e.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
            seconds["matmul kernels"] += e.matmul_s
            seconds["attention kernels"] += e.attention_s
            seconds["other kernels"] += e.duration_s - e.unlaunched_s - e.matmul_s - e.attention_s
    return seconds if seconds["matmul kernels"] else {}


def _waits(here: Diagnosis, there: Diagnosis) -> list[Part]:
    idle: list[dict[Culprit, tuple[float, float]]] = [
        {blame.culprit: (blame.idle_s, blame.exposed_s) for blame in found.culprits} for found in (here, there)
    ]
    none = (0.0, 0.0)
    return [
        Part(
            kind="wait", name=str(culprit), here_s=(mine := idle[0].get(culprit, none))[0],
            there_s=(other := idle[1].get(culprit, none))[0], more_s=mine[0] - other[0],
            exposed_here_s=mine[1], exposed_there_s=other[1],
        )
        for culprit in dict.fromkeys((*idle[0], *idle[1]))
    ]  # fmt: skip


def _operations(
    here: Sequence[Event], there: Sequence[Event]
) -> tuple[list[OperationChange], dict[str, int], dict[str, int]]:
    """Matched operations added up by kind and unit, and those that only one run has."""
    keyed = _keyed(here), _keyed(there)
    both: dict[tuple[Op, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for what, e in keyed[0].items():
        if (other := keyed[1].get(what)) is not None:
            row = both[e.op, e.unit]
            row[0] += 1
            row[1] += e.duration_s
            row[2] += other.duration_s
    changes = [
        OperationChange(op=op, unit=unit, times=int(times), here_s=mine_s, there_s=its_s, more_s=mine_s - its_s)
        for (op, unit), (times, mine_s, its_s) in both.items()
    ]
    changes.sort(key=lambda change: -abs(change.more_s))
    alone = [
        dict(Counter(e.label for what, e in keyed[i].items() if what not in keyed[1 - i]).most_common()) for i in (0, 1)
    ]
    return changes, alone[0], alone[1]


def _keyed(events: Iterable[Event]) -> dict[tuple[Op, str, int, int], Event]:
    seen: Counter[tuple[Op, str, int]] = Counter()
    keyed = {}
    for e in events:
        what = (e.op, e.unit, e.micro_batch)
        keyed[*what, seen[what]] = e
        seen[what] += 1
    return keyed


def _name(part: Part) -> str:
    return f"computing {part.name}" if part.kind == "compute" else f"waiting for this: {part.name}"


def _sentences(found: Against) -> list[str]:
    longer = "longer" if found.more_s >= 0 else "shorter"
    share = percent(abs(found.more_s), found.step_there_s)
    if abs(found.more_s) < ALIKE * max(found.step_here_s, found.step_there_s):
        said = [
            f"The steps are alike: {human_ms(found.step_here_s)} here, {human_ms(found.step_there_s)} there "
            f"({signed_ms(found.more_s)})."
        ]
    else:
        said = [
            f"The step takes {human_ms(found.step_here_s)}, {human_ms(abs(found.more_s))} ({share}) {longer} than the "
            f"{human_ms(found.step_there_s)} that it is held against."
        ]
    least_s = max(LITTLE * abs(found.more_s), 0.002 * found.step_there_s)
    with_it = [p for p in found.parts if p.more_s * found.more_s > 0 and abs(p.more_s) >= least_s]
    counter = [p for p in found.parts if p.more_s * found.more_s < 0 and abs(p.more_s) >= least_s]
    if with_it:
        said.append("What makes it so: " + "; ".join(map(_change, with_it[:3])) + ".")
    if counter:
        said.append("The other way: " + "; ".join(map(_change, counter[:3])) + ".")
    if found.operations and abs(found.operations[0].more_s) >= least_s:
        top = found.operations[0]
        what = f"{top.op}({top.unit})" if top.unit else str(top.op)
        many = f", {top.times} of them in both" if top.times > 1 else ""
        said.append(
            f"Of the operations that both have {what} changes most: {human_ms(top.here_s)} for "
            f"{human_ms(top.there_s)} ({signed_ms(top.more_s)}{many})."
        )
    return said


def _change(part: Part) -> str:
    return f"{signed_ms(part.more_s)} of {_name(part)} ({human_ms(part.here_s)} for {human_ms(part.there_s)})"
