"""Who waits in which collective, and who never came: torch's flight recorder, written to files and read.

torch keeps the last collectives of each rank in a ring buffer, its flight recorder, for gloo as for NCCL. One rank's
dump says little. Those of all ranks, laid side by side, say where a job that hangs has stopped: within a process group
collectives are numbered, and who has not got as far as the others is the one that they wait for.

    python -m labs.flight_recorder FOLDER            what the dumps in it say
    TORCH_FR_DUMP_TEMP_FILE=/shared/fr_ torchrun ...     where NCCL's watchdog writes them when a collective times out

Exit status: 0 nobody waits; 1 somebody does; 2 the dumps cannot be read.

Dumps come as JSON (`torch._C._distributed_c10d._dump_fr_trace_json`, which `recorded` writes) and, from NCCL's
watchdog, as pickles. A pickle can name any function to be called. Those of the recorder name none, so one that does is
refused, and nothing in it is called.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp; torch's own reader, for pickles of trusted origin: torchfrtrace.
"""

from __future__ import annotations

import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from fsdp_sim.ranks.watchdog import listed
from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import Op
from labs.wrapping.precision import DTYPES

KINDS = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
}
"""By what torch's name of an operation begins with; others keep their name."""


class Entry(msgspec.Struct, frozen=True):
    """One collective that a rank has issued; of torch's fields those that are used here.

    Attributes:
        process_group: its name, and what it is for.
        collective_seq_id: its number in its group, from 1.
        profiling_name: backend and operation, as in ``gloo:all_gather``. gloo's name for a reduce-scatter is
            ``gloo:all_reduce``, because that is how it does one.
        input_sizes: shapes of this rank's inputs.
        retired: it has ended.
    """

    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    retired: bool = True
    is_p2p: bool = False

    @property
    def kind(self) -> str:
        name = self.profiling_name.partition(":")[2].strip("_")
        return next((kind for start, kind in KINDS.items() if name.startswith(start)), name)

    @property
    def numel(self) -> int:
        """Elements of the first input."""
        n = 1
        for size in self.input_sizes[0] if self.input_sizes else (0,):
            n *= size
        return n

    @property
    def signature(self) -> tuple[str, int]:
        """What has to be the same on all ranks."""
        return (self.kind, self.numel)


class Group(msgspec.Struct, frozen=True):
    """A process group, as a dump tells of it. gloo's leave ``ranks`` empty."""

    ranks: str = "[]"


class Dump(msgspec.Struct, frozen=True):
    """What one rank's recorder held."""

    entries: tuple[Entry, ...] = ()
    pg_config: dict[str, Group] = {}


@dataclass(frozen=True)
class Finding:
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


# ---- What the dumps say ---------------------------------------------------------------------------------------------


def diagnose(dumps: Mapping[int, Dump], step: Sequence[Instruction] = ()) -> list[Finding]:
    """Where ranks have stopped: first what is the cause, then what follows from it.

    A rank that waits in one group is missing in another. So the cause is a group whose missing ranks wait nowhere.

    Args:
        dumps: of all ranks. Who has none cannot be told from who is missing.
        step: the collectives of a training step in order, such as those of `labs.simulated.simulated`, to name units.

    Returns:
        Nothing if in every group all ranks have issued the same.
    """
    findings = [finding for name in _groups(dumps) if (finding := _look(name, dumps, step))]
    waiting = {rank for finding in findings for rank in finding.waiting}
    return sorted(findings, key=lambda finding: (not finding.mismatch, len(waiting.intersection(finding.missing))))


def _groups(dumps: Mapping[int, Dump]) -> list[str]:
    return list(dict.fromkeys(entry.process_group[0] for dump in dumps.values() for entry in dump.entries))


def _look(name: str, dumps: Mapping[int, Dump], step: Sequence[Instruction]) -> Finding | None:
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
        return Finding(most.process_group[1], seq, kind.rstrip(","), unit, waiting, missing, mismatch)
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


# ---- Files ----------------------------------------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    """Reads numbers, strings, lists, tuples and dicts, and nothing that would have to be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name} to be called, as no flight recorder does; do not open it")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to something outside of itself, as no flight recorder does; do not open it")


def read(folder: Path) -> dict[int, Dump]:
    """The dumps in a folder, by rank: files whose names end with the rank, as in ``rank3.json`` or NCCL's ``fr_3``.

    Raises:
        ValueError: a file is none, is damaged, or is a pickle that would run code; says which. OSError.
    """
    dumps = {}
    for path in sorted(folder.iterdir()):
        found = re.search(r"(\d+)(\.json)?$", path.name)
        if not found or not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                is_json = file.peek(1).lstrip()[:1] == b"{"
                content = msgspec.json.decode(file.read()) if is_json else _Plain(file).load()
            dumps[int(found[1])] = msgspec.convert(content, Dump, strict=False)
        except (ValueError, pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is no flight recorder's dump: {error}") from error
    if not dumps:
        raise ValueError(f"{folder} has no file whose name ends with a rank, such as rank0.json or fr_0")
    return dumps


def write(path: Path) -> None:
    """Write this rank's dump, as JSON.

    Raises:
        RuntimeError: this torch cannot.
    """
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        raise RuntimeError("this torch has no _dump_fr_trace_json; use torch 2.13, or NCCL's own dumps")
    part = path.with_suffix(".part")
    part.write_bytes(dump())
    part.replace(path)


@contextmanager
def recorded(folder: Path, rank: int, *, idle_s: float) -> Iterator[None]:
    """Inside, this rank writes ``folder/rankN.json`` as soon as it has not issued a collective for ``idle_s``.

    NCCL's watchdog does so when a collective times out; gloo has none. All ranks write, also those that wait for no
    collective: they are the ones that are looked for.

    Raises:
        RuntimeError: as `write`.
    """
    over = threading.Event()
    path, look = folder / f"rank{rank}.json", folder / f"rank{rank}.look"
    write(look)  # where this cannot be had, it is said now

    def watch() -> None:
        while not over.wait(idle_s / 4):
            if _newest_s(look) + idle_s < time.time():
                look.replace(path)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        look.unlink(missing_ok=True)


class _Time(msgspec.Struct, frozen=True):
    time_created_ns: int


class _Times(msgspec.Struct, frozen=True):
    entries: tuple[_Time, ...] = ()


def _newest_s(path: Path) -> float:
    """Write a dump; returns when its newest collective was issued, seconds since 1970."""
    write(path)
    times = msgspec.json.decode(path.read_bytes(), type=_Times, strict=False).entries
    return max((time.time_created_ns for time in times), default=0) * 1e-9


# ---- The command ----------------------------------------------------------------------------------------------------


def main(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Say what the flight recorder's dumps in a folder say.

    Args:
        folder: with a file for each rank, whose name ends with the rank.
    """
    try:
        dumps = read(folder)
    except (OSError, ValueError) as error:
        print(f"labs.flight_recorder: {error}", file=sys.stderr)
        return 2
    findings = diagnose(dumps)
    for finding in findings:
        print(f"group {finding.group}: {finding}")
    if not findings:
        print(f"{len(dumps)} ranks, and in every group all have issued the same collectives")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
