"""A snapshot of CUDA's memory for ``fsdp-sim diagnose --memory``: read, held against a prediction, printed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_sim.cli.options import with_pairs
from fsdp_sim.cli.reading import reading_bar
from fsdp_sim.diagnose import MemoryFound, beside_prediction, memory_found
from fsdp_sim.requests import NAMES, Failure, Job, category_name, read_requests, request_of_texts, resolve
from fsdp_sim.timeline import Timeline, load_snapshot, read_bytes
from fsdp_sim.words import harmless, human_bytes, percent

GROUPS = 8  # lines that are shown
NOBODY_SAID = "not told by its calls"


def memory_of(path: str, timeline: Timeline | None, rank: int, predict: str | None, max_gb: float) -> MemoryFound:
    """The snapshot in a file, laid beside a trace and a prediction where they are given.

    Raises:
        ValueError: a file is none, or what is to be predicted cannot be.
    """
    with reading_bar() as progress:
        snapshot = load_snapshot(path, progress=progress, max_bytes=int(max_gb * 1e9))
    found = memory_found(snapshot, timeline, rank)
    if predict is None:
        return found
    job = _job(predict)
    memory = job.simulate().memory
    name = f"{job.model.name} on {job.cluster.gpus} x {job.cluster.gpu.name}"
    return beside_prediction(found, memory.peak_by_category, memory.reserved_bytes, name)


def _job(predict: str) -> Job:
    """From a file with a request, or from ``key=value`` pairs, as the options of ``simulate``."""
    if Path(predict).is_file():
        request = read_requests(read_bytes(predict), predict)
        if len(request) != 1:
            raise ValueError(f"--predict {predict} has {len(request)} requests; give one")
        if isinstance(request[0], Failure):
            raise ValueError(f"--predict {request[0].error}")
        return resolve(request[0])
    try:
        pairs = shlex.split(predict)
    except ValueError as error:
        raise ValueError(f"--predict {predict!r} cannot be taken apart: {error}") from None
    if not any("=" in pair for pair in pairs):
        raise ValueError(
            f"--predict {predict!r} is no file and no key=value pairs; write for example "
            '"model=llama3-8b gpu=H100 gpus=8"'
        )
    pairs = [pair.replace("-", "_", pair.partition("=")[0].count("-")) for pair in pairs]
    return resolve(request_of_texts(with_pairs({}, pairs, "--predict", "a request", NAMES)))


def print_memory(found: MemoryFound, api: str) -> None:
    """The sentences, what stands at the peak, and the prediction beside it."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(Text("Memory", "bold"))
    for sentence in found.sentences:
        console.print(Text(f"  {harmless(sentence)}"), soft_wrap=True)
    console.print()
    for title, columns, rows in tables(found, api):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
        for name in columns:
            table.add_column(name, justify="left" if name in ("what for", "asked for at") else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table, "")
    for sentence in found.predicted.sentences if found.predicted else ():
        console.print(Text(f"  {harmless(sentence)}"), soft_wrap=True)
    if found.predicted:
        console.print()
    for note in found.notes:
        console.print(Text(f"Note: {harmless(note)}"), soft_wrap=True)


Rows = list[tuple[str, ...]]


def tables(found: MemoryFound, api: str) -> list[tuple[str, tuple[str, ...], Rows]]:
    """Title, columns and rows: what stands at the peak, where it was asked for, steps, and the prediction."""
    peak = found.peak_bytes
    kinds: Rows = [(_name(kind, api), human_bytes(n), percent(n, peak)) for kind, n in found.kinds.items()]
    groups: Rows = [
        (harmless(one.where), _name(one.kind, api), human_bytes(one.bytes), f"{one.blocks:,}")
        for one in found.groups[:GROUPS]
    ]
    shown = [
        ("At the peak", ("what for", "bytes", "of the peak"), kinds),
        ("Largest, by the line that asked", ("asked for at", "what for", "bytes", "blocks"), groups),
    ]
    if found.steps:
        steps: Rows = [
            (str(one.step), human_bytes(one.allocated_bytes), human_bytes(one.reserved_bytes)) for one in found.steps
        ]
        shown.append(("Steps of the trace", ("step", "most allocated", "reserved"), steps))
    if found.predicted:
        beside: Rows = [
            (
                one.kind, human_bytes(one.measured_bytes), human_bytes(one.predicted_bytes),
                "differs" if one.differs else "",
            )
            for one in found.predicted.kinds
        ]  # fmt: skip
        reserved = (human_bytes(found.most_reserved_bytes), human_bytes(found.predicted.predicted_reserved_bytes))
        beside.append(("reserved of the device, at most", *reserved, ""))
        shown.append(("Measured and predicted", ("what for", "measured", "predicted", ""), beside))
    return shown


def _name(kind: str, api: str) -> str:
    return category_name(kind, api or "fsdp2") if kind else NOBODY_SAID
