"""What a lab found: numbers as predicted and as measured, timelines, and on what hardware.

A learner without a GPU sees what somebody else's GPU did, and has to know it: `LabResult.kind` says whether the numbers
were measured just now, read from a recording, or come from a pretended cluster; every way to show a result says so.
"""

from __future__ import annotations

import gzip
import html
import io
import os
import platform
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import torch
from rich.console import Console
from rich.table import Table

from fsdp_sim.timeline import Event, Header, Timeline, written
from labs.loop.report import versions

Kind = Literal["measured", "recorded", "pretended"]
MOST_BYTES = 2**20
"""Of a recorded result, compressed."""

ORIGIN = {
    "measured": "measured here",
    "recorded": "recorded elsewhere, not measured here",
    "pretended": "measured on one device of a pretended cluster: the wire is modelled, and the loss means nothing",
}


class ResultRow(msgspec.Struct, frozen=True):
    """One quantity of one setting.

    Attributes:
        name: the setting, as in ``reshard_after_forward=False``.
        quantity: as in ``step time`` or ``peak memory``.
        predicted, measured: in the unit; None where there is none.
        unit: as in ``ms``, ``MiB``.
    """

    name: str
    quantity: str
    predicted: float | None
    measured: float | None
    unit: str

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None where one of them is missing or nothing was measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def cells(self) -> tuple[str, ...]:
        error = "" if self.error is None else f"{self.error:+z.0%}"
        numbers = ("" if value is None else f"{value:,.4g} {self.unit}" for value in (self.predicted, self.measured))
        return (self.name, self.quantity, *numbers, error)


COLUMNS = ("setting", "quantity", "predicted", "measured", "error")


@dataclass(frozen=True)
class LabResult:
    """What a lab returns.

    Attributes:
        lab: the module's name, as in ``overlap``.
        kind: where the measured numbers come from.
        hardware: on which they were measured, in words.
        date: when, as in 2026-11-21.
        timelines: by name; of predicted ones the header's producer says so.
        notes: what a reader has to know besides.
    """

    lab: str
    kind: Kind
    rows: tuple[ResultRow, ...]
    hardware: str
    versions: dict[str, str] = field(default_factory=versions)
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    timelines: dict[str, Timeline] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def caption(self) -> str:
        """Where the numbers come from: never left out."""
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.lab}: {ORIGIN[self.kind]}; {self.hardware}, {software}, {self.date}"

    def errors(self) -> dict[tuple[str, str], float]:
        """Predicted over measured, less one, by setting and quantity, where there are both."""
        return {(row.name, row.quantity): row.error for row in self.rows if row.error is not None}

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.caption, title_justify="left")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if i < 2 else "right")
        for row in self.rows:
            table.add_row(*row.cells)
        return table

    def print(self, console: Console) -> None:
        """The table, then the notes."""
        console.print(self.table())
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=True)

    def _repr_html_(self) -> str:
        from fsdp_sim.viz import Table as HtmlTable  # where it is drawn: ranks import this module, too

        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return HtmlTable(self.caption, COLUMNS, tuple(row.cells for row in self.rows)).to_html() + notes

    def save(self, path: Path) -> None:
        """Write it to one compressed file.

        Raises:
            ValueError: it is larger than `MOST_BYTES`; record fewer steps.
        """
        timelines = {name: (timeline.header, list(timeline)) for name, timeline in self.timelines.items()}
        file = _File(
            lab=self.lab, kind=self.kind, rows=self.rows, hardware=self.hardware, versions=self.versions,
            date=self.date, notes=self.notes, timelines=timelines,
        )  # fmt: skip
        packed = gzip.compress(msgspec.json.encode(file), mtime=0)
        if len(packed) > MOST_BYTES:
            raise ValueError(f"{path.name} would have {len(packed)} bytes, more than {MOST_BYTES}; record fewer steps")
        with written(path) as new:
            new.write_bytes(packed)

    @classmethod
    def load(cls, path: Path) -> LabResult:
        """Read a file that `save` wrote; what was measured when it was written is ``recorded`` now.

        Raises:
            OSError: it cannot be read. ValueError: it is damaged.
        """
        return cls.decode(path.read_bytes(), str(path))

    @classmethod
    def decode(cls, packed: bytes, name: str) -> LabResult:
        """The same of a file's bytes.

        Raises:
            ValueError: they are damaged.
        """
        try:
            with gzip.open(io.BytesIO(packed)) as file:
                read = msgspec.json.decode(file.read(64 * MOST_BYTES), type=_File)
        except (EOFError, OSError, zlib.error, msgspec.DecodeError) as error:
            raise ValueError(f"{name} is no recorded result: {error}; record it again") from error
        timelines = {name: Timeline(header, events) for name, (header, events) in read.timelines.items()}
        kind: Kind = "recorded" if read.kind == "measured" else read.kind
        return cls(read.lab, kind, read.rows, read.hardware, read.versions, read.date, timelines, read.notes)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lab: str
    kind: Kind
    rows: tuple[ResultRow, ...]
    hardware: str
    versions: dict[str, str]
    date: str
    notes: tuple[str, ...]
    timelines: dict[str, tuple[Header, list[Event]]]


def this_machine(device: str | torch.device = "cpu", ranks: int = 1) -> str:
    """The hardware of a result, in words."""
    if torch.device(device).type == "cuda":
        gpu: Any = torch.cuda.get_device_properties(0)
        return f"{ranks} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB each"
    n_ranks = f"{ranks} rank{'s' * (ranks != 1)}"
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{n_ranks} on {os.cpu_count()} CPU cores ({platform.machine()}), {memory_gib:.0f} GiB"
