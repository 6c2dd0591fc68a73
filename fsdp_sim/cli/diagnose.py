"""``fsdp-sim diagnose``: why communication is not overlapped in a trace, and what to try."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_sim.cli.against import print_against
from fsdp_sim.cli.diagnose_page import write_memory_page, write_page
from fsdp_sim.cli.memory import memory_of, print_memory
from fsdp_sim.cli.options import Command, json_option, option, print_json, schema_option
from fsdp_sim.cli.reading import reading_bar
from fsdp_sim.cli.written import check_folder
from fsdp_sim.diagnose import (
    COLUMNS,
    RANK_COLUMNS,
    Against,
    CollectiveCost,
    Diagnosis,
    MemoryFound,
    StepObservation,
    cells,
    diagnosis_of,
    look,
    main_blames,
    path_sentence,
    rank_cells,
    ranks_sentence,
    ranks_to_show,
    shown,
    totals,
)
from fsdp_sim.diagnose import against as hold_against
from fsdp_sim.requests import Failure, read_requests, resolve
from fsdp_sim.timeline import Timeline, read_timeline, trace_files, write_chakra, write_chrome
from fsdp_sim.timeline.limits import MAX_BYTES, read_bytes
from fsdp_sim.words import human_ms, percent

MOST_REQUEST_BYTES = 100_000

EPILOG = "Exit status: 0; 2 if a file cannot be read, or has no such step or rank."


class DiagnoseResult(Diagnosis, frozen=True, kw_only=True):
    """A diagnosis, what it was held against, and the memory of a snapshot beside it."""

    against: Against | None = None
    memory: MemoryFound | None = None

    @classmethod
    def of(cls, found: Diagnosis) -> DiagnoseResult:
        return cls(**{name: getattr(found, name) for name in Diagnosis.__struct_fields__})


class MemoryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot of memory says where no trace was given."""

    memory: MemoryFound


class DiagnoseRequest(msgspec.Struct):
    """Which traces, step and rank to explain."""

    files: list[str]
    rank: int | None = None
    step: int | None = None
    bandwidth_gbps: float | None = None
    against: str | None = None
    memory: str | None = None
    predict: str | None = None


@click.command("diagnose", cls=Command, epilog=EPILOG)
@click.argument("traces", nargs=-1, type=click.Path(), metavar="[TRACES...]")
@option("--rank", type=int, help="Which rank to explain.  [default: the first there is]")
@option("--step", type=int, help="Which step.  [default: the one of median length, the first left out]")
@option("--bandwidth-gbps", type=float, help="Gbit/s that a link carries: tells small messages from a slow network.")
@option("--against", metavar="PATH", help="Another run to hold it against: traces, a timeline, a request to simulate.")
@option("--memory", metavar="FILE", help="What torch.cuda.memory._dump_snapshot wrote on the same rank.")
@option(
    "--predict",
    metavar="WHAT",
    help="With --memory: a request to simulate (a file, or key=value pairs), and where its memory differs.",
)
@option("--top", type=click.IntRange(min=0), default=8, show_default=True, help="How many collectives to list.")
@option(
    "--max-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=MAX_BYTES / 1e9,
    show_default=True,
    help="How much is read of a trace, unpacked, in GB; memory may take twice that.",
)
@json_option
@option(
    "--html", metavar="FILE", help="Write what is found, with its pictures, as a page that opens without a network."
)
@option("--chrome", metavar="FILE", help="Write the timeline for https://ui.perfetto.dev (.gz compresses).")
@option("--chakra", metavar="PREFIX", help="Write the timeline as Chakra execution traces, PREFIX.RANK.et.")
@schema_option("diagnose")
def command(
    traces: tuple[str, ...],
    rank: int | None,
    step: int | None,
    bandwidth_gbps: float | None,
    against: str | None,
    memory: str | None,
    predict: str | None,
    top: int,
    max_gb: float,
    as_json: bool,
    html: str | None,
    chrome: str | None,
    chakra: str | None,
) -> None:
    """Say why all-gathers and reductions are not hidden behind compute, and what to try.

    TRACES are what torch.profiler's export_chrome_trace wrote (.json, or .json.gz), or a timeline of fsdp_sim: of one
    rank, of several, or the folder that has them. With several, clocks are aligned by collectives, waiting for a late
    rank is told from a slow network, and the straggler is named with what it costs. --memory says what stands at the
    peak of memory, with or without a trace beside it.

    \b
    Examples:
      fsdp-sim diagnose trace.json
      fsdp-sim diagnose traces/
      fsdp-sim diagnose rank0.json.gz rank1.json.gz --rank 1 --bandwidth-gbps 400
      fsdp-sim diagnose trace.json --step 3 --html why.html --chrome perfetto.json.gz
      fsdp-sim diagnose after/ --against before/
      fsdp-sim diagnose step.jsonl --json
      fsdp-sim diagnose trace.json --memory snapshot.pickle
      fsdp-sim diagnose --memory snapshot.pickle --predict "model=llama3-8b gpu=H100 gpus=8 seq_len=8192"
    """
    if predict and not memory:
        raise ValueError("--predict says what memory is predicted for, and no --memory is given to hold against it")
    for name, path in (("--html", html), ("--chrome", chrome), ("--chakra", chakra)):
        check_folder(name, path)
    if not traces:
        needs = {"--rank": rank, "--step": step, "--chrome": chrome, "--chakra": chakra, "--against": against}
        _memory_alone(memory, predict, max_gb, as_json, html, needs)
        return
    timeline = _read(traces, max_gb)
    seen = look(timeline, step=step, rank=rank, bandwidth_gbps=bandwidth_gbps)
    answer = DiagnoseResult.of(diagnosis_of(seen))
    if against:
        answer = with_other(answer, seen, _other(against, max_gb), rank, bandwidth_gbps)
    if memory:
        found_in = memory_of(memory, timeline, answer.rank, predict, max_gb)
        answer = msgspec.structs.replace(answer, memory=found_in)
    found = answer
    if html:
        write_page(html, timeline, found, found.memory)
    if chrome:
        write_chrome(timeline, chrome)
    nodes = write_chakra(timeline, chakra) if chakra else []
    if as_json:
        print_json("diagnose", found)
        return
    _print(found, top)
    if answer.against:
        print_against(answer.against, top)
    if answer.memory:
        print_memory(answer.memory, timeline.api)
    for what, path in (("page", html), ("trace", chrome), ("execution trace", ", ".join(map(str, nodes)))):
        if path:
            click.echo(f"Wrote the {what} to {path}.")


def _memory_alone(
    path: str | None,
    predict: str | None,
    max_gb: float,
    as_json: bool,
    html: str | None,
    of_traces: dict[str, str | int | None],
) -> None:
    """A snapshot without a trace."""
    if path is None:
        raise ValueError("Missing argument 'TRACES...': give a trace, or a snapshot of memory with --memory")
    for name, value in of_traces.items():
        if value is not None:
            raise ValueError(f"{name} {value} takes a trace, and there is none beside --memory {path}")
    found = memory_of(path, None, 0, predict, max_gb)
    if html:
        write_memory_page(html, found)
    if as_json:
        print_json("diagnose", MemoryResult(memory=found))
        return
    print_memory(found, "")
    if html:
        click.echo(f"Wrote the page to {html}.")


def _read(traces: Sequence[str], max_gb: float) -> Timeline:
    try:
        with reading_bar() as progress:
            return read_timeline(trace_files(traces), progress=progress, max_bytes=int(max_gb * 1e9))
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None


def with_other(
    answer: DiagnoseResult, seen: StepObservation, other: Timeline, rank: int | None, bandwidth_gbps: float | None
) -> DiagnoseResult:
    """The answer with another run beside it, on the same rank if that has it."""
    same = rank if rank is None or rank in other.ranks else None
    theirs = look(other, rank=same, bandwidth_gbps=bandwidth_gbps)
    return msgspec.structs.replace(answer, against=hold_against((seen, answer), (theirs, diagnosis_of(theirs))))


def _other(path: str, max_gb: float) -> Timeline:
    """The timeline of another run: read, or simulated where the file is a request to the simulator."""
    if Path(path).is_file() and Path(path).stat().st_size < MOST_REQUEST_BYTES and path.endswith(".json"):
        data = read_bytes(path)
        if b"traceEvents" not in data and b'"model"' in data and data.lstrip()[:1] == b"{":
            (request,) = read_requests(data, path)
            if isinstance(request, Failure):
                raise ValueError(f"--against {request.error}")
            return resolve(request).simulate().timeline
    return _read([path], max_gb)


def _print(found: Diagnosis, top: int) -> None:
    found = shown(found)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(Text(found.headline, style="bold"), "")
    console.print(_totals(found), "")
    if found.rank_times:
        _print_ranks(console, found)
    for blame in main_blames(found):
        console.print(Text.assemble((f"{blame.culprit}", "bold"), f"  {human_ms(blame.idle_s)}"))
        console.print(Text(f"  {blame.sentence}"), soft_wrap=True)
        for number, tip in enumerate(blame.advice):
            console.print(Text(f"  {'Try:' if number == 0 else '    '} {tip}"), soft_wrap=True)
        console.print()
    if top and found.collectives:
        console.print(_collectives(found.collectives, top), "")
    for note in found.notes:
        console.print(Text(f"Note: {note}"), soft_wrap=True)


def _print_ranks(console: Console, found: Diagnosis) -> None:
    console.print(Text("Ranks", "bold"))
    console.print(Text(f"  {ranks_sentence(found)}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for name in RANK_COLUMNS:
        table.add_column(name, justify="right")
    for row in ranks_to_show(found):
        table.add_row(*map(Text, rank_cells(row)))
    console.print(table)
    if found.critical_path:
        console.print(Text(f"  {path_sentence(found)}"), soft_wrap=True)
    console.print()


def _totals(found: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, seconds in totals(found):
        table.add_row(name, Text(human_ms(seconds), style="bold"), percent(seconds, found.step_s))
    table.add_row("overlap: of communicating, computing too", Text(f"{found.overlap:.0%}", style="bold"), "")
    return table


def _collectives(rows: Sequence[CollectiveCost], top: int) -> Table:
    hidden = len(rows) - top
    caption = f"and {hidden} more; --top {len(rows)} lists all" if hidden > 0 else None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), caption=caption, caption_justify="left")
    for name in COLUMNS:
        words = name in ("operation", "phase", "why")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows[:top]:
        table.add_row(*map(Text, cells(row)))
    return table
