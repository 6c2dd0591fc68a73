"""What a snapshot of CUDA's memory says: allocated and reserved over time, and what stands at the peak.

Beside a trace of the same run it also says which step and operation the peak falls into, and beside a prediction where
the two differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from fsdp_sim.timeline import Memory, Phase, Snapshot, Timeline, spans_of_steps
from fsdp_sim.timeline.snapshot import FOR_COMPUTE, PARALLEL, AllocationMoment, Block, Frame, Totals, phase_of, purposes
from fsdp_sim.words import human_bytes, human_ms, percent

DIFFERS = 0.1  # of the larger one: two amounts of a kind that differ by more are named
LITTLE = 0.01  # of the peak: less is not named
POINTS = 400  # of the curve
KINDS: dict[str, frozenset[Memory]] = {
    "model states, and what no call tells": frozenset(
        {Memory.SHARDED, Memory.OPTIMIZER, Memory.RS_OUTPUT, Memory.NONE}
    ),
    "unsharded parameters": frozenset({Memory.UNSHARDED}),
    "all-gather buffers": frozenset({Memory.AG_OUTPUT}),
    "reduce-scatter buffers": frozenset({Memory.RS_INPUT}),
    "activations, logits, gradients before their reduction, temporaries": frozenset(FOR_COMPUTE),
}
"""What is compared with a prediction: categories that a snapshot cannot always tell apart are together."""


class MemoryGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are alive at the peak, for the same and from the same line.

    Attributes:
        kind: what for, a category of `Memory`; empty where no call tells.
        where: the innermost call outside of torch, else the innermost; ``before the recording`` where it was there.
    """

    kind: str
    where: str
    bytes: int
    blocks: int


class MemoryPoint(msgspec.Struct, frozen=True):
    """The most that was allocated, and reserved, in a short time from `at_s`, which counts from the first action."""

    at_s: float
    allocated_bytes: int
    reserved_bytes: int


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that failed: bytes asked for, that tensors held, torch had reserved, the device had left."""

    at_s: float
    asked_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_free_bytes: int
    where: str


class StepPeak(msgspec.Struct, frozen=True):
    """The most that was allocated and reserved in a step of the trace."""

    step: int
    allocated_bytes: int
    reserved_bytes: int


class KindBeside(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of memory at the two peaks. ``differs``: by more than a tenth of the larger one."""

    kind: str
    measured_bytes: int
    predicted_bytes: int
    differs: bool


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """The measured peak beside the predicted one."""

    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    kinds: list[KindBeside]
    sentences: list[str]


class MemoryFound(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot says.

    Attributes:
        device: its number.
        peak_bytes: the most that tensors had asked for; ``reserved_bytes``: what torch had of the device then;
            ``most_reserved_bytes``: at any time.
        peak_at_s: seconds from the first action of the recording. phase: of training, in which the peak comes.
        kinds: bytes at the peak by category of `Memory`, largest first.
        groups: the same by the line that allocated, largest first.
        curve: over time.
        steps: of the trace that it was laid beside.
        predicted: a prediction beside it.
    """

    device: int
    peak_bytes: int
    reserved_bytes: int
    most_reserved_bytes: int
    peak_at_s: float
    phase: Phase
    kinds: dict[str, int]
    groups: list[MemoryGroup]
    curve: list[MemoryPoint]
    out_of_memory: list[OutOfMemory]
    sentences: list[str]
    notes: list[str]
    steps: list[StepPeak] = []
    predicted: Beside | None = None


def memory_found(snapshot: Snapshot, timeline: Timeline | None = None, rank: int = 0) -> MemoryFound:
    """What a snapshot says, and which step and operation of a trace of the same process its peak falls into.

    Raises:
        ValueError: nothing was allocated on the device.
    """
    blocks = snapshot.blocks()
    if not blocks:
        raise ValueError("the snapshot says of no tensor; record a training step")
    totals = Totals.of(snapshot, blocks)
    peak = totals.peak
    alive = [one for one in blocks if one.born.number <= peak and (one.died is None or one.died.number > peak)]
    kinds: dict[str, int] = {}
    groups: dict[tuple[str, str], list[int]] = {}
    for block, kind in zip(alive, purposes(blocks, alive), strict=True):
        kinds[kind] = kinds.get(kind, 0) + block.bytes
        groups.setdefault((kind, _where(block)), []).append(block.bytes)
    origin_s = totals.at_s[0]
    frames = snapshot.actions[peak - 1].frames if peak else ()
    found = MemoryFound(
        device=snapshot.device, peak_bytes=totals.allocated_bytes[peak], reserved_bytes=totals.reserved_bytes[peak],
        most_reserved_bytes=max(totals.reserved_bytes), peak_at_s=totals.at_s[peak] - origin_s,
        phase=phase_of(frames) if peak and _told(snapshot) else Phase.NONE,
        kinds=dict(sorted(kinds.items(), key=lambda one: -one[1])),
        groups=sorted(
            (
                MemoryGroup(kind=kind, where=where, bytes=sum(n_bytes), blocks=len(n_bytes))
                for (kind, where), n_bytes in groups.items()
            ),
            key=lambda group: -group.bytes,
        ),
        curve=_curve(totals), out_of_memory=_failures(snapshot, totals), sentences=[],
        notes=_notes(snapshot, totals, blocks),
    )  # fmt: skip
    sentences = [_peak_sentence(found, bool(snapshot.actions)), *map(_failure_sentence, found.out_of_memory)]
    steps: list[StepPeak] = []
    if timeline is not None:
        said, steps = _beside_trace(totals, timeline, rank)
        sentences.append(said)
    return msgspec.structs.replace(found, sentences=sentences, steps=steps)


def beside_prediction(
    found: MemoryFound, predicted: Mapping[Memory, int], reserved_bytes: int, name: str
) -> MemoryFound:
    """The same with what was predicted beside it.

    Args:
        predicted: bytes by category at the predicted peak.
        reserved_bytes: what torch was predicted to reserve at most.
        name: what was predicted, for the sentences.
    """
    peak = sum(predicted.values())
    kinds = []
    for kind, categories in KINDS.items():
        mine = sum(found.kinds.get(category, 0) for category in categories)
        theirs = sum(predicted.get(category, 0) for category in categories)
        off = abs(mine - theirs)
        differs = off > DIFFERS * max(mine, theirs) and off > LITTLE * max(peak, found.peak_bytes)
        if mine or theirs:
            kinds.append(KindBeside(kind=kind, measured_bytes=mine, predicted_bytes=theirs, differs=differs))
    first = (
        f"Predicted for {name} are {human_bytes(peak)} at the peak; measured are {human_bytes(found.peak_bytes)}, "
        f"{_off(found.peak_bytes, peak)}."
    )
    off_by = [
        f"{one.kind[0].upper()}{one.kind[1:]}: {human_bytes(one.measured_bytes)} measured, "
        f"{human_bytes(one.predicted_bytes)} predicted, {_off(one.measured_bytes, one.predicted_bytes)}."
        for one in kinds if one.differs
    ]  # fmt: skip
    rest = [] if off_by else [f"No kind of memory differs by more than {DIFFERS:.0%}."]
    beside = Beside(
        predicted_peak_bytes=peak, predicted_reserved_bytes=reserved_bytes, kinds=kinds,
        sentences=[first, *off_by, *rest],
    )  # fmt: skip
    return msgspec.structs.replace(found, predicted=beside)


def _off(measured: int, predicted: int) -> str:
    if not predicted:
        return "all of it unpredicted"
    if abs(measured - predicted) < 0.005 * predicted:
        return "as predicted"
    if measured >= 2 * predicted:
        return f"{measured / predicted:.1f} times as much"
    return f"{percent(abs(measured - predicted), predicted)} {'more' if measured > predicted else 'less'}"


def _where(block: Block) -> str:
    """The line that asked for a block."""
    frames = block.born.frames
    if not frames:
        return "a thread without Python's calls, as autograd's" if block.born.number else "before the recording"
    if any(part in frames[0].filename for part in PARALLEL):
        return _call(frames[0])
    own = next((one for one in frames if one.filename.endswith(".py") and not _installed(one)), None)
    return _call(own or next((one for one in frames if one.filename.endswith(".py")), frames[0]))


def _installed(frame: Frame) -> bool:
    return "/torch/" in frame.filename or "/lib/python" in frame.filename or "site-packages" in frame.filename


def _call(frame: Frame) -> str:
    file = frame.filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{file}:{frame.line} {frame.name}" if file else frame.name


def _told(snapshot: Snapshot) -> bool:
    return any(one.frames for one in snapshot.actions)


def _curve(totals: Totals) -> list[MemoryPoint]:
    """At most `POINTS` points, each the most of as many actions: a peak is never left out."""
    n = len(totals.at_s)
    size = -(-n // POINTS)
    return [
        MemoryPoint(
            totals.at_s[i] - totals.at_s[0], max(totals.allocated_bytes[i : i + size]),
            max(totals.reserved_bytes[i : i + size]),
        )
        for i in range(0, n, size)
    ]  # fmt: skip


def _failures(snapshot: Snapshot, totals: Totals) -> list[OutOfMemory]:
    return [
        OutOfMemory(
            at_s=one.at_s - totals.at_s[0], asked_bytes=one.bytes, allocated_bytes=totals.allocated_bytes[number],
            reserved_bytes=totals.reserved_bytes[number], device_free_bytes=one.free_bytes,
            where=_where(Block(one.bytes, AllocationMoment(number, one.at_s, one.frames))),
        )
        for number, one in enumerate(snapshot.actions, start=1) if one.action == "oom"
    ]  # fmt: skip


def _peak_sentence(found: MemoryFound, recorded: bool) -> str:
    over = found.reserved_bytes - found.peak_bytes
    when = f", {human_ms(found.peak_at_s)} into the recording" if recorded else ", at the moment of the snapshot"
    during = f", in {found.phase}" if found.phase else ""
    return (
        f"Tensors hold {human_bytes(found.peak_bytes)} at the peak{when}{during}; torch has reserved "
        f"{human_bytes(found.reserved_bytes)} of the device, {human_bytes(over)} "
        f"({percent(over, found.reserved_bytes)}) of it unused."
    )


def _failure_sentence(one: OutOfMemory) -> str:
    return (
        f"Out of memory {human_ms(one.at_s)} into the recording: {human_bytes(one.asked_bytes)} were asked for at "
        f"{one.where}, with {human_bytes(one.device_free_bytes)} left on the device and "
        f"{human_bytes(one.reserved_bytes - one.allocated_bytes)} reserved but unused."
    )


def _notes(snapshot: Snapshot, totals: Totals, blocks: Sequence[Block]) -> list[str]:
    notes = []
    if snapshot.others:
        notes.append(f"Looked at is device {snapshot.device}; the snapshot has others: {snapshot.others}.")
    if not snapshot.actions:
        notes.append(
            "The snapshot has no history, so it says what stands at its moment and not what stood at the peak: call "
            "torch.cuda.memory._record_memory_history() before the first step."
        )
        return notes
    if not _told(snapshot):
        notes.append('The allocations came without calls, so nothing is known of their purpose: record context="all".')
    elif not any(one.frames for one in snapshot.actions if one.action == "free_requested"):
        notes.append(
            'Frees came without calls (context="alloc"), so what forward frees at once is not told from what it keeps '
            'for backward: record context="all".'
        )
    before = sum(one.bytes for one in blocks if one.born.number == 0 and not one.born.frames)
    if before > LITTLE * totals.allocated_bytes[totals.peak]:
        notes.append(
            f"{human_bytes(before)} were there before the recording began, mostly parameters and optimizer states; "
            "record from before the model is made to have them told apart."
        )
    at_end = sum(one.bytes for one in snapshot.alive)
    if abs(at_end - totals.allocated_bytes[-1]) > LITTLE * max(at_end, totals.allocated_bytes[-1]):
        notes.append(
            f"The history ends with {human_bytes(totals.allocated_bytes[-1])} allocated and the segments have "
            f"{human_bytes(at_end)}: allocations are missing in it, so the peak may be another."
        )
    return notes


def _beside_trace(totals: Totals, timeline: Timeline, rank: int) -> tuple[str, list[StepPeak]]:
    """Where in the trace the peak comes, and the peak of each step; or why that cannot be said."""
    began_s = timeline.header.began_unix_s
    if not began_s or not totals.at_s[-1]:
        lacks = "The trace" if not began_s else "The snapshot"
        return (
            f"{lacks} does not say when it was by the machine's clock, so they are not laid beside each other.",
            [],
        )
    at_s = [one - began_s for one in totals.at_s]
    steps = []
    for step, (begin, end) in spans_of_steps(timeline).items():
        first, last = bisect_right(at_s, begin), bisect_right(at_s, end)
        within = slice(max(first - 1, 0), last)
        if last and first < len(at_s):
            steps.append(StepPeak(step, max(totals.allocated_bytes[within]), max(totals.reserved_bytes[within])))
    peak_s = at_s[totals.peak]
    ops = [e for e in timeline.ops if e.rank == rank]
    issued = sorted(ops, key=lambda e: e.issue_s)
    if not issued or not issued[0].issue_s <= peak_s <= max(e.end_s for e in ops):
        first_s = issued[0].issue_s if issued else 0.0
        side = f"{human_ms(first_s - peak_s)} before it begins" if peak_s < first_s else "after its end"
        return f"The peak is outside of the trace: {side}.", steps
    last_issued = issued[bisect_right([e.issue_s for e in issued], peak_s) - 1]
    return (
        f"In the trace that is step {last_issued.step}, when the CPU of rank {rank} had just issued "
        f"{last_issued.label}{f' in {last_issued.phase}' if last_issued.phase else ''}."
    ), steps
