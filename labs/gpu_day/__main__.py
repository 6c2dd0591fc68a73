"""The command of a GPU day."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from fsdp_sim.accelerators import gpus
from fsdp_sim.words import human_bytes
from labs.experiments.result import this_machine
from labs.gpu_day import bundle
from labs.gpu_day.day import LOG, GpuDay, PartState, folder_of, spent
from labs.gpu_day.parts import parts
from labs.loop.report import versions

USAGE = """An hour on somebody's GPU: checks, calibration, accuracy, ten labs, a training; one file of what was found.

    python -m labs.gpu_day                    an hour, on all GPUs of this machine
    python -m labs.gpu_day --minutes 20       the same again goes on where it ended
    python -m labs.gpu_day --device cpu       the rehearsal: smaller models, on CPU cores
    python -m labs.gpu_day --list             what would be done
    python -m labs.gpu_day --add FILE.zip     somebody's bundle into this checkout

Nothing leaves this machine. At the end the files for the bundle are listed, and it is written when you say so. Exit
status: 0 all done, 1 a part failed or time ran out, 2 asked wrongly, 130 Ctrl-C.
"""
MARKS = {"done": "[green]done[/]", "failed": "[red]failed[/]", "out of time": "[yellow]out of time[/]"}


@dataclass(frozen=True)
class GpuDayOptions:
    """What to do."""

    minutes: float = 60.0
    """For all parts together."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch finds a GPU, else cpu, which is a rehearsal."""
    out: Path = Path("build/gpu-day")
    """The day's folder."""
    only: tuple[str, ...] = ()
    """Names of parts, as --list has them; they are done again."""
    listed: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Say what would be done, and do nothing."""
    yes: bool = False
    """Write the bundle without asking."""
    add: Path | None = None
    """A bundle to put into this checkout."""


def hardware_of(device: str) -> tuple[str, str]:
    """The device in a word, and the hardware in words.

    Raises:
        ValueError: a GPU is asked for, and there is none.
    """
    if device != "cpu":
        try:
            found = gpus()
            return "cuda", f"{len(found)} x {found[0]}"
        except ValueError:
            if device == "cuda":
                raise
    return "cpu", this_machine("cpu").partition(" on ")[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = tyro.cli(GpuDayOptions, prog="python -m labs.gpu_day", description=USAGE, args=arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        if options.add:
            for line in bundle.add(options.add):
                console.print(f"added {line}", soft_wrap=True)
            return 0
        return _spend(options, console)
    except ValueError as error:
        console.print(f"labs.gpu_day: {error}", soft_wrap=True, markup=False)
        return 2
    except KeyboardInterrupt:
        console.print(f"\nStopped. The same command goes on: what is done is in {options.out}.", soft_wrap=True)
        return 130


def _spend(options: GpuDayOptions, console: Console) -> int:
    known = parts()
    if wrong := [name for name in options.only if name not in known]:
        raise ValueError(f"there is no part {wrong[0]!r}; there are {', '.join(known)}")
    device, hardware = hardware_of(options.device)
    today = datetime.now(UTC).date().isoformat()
    day = GpuDay.of(options.out, device=device, hardware=hardware, date=today, versions=versions())
    names = list(options.only) or day.left(known)
    rehearsal = "" if device == "cuda" else ": a rehearsal on CPU cores, with smaller models"
    console.print(f"[bold]GPU day[/]{rehearsal}. {hardware}, {options.minutes:g} minutes at most, in {options.out}")
    if options.listed:
        console.print(_listed(day, names))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    _with_progress(options, day, names, console)
    undone = day.left(known)
    if undone:
        why = [f"  {name}: {day.parts[name].status}, {day.parts[name].said}" for name in undone if name in day.parts]
        console.print(f"Not done: {', '.join(undone)}. The same command tries again.", *why, sep="\n", markup=False)
    _bundle(options, day, console)
    return int(bool(undone))


def _listed(day: GpuDay, names: list[str]) -> Table:
    table = Table("part", "what", "at most", "", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, part in parts().items():
        state = day.parts[name].status if name in day.parts else ""
        note = "" if part.on_cpu or day.device == "cuda" else "needs a GPU"
        table.add_row(name, part.does, f"{part.most_s / 60:.0f} min", note or ("" if name in names else state))
    return table


def _with_progress(options: GpuDayOptions, day: GpuDay, names: list[str], console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(10),  # the line has room in 80 columns
        TextColumn("{task.completed:.0f} of {task.total:.0f} parts"),
        _Budget(options.minutes),
    )
    known = parts()
    total = len(names if options.only else known)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=total - len(names))
        for name, state in spent(day, known, names, options.out, 60 * options.minutes):
            if state is None:
                progress.update(task, description=f"{name}, at most {known[name].most_s / 60:.0f} min")
            else:
                progress.advance(task)
                progress.console.print(_line(name, state), soft_wrap=True)
                if state.said:
                    log = options.out / folder_of(name) / LOG
                    progress.console.print(f"    {state.said} ({log})", soft_wrap=True, markup=False)


class _Budget(ProgressColumn):
    """How much is left of the day's minutes."""

    def __init__(self, minutes: float) -> None:
        super().__init__()
        self._minutes = minutes

    def render(self, task: Task) -> Text:
        left = max(0.0, self._minutes - (task.elapsed or 0.0) / 60)
        return Text(f"{left:.0f} of {self._minutes:g} min left")


def _line(name: str, state: PartState) -> str:
    mark = f"{MARKS.get(state.status, state.status)}{' ' * (13 - len(state.status))}"  # its colour takes no room
    return f"  {name:<20} {mark}{state.seconds:>6.0f} s" if state.seconds else f"  {name:<20} {mark.rstrip()}"


def _bundle(options: GpuDayOptions, day: GpuDay, console: Console) -> None:
    bundled = list(bundle.files(options.out))
    path = options.out.parent / bundle.name_of(day)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(
        "file", no_wrap=True, min_width=max((len(one.name) for one in bundled), default=0)
    )  # who agrees reads it whole
    for heading in ("what it is", "bytes", "private names replaced"):
        table.add_column(heading)
    for one in bundled:
        table.add_row(one.name, one.what, f"{len(one.data):,}", str(one.replaced or ""))
    console.print(f"\nFor the bundle {path}:", table, sep="\n")
    asks = f"Write it ({human_bytes(sum(len(one.data) for one in bundled))} before packing)? [y/N] "
    if options.yes or (sys.stdin.isatty() and console.input(asks, markup=False).strip().lower() in ("y", "yes")):
        bundle.write(bundled, path)
        console.print(
            f"Wrote {path}. Give it to the project, or add it to a checkout: python -m labs.gpu_day --add {path}",
            soft_wrap=True,
        )
    else:
        console.print("Not written: --yes writes it.")


if __name__ == "__main__":
    sys.exit(main())
