"""Where ranks have stopped: who waits in which collective of which unit, and who never came to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fsdp_sim.ranks.watchdog import listed
from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import Op
from labs.cluster.flight_recorder.dumps import Dump, Entry
from labs.wrapping.precision import DTYPES


@dataclass(frozen=True)
class Mismatch:
    """Ranks of one group that are not at the same collective.

    Attributes:
        group: name of the group, as in ``default_pg``.
        seq: the number of the collective in the group.
        kind: as in ``all-gather``, by those that wait.
        unit: whose parameters or gradients it carries; empty where that is not known.
        waiting: ranks that have issued it.
        missing: ranks that have not; or, of a mismatch, those that issued another one.
        mismatch: what the others issued in its place; empty if they issued nothing.
    """

    group: str
    seq: int
    kind: str
    unit: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    mismatch: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} #{self.seq}" + f" ({self.unit})" * bool(self.unit)
        if self.mismatch:
            return f"{listed(self.missing)} issued {self.mismatch} where {listed(self.waiting)} issued {what}"
        waits = "waits" if len(self.waiting) == 1 else "wait"
        return f"{listed(self.missing)} never came to {what}; {listed(self.waiting)} {waits} in it"


def diagnose(dumps: Mapping[int, Dump], step: Sequence[Instruction] = ()) -> list[Mismatch]:
    """Where ranks have stopped: first what is the cause, then what follows from it.

    A rank that waits in one group is missing in another. So the cause is a group whose missing ranks wait nowhere.

    Args:
        dumps: of all ranks. Who has none cannot be told from who is missing.
        step: the collectives of a training step in order, as `labs.measure.simulated` has them, to name units.

    Returns:
        Nothing if in every group all ranks have issued the same.
    """
    findings = [finding for name in _groups(dumps) if (finding := _look(name, dumps, step))]
    waiting = {rank for finding in findings for rank in finding.waiting}
    return sorted(findings, key=lambda finding: (not finding.mismatch, len(waiting.intersection(finding.missing))))


def _groups(dumps: Mapping[int, Dump]) -> list[str]:
    return list(dict.fromkeys(entry.process_group[0] for dump in dumps.values() for entry in dump.entries))


def _look(name: str, dumps: Mapping[int, Dump], step: Sequence[Instruction]) -> Mismatch | None:
    mine: dict[int, dict[int, Entry]] = {}
    for rank, dump in dumps.items():
        known = msgspec.json.decode(dump.pg_config[name].ranks, type=list[int]) if name in dump.pg_config else []
        entries = {e.collective_seq_id: e for e in dump.entries if e.process_group[0] == name and not e.is_p2p}
        if entries or rank in known:
            mine[rank] = entries
    last = {rank: max(entries, default=0) for rank, entries in mine.items()}
    # A ring buffer has forgotten the first ones, on each rank others.
    first = max((min(entries) for entries in mine.values() if entries), default=1)
    end = min(last.values()) + 1
    for seq in range(min(first, end), end + 1):
        at = {rank: entries[seq] for rank, entries in mine.items() if seq in entries}
        if not at:
            break
        most = max(at.values(), key=lambda entry: sum(entry.signature == other.signature for other in at.values()))
        others = tuple(rank for rank, entry in at.items() if entry.signature != most.signature)
        missing = others or tuple(rank for rank in mine if rank not in at)
        if not missing:
            continue
        waiting = tuple(rank for rank in at if rank not in missing)
        unit = unit_of([mine[waiting[0]][i] for i in sorted(mine[waiting[0]]) if i <= seq], step)
        other = at[others[0]] if others else None
        mismatch = f"{other.kind} of {other.numel:,} elements" if other else ""
        kind = f"{most.kind} of {most.numel:,} elements," if other and other.kind == most.kind else most.kind
        return Mismatch(most.process_group[1], seq, kind.rstrip(","), unit, waiting, missing, mismatch)
    return None


def unit_of(entries: Sequence[Entry], step: Sequence[Instruction]) -> str:
    """The unit of the last of a group's collectives.

    A dump does not name units. But a training repeats its step, and units differ in size: the last collectives fit the
    program of the step at one place only, or at several that are of one unit.

    Args:
        entries: of one group, in order. Those of a size that no collective of the step has (a loss) are passed over.
        step: a step's collectives, in order.

    Returns:
        Its name; empty if several places fit equally well, or none does.
    """
    best, units = 0, {""}
    for communicator in dict.fromkeys(i.communicator for i in step):
        program = [i for i in step if i.communicator == communicator]
        sizes = [_numel(i) for i in program]
        seen = [entry.numel for entry in entries if entry.numel in sizes]
        if not entries or not seen or entries[-1].numel not in sizes:
            continue
        for place, i in enumerate(program):
            fits = 0
            while fits < len(seen) and seen[-1 - fits] == sizes[(place - fits) % len(sizes)]:
                fits += 1
            if fits > best:
                best, units = fits, set()
            if fits == best:
                units.add(i.unit)
    return units.pop() if len(units) == 1 else ""


def _numel(i: Instruction) -> int:
    """Elements that a rank puts in: of an all-gather its shard, else the whole message."""
    return i.bytes // DTYPES[i.dtype].itemsize // (i.group_size if i.op is Op.ALL_GATHER else 1)
