"""``fsdp-sim sweep``: every combination of lists of values, streamed to a CSV file, with its Pareto front."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from fsdp_sim.cli.options import (
    INTERRUPTED,
    NO,
    Command,
    KeyValue,
    json_option,
    option,
    print_json,
    request_options,
    schema_option,
    several,
    values_of,
    working,
)
from fsdp_sim.cli.written import check_folder
from fsdp_sim.explore import HERE, RUNS, Processes, Sweep, notes_of, played_front, read_rows, write_rows
from fsdp_sim.explore.sweep import RESULTS, SweepRow
from fsdp_sim.requests import NAMES

EPILOG = (
    "Rows stand in the order of the combinations, the last --vary fastest; impossible ones have their reason in the "
    'column error. Of more than 500 combinations those that are near the limit and not on the front only "may fit": '
    "torch's allocator is not played for them. Exit status: 0; 1 if no combination runs; 2 for what was asked wrongly; "
    "130 after Ctrl-C, which keeps what is done."
)


class SweepRequest(msgspec.Struct):
    """The values of a sweep: texts by field, as the options and --vary give them."""

    vary: dict[str, list[str]]
    fixed: dict[str, str] = {}


class SweepResult(msgspec.Struct):
    """A sweep as JSON.

    Attributes:
        columns: of the rows, what was asked before what was found.
        rows: by column; numbers are numbers, what was asked is text, what is not there is null.
        pareto: places of the rows that fit or are on the edge, and that no other such plan for the same model beats
            both in time per token and in memory.
        notes: what `simulate` would say beside the numbers of plans on the front and of one with each value: what was
            chosen, what is unverified, which settings change nothing.
    """

    columns: list[str]
    rows: list[dict[str, str | float | None]]
    pareto: list[int]
    notes: list[str]


@click.command(cls=Command, epilog=EPILOG)
@option(
    "--vary", multiple=True, metavar="KEY=A,B,...", section="Combinations", type=KeyValue(lambda: NAMES),
    help="A field of the model, the cluster or the plan (or model, gpu, gpus) and its values; give it several times. "
    "Values with commas in them stand between semicolons.",
)  # fmt: skip
@request_options()
@option("--out", metavar="FILE", help="CSV file, written row by row.")
@option("--resume", is_flag=True, help="Go on with --out where an earlier run of the same sweep ended.")
@option("--processes", type=click.IntRange(min=1), help="How many simulate at a time.  [default: 2, or the cores]")
@option("--figure", metavar="FILE", help="Pareto picture, .html or .png.")
@json_option
@schema_option("sweep")
def sweep(
    texts: dict[str, str], vary: Sequence[str], out: str | None, resume: bool, processes: int | None,
    figure: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Simulate every combination of some values, and show which are worth choosing from.

    \b
    Examples:
      fsdp-sim sweep --model llama3-8b --gpu H100 --gpus 64 --seq-len 8192 \\
          --vary micro_batch=1,2,4 --vary activation_checkpointing=none,selective,full
      fsdp-sim sweep --model gpt2-1.5b --seq-len 1024 --vary gpu=A100,H100 --vary gpus=8,16,32 --out sweep.csv
    """
    made = Sweep(texts, lists(vary), processes or min(2, os.cpu_count() or 1))
    for name, path in (("--out", out), ("--figure", figure)):
        check_folder(name, path)
    if figure:
        from fsdp_sim.cli.figures import check_suffix

        check_suffix(figure)
    if resume:
        if not out:
            raise ValueError("--resume goes on with a file; name it with --out")
        made.resume(out)
    elif out and Path(out).exists() and read_rows(out)[1]:
        raise ValueError(f"--out {out} has rows already; go on with --resume, or take another file")
    with made.start() as beside:
        rows, interrupted = _run(made, out, beside)
        before = [row["fit"] for row in rows]
        with working("playing torch's allocator for the plans worth choosing"):
            front = played_front(rows, HERE if interrupted else beside)
        with working("looking for settings that change nothing"):
            notes = [] if interrupted else notes_of(rows, front, made.vary, beside)
    if out and [row["fit"] for row in rows] != before:
        write_rows(out, made.columns, rows)
    _show(made, rows, front, notes, as_json, figure)
    if interrupted:
        kept = f"; go on with --out {out} --resume" if out else ""
        click.echo(f"Interrupted after {len(rows)} of {len(made)} combinations{kept}", err=True)
        sys.exit(INTERRUPTED)
    if not any(row["fit"] in RUNS for row in rows):
        sys.exit(NO)


def lists(vary: Sequence[str]) -> dict[str, list[str]]:
    """Read ``key=a,b`` into lists by key; ``key=a,b;c`` where values contain commas.

    Raises:
        ValueError: no pair, a key without values or given twice, or a value that is there twice.
    """
    if not vary:
        raise ValueError("nothing varies; give --vary, for example --vary micro_batch=1,2,4")
    found: dict[str, list[str]] = {}
    for pair in vary:
        key, equals, values = (part.strip() for part in pair.partition("="))
        if not equals or not key or not values:
            raise ValueError(f"--vary {pair!r} is no list; write key=a,b, for example micro_batch=1,2,4")
        if key in found:
            raise ValueError(f"--vary {pair!r}: {key} is given twice; give all its values at once")
        found[key] = several(values)
        if len(set(found[key])) < len(found[key]) or "" in found[key]:
            known = ", ".join(values_of(key)[:8])
            raise ValueError(
                f"--vary {pair!r} has a value twice, or an empty one; give each once"
                f"{known and f' ({key} knows, for example, {known})'}"
            )
    return found


def _run(made: Sweep, out: str | None, processes: Processes) -> tuple[list[SweepRow], bool]:
    """Run the sweep: its rows, earlier ones included, and whether Ctrl-C ended it."""
    rows = list(made.done)
    source = made.to_csv(out, processes) if out else made.rows(processes)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            plans = bar.add_task("simulating", total=len(made), completed=len(rows))
            for row in source:
                rows.append(row)
                bar.advance(plans)
    except KeyboardInterrupt:
        return rows, True
    finally:
        source.close()
    return rows, False


def _show(
    made: Sweep, rows: list[SweepRow], front: list[int], notes: list[str], as_json: bool, figure: str | None
) -> None:
    if figure:
        from fsdp_sim.cli.figures import write_pareto

        write_pareto(figure, rows, list(made.vary))
    if as_json:
        result = SweepResult(made.columns, [_typed(row) for row in rows], front, notes)
        print_json("sweep", result)
        return
    from fsdp_sim.cli.report import print_front

    print_front(rows, front, list(made.vary), notes)
    if figure:
        click.echo(f"Wrote the picture to {figure}.")


def _typed(row: SweepRow) -> dict[str, str | float | None]:
    typed: dict[str, str | float | None] = dict(row)
    for name in RESULTS:
        if row[name] == "":
            typed[name] = None
        elif name not in ("fit", "error"):
            typed[name] = float(row[name])
    return typed
