"""`Evidence`: a training and what it left behind when it was really run."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fsdp_sim.learn.apart import StoppedError, Trial, TrialRun, carry_out
from fsdp_sim.learn.hunts.on_rank import counted, dumped, with_compute
from fsdp_sim.learn.hunts.training import Leaves, Training
from fsdp_sim.learn.inside import WAIT
from fsdp_sim.timeline import Timeline

if TYPE_CHECKING:
    from fsdp_sim.viz import Picture

Function = Callable[[int], Any]
LAST = 5  # collectives of a dump that are shown


@dataclass(frozen=True)
class Left:
    """What one run leaves: lines of text, figures, files."""

    lines: Sequence[str]
    pictures: tuple[Picture, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Evidence:
    """A training and what it left behind: logs, and by the hunt dumps, memory, a timeline or losses.

    Attributes:
        shows: its pictures stand below its lines, for they say more; others, which say the same, are drawn by `draw`.
    """

    title: str
    source: str
    left: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    shows: bool = True

    def save(self, folder: str | Path) -> Path:
        """Write the files, such as flight recorders' dumps, into a folder, which is made if need be."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (path / name).write_bytes(content)
        return path

    def draw(self) -> None:
        """Show the pictures of what it left behind, if there are some."""
        for picture in self.pictures:
            picture.show()

    def __str__(self) -> str:
        figures = [picture.finding for picture in self.pictures if self.shows]
        return "\n".join([self.title, "", self.source, "", "What it left behind:", *self.left, *figures])

    __repr__ = __str__

    def _ipython_display_(self) -> None:
        from IPython.display import display

        left = escape("\n".join(self.left))
        html = (
            f"<h4>{escape(self.title)}</h4><pre>{escape(self.source)}</pre><b>What it left behind</b>"
            f'<pre style="white-space:pre-wrap;word-break:normal">{left}</pre>'  # JupyterLab would break within words
        )
        display({"text/html": html, "text/plain": str(self)}, raw=True)
        if self.shows:
            self.draw()


def trial_of(of: Training, seed: int, **how: Any) -> Trial:
    """A call of the training on each of its ranks, metered where memory is judged."""
    within = partial(partial, with_compute) if of.leaves is Leaves.TIMELINE else None
    plain = {"network": of.network, "metered": of.leaves in (Leaves.LOGS, Leaves.MEMORY), "within": within}
    return Trial((((seed,),),) * how.pop("ranks", of.ranks), **plain | how)


def left_by(of: Training, function: Function, seed: int) -> Left:
    """What a run of the training with a fault leaves behind, and beside it what was to be expected."""
    if of.leaves is Leaves.DUMPS:
        return of_dumps(of, function, seed)
    if of.leaves is Leaves.MEMORY:
        return of_memory(of, function, seed)
    counts, alone = of.leaves is Leaves.LOGS, of.leaves is Leaves.BESIDE_ONE
    right = carry_out(trial_of(of, seed, ranks=1 if alone else of.ranks), of.sound)
    planned = logs("one process" if alone else "planned", right, counts)
    try:
        ran = carry_out(trial_of(of, seed), function)
    except StoppedError as stopped:
        return Left([str(stopped), *planned])
    return Left([*logs("found", ran, counts), *planned], pictures_of(of, ran, right))


def pictures_of(of: Training, ran: TrialRun, right: TrialRun) -> tuple[Picture, ...]:
    from fsdp_sim.learn.pictures.numerics import losses
    from fsdp_sim.viz import timeline

    found, other = ran.answers[0][0], right.answers[0][0]
    if of.leaves is Leaves.TIMELINE:
        done = [event for event in ran.timeline.events if event.unit != WAIT]
        drawn = timeline({"found": Timeline(ran.timeline.header, done)}, ranks=[0], step=1)
        return (drawn.titled("What rank 0 did in the second step"),)
    if of.leaves is Leaves.LOSSES:
        logs = {name: (1, values) for name, values in found.items()}
        return (losses(logs, "The loss of each step, as rank 0 has logged it", unit=""),)
    if of.leaves is Leaves.BESIDE_ONE:
        return tuple(
            losses(
                {"one process": (1, other[name]), f"{of.ranks} ranks": (1, found[name])},
                f"The {name}, step by step",
                quantity=name,
                unit="",
            )
            for name in logged(found)
        )
    return ()


def of_memory(of: Training, function: Function, seed: int) -> Left:
    """The bytes alive, of the training and of the sound one."""
    from fsdp_sim.learn.pictures.bug_hunt import memory_curves

    trial = trial_of(of, seed, metered=False)
    right = carry_out(trial, partial(counted, of.sound))
    try:
        ran = carry_out(trial, partial(counted, function))
    except StoppedError as stopped:
        return Left([str(stopped)])
    lines = []
    for what, of_run in (("found", ran), ("planned", right)):
        for rank, (answer,) in enumerate(of_run.answers):
            alive = answer["alive_bytes"]
            after = ", ".join(f"{int(alive[place]):,}" for place in answer["steps"])
            lines.append(
                f"{what}: rank {rank}: {log(answer['answer'])}; bytes alive after each step {after}; "
                f"peak {int(alive.max()):,} bytes"
            )
    named = {f"rank {rank}": answer for rank, (answer,) in enumerate(ran.answers)} | {"planned": right.answers[0][0]}
    return Left(lines, (memory_curves(named),))


class Entry(msgspec.Struct, frozen=True):
    """Of a collective in a dump what is shown of it; `labs.cluster.flight_recorder` reads more."""

    collective_seq_id: int
    profiling_name: str
    input_sizes: list[list[int]] = []
    retired: bool = True

    @property
    def what(self) -> tuple[str, str]:
        """The operation, and the elements of its first input."""
        op = self.profiling_name.partition(":")[2].strip("_")
        numel = math.prod(self.input_sizes[0]) if self.input_sizes else 0
        return op, f"{numel:,} element{'s' * (numel > 1)}" * bool(numel)


class Dump(msgspec.Struct, frozen=True):
    entries: list[Entry]


def of_dumps(of: Training, function: Function, seed: int) -> Left:
    """The dumps of the ranks' flight recorders, and the last collectives in each."""
    from fsdp_sim.learn.pictures.bug_hunt import Box, BoxStyle, boxes
    from fsdp_sim.ranks import RanksError, run

    with tempfile.TemporaryDirectory(prefix="fsdp_sim-") as folder:
        try:
            run(dumped, of.ranks, function, folder, seed, record=False, progress=False, show_output=False)
        except RanksError as error:
            why = str(error)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).glob("rank*.json"))}
    if len(files) < of.ranks:
        return Left([why])
    of_rank = [msgspec.json.decode(content, type=Dump, strict=False).entries for content in files.values()]
    end = max(entry.collective_seq_id for entries in of_rank for entry in entries)
    numbers = range(max(1, end - LAST + 1), end + 1)
    lines, rows = [], {}
    for rank, entries in enumerate(of_rank):
        last = {entry.collective_seq_id: entry for entry in entries}
        waits = [number for number, entry in sorted(last.items()) if not entry.retired]
        at = (waits or [max(last)])[0]
        op, elements = last[at].what
        doing = "waits in" if waits else "waits in none; its last was"
        lines.append(f"rank {rank}: {doing} #{at} {op}" + f" of {elements}" * bool(elements))
        rows[f"rank {rank}"] = [
            Box("<br>".join(last[n].what), BoxStyle.DONE if last[n].retired else BoxStyle.WAITS)
            if n in last
            else Box("", BoxStyle.NOTHING)
            for n in numbers
        ]
    picture = boxes(rows, "The last collectives of each rank, by its flight recorder", [f"#{n}" for n in numbers])
    return Left([*lines, f"files: {', '.join(files)}"], (picture,), files)


def logs(what: str, ran: TrialRun, counts: bool) -> list[str]:
    """By rank, what a run logged; if asked for, how many of each collective it issued; and its peak where it was
    metered."""
    lines = []
    for rank, (answer,) in enumerate(ran.answers):
        issued = ", ".join(f"{n} {op}" for op, n in sorted(collectives(ran)[rank].items()))
        peak = f"peak {ran.peak_bytes[rank]:,} bytes" * bool(ran.peak_bytes[rank])
        lines.append("; ".join(filter(None, [f"{what}: rank {rank}: {log(answer)}", issued * counts, peak])))
    return lines


def log(answer: Mapping[str, Any]) -> str:
    """The numbers that a training returned; of its weights nothing."""
    return "; ".join(f"{name} {', '.join(f'{float(x):.4f}' for x in answer[name])}" for name in logged(answer))


def logged(answer: Mapping[str, Any]) -> list[str]:
    """What of it is a log."""
    return [name for name in answer if name not in ("weights", "saved")]


def collectives(ran: TrialRun) -> list[Counter[str]]:
    """By rank, how many of each."""
    return [Counter(record.op for record in of_rank) for of_rank in ran.records]
