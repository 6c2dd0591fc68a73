"""The parts of a GPU day, one after the other, each in a process of its own, until the time is up.

What is done is written down after each part: a day that ended early, was interrupted or lost its machine goes on with
the parts that are missing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from fsdp_sim.accelerators import environ_for
from fsdp_sim.timeline import written
from labs.cluster.torchrun import run_for
from labs.gpu_day.parts import GpuDayPart

STATE = "day.json"
LOG = "log.txt"
LEAST_S = 60.0
"""With less than this left no part is begun."""
MOST_SAID = 300  # characters of why a part failed
Status = Literal["done", "failed", "out of time", "needs a GPU"]


class PartState(msgspec.Struct, frozen=True):
    """How a part ended, how long it took, and, if it failed, the last it said."""

    status: Status
    seconds: float = 0.0
    said: str = ""


class GpuDay(msgspec.Struct):
    """What has been done so far.

    Attributes:
        device: ``cuda``, or ``cpu``, which is a rehearsal.
        hardware: in words, without the machine's name.
        date: of the first part.
        parts: by name.
    """

    device: str
    hardware: str
    date: str
    versions: dict[str, str]
    parts: dict[str, PartState] = {}

    @classmethod
    def of(cls, folder: Path, *, device: str, hardware: str, date: str, versions: dict[str, str]) -> GpuDay:
        """The day in a folder; a new one if there is none.

        Raises:
            ValueError: the folder has a day of other hardware or versions, or what cannot be read.
        """
        new, path = cls(device, hardware, date, versions), folder / STATE
        if not path.exists():
            return new
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path} cannot be read ({error}); remove the folder, or take another with --out"
            ) from None
        for name in ("device", "hardware", "versions"):
            if getattr(found, name) != getattr(new, name):
                raise ValueError(
                    f"{folder} has a day whose {name} was {getattr(found, name)}, and here it is {getattr(new, name)}; "
                    "take another folder with --out"
                )
        return found

    def to(self, folder: Path) -> None:
        with written(folder / STATE) as new:
            new.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def left(self, parts: Iterable[str]) -> list[str]:
        """Those that are still to be done: also what failed or ran out of time, after what was never begun."""
        begun = [name for name in parts if name in self.parts]
        again = [name for name in begun if self.parts[name].status in ("failed", "out of time")]
        return [name for name in parts if name not in self.parts] + again


def spent(
    day: GpuDay, parts: dict[str, GpuDayPart], names: Iterable[str], folder: Path, budget_s: float
) -> Iterator[tuple[str, PartState | None]]:
    """Run parts; gives the name of each before it begins, with None, and after it how it ended, which is written down.

    Args:
        budget_s: no part goes on after so many seconds, and none is begun with less than `LEAST_S` left.
    """
    end_s = time.monotonic() + budget_s
    for name in names:
        part = parts[name]
        if day.device == "cpu" and not part.on_cpu:
            state = PartState("needs a GPU")
        else:
            room_s = end_s - time.monotonic()
            if room_s < LEAST_S:
                return
            yield name, None
            state = _run(name, folder / folder_of(name), day.device, min(part.most_s, room_s))
        day.parts[name] = state
        day.to(folder)
        yield name, state


def folder_of(name: str) -> str:
    """A part's own folder, in the day's."""
    return name.replace(" ", "_")


def _run(name: str, folder: Path, device: str, most_s: float) -> PartState:
    folder.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "labs.gpu_day.parts", name, str(folder), device]
    with (folder / LOG).open("w") as log:
        status = run_for(command, most_s, env=environ_for(device), stdout=log, stderr=subprocess.STDOUT)
    seconds = round(time.monotonic() - begun_s, 1)
    if status is None:
        return PartState("out of time", seconds, f"ended after {most_s:.0f} s")
    if status:
        lines = (folder / LOG).read_text(errors="replace").strip().splitlines()
        return PartState("failed", seconds, (lines[-1] if lines else f"status {status}")[:MOST_SAID])
    return PartState("done", seconds)
