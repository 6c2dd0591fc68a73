"""``fsdp-sim validate``: predicted against published step times and memory, also for runs the fit has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from fsdp_sim.cli.options import Command, print_json, schema_option
from fsdp_sim.cost import Calibration
from fsdp_sim.validate import (
    FITTED_SOURCE,
    FREE,
    GROUPS,
    HeldOut,
    PredictedRow,
    Summary,
    compare,
    fitting_rows,
    leave_out,
    other_rows,
    published,
    read_csv,
    refit_all,
    summaries,
    summary,
)
from fsdp_sim.validate.errors import group_by

NUMBERS = Path(__file__).parent.parent / "cost"  # the files that --refit writes


@click.command(cls=Command, epilog="Exit status: 0; 2 if a row is not understood, or for what was asked wrongly.")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--leave-out", "left_out", type=click.Choice(list(GROUPS)), help="Fit again without each group; predict it."
)
@click.option("--refit", "do_refit", is_flag=True, help="Fit the numbers to the file and write them.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write the accuracy page (Markdown) with its pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@schema_option("validate")
def validate(file: str | None, left_out: str | None, do_refit: bool, report: str | None, as_json: bool) -> None:
    """Predict the runs of FILE and compare with what was measured.

    FILE is a CSV with one published measurement a row; without one, the measurements that come with the project.

    \b
    Examples:
      fsdp-sim validate
      fsdp-sim validate measurements.csv --json
      fsdp-sim validate --leave-out model
      fsdp-sim validate --report fsdp_sim/ACCURACY.md
    """
    console = Console(stderr=True)
    rows = read_csv(file)
    if report:
        from fsdp_sim.validate.report import write_report
        from fsdp_sim.viz import accuracy_figures

        write_report(Path(report), rows if file else published(), console.print, accuracy_figures)
        return
    if do_refit:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("Fitting", total=None)
            texts = refit_all(rows, lambda what: bar.advance(task))
        for name, text in texts.items():
            (NUMBERS / name).write_text(text)
            click.echo(f"wrote {NUMBERS / name}")
        return
    if left_out:
        fit, held = _leave_out(rows, left_out, console)
        _print_held(fit.calibration, held, left_out, as_json)
        return
    compared = []
    for row in track(rows, "Predicting", console=console, transient=True):
        compared.append(compare(row))
        _ = compared[-1].fits  # takes longest: while the bar shows
    if as_json:
        print_json("validate", as_result(compared))
    else:
        _print(compared)


def as_result(compared: Sequence[PredictedRow]) -> dict[str, Any]:
    """What ``--json`` prints. The summary is over the rows the numbers are fitted to, if the file has any."""
    judged = set(map(id, fitting_rows([c.row for c in compared])))
    return {
        "rows": [c.as_json() for c in compared],
        "summary": {
            "time": summary(c.time_error for c in compared if id(c.row) in judged).as_json(),
            "memory": summary(c.memory_error for c in compared if not c.row.remark).as_json(),
        },
        "by_source": {
            (f"{source} ({remark})" if remark else source): summaries(some)
            for (source, remark), some in _by_source(compared).items()
        },
    }


def _by_source(compared: Sequence[PredictedRow]) -> dict[tuple[str, str], list[PredictedRow]]:
    return {
        (source, remark): some
        for source, ours in group_by(compared, lambda row: row.source).items()
        for remark, some in group_by(ours, lambda row: row.remark).items()
    }


def _leave_out(rows: Sequence[Any], name: str, console: Console) -> tuple[Any, list[HeldOut]]:
    chosen = other_rows(rows) if name == "source" else fitting_rows(rows)
    groups = len({GROUPS[name](row) for row in chosen})
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"Fitting without each {name}", total=2 * (len(FREE) + 4) + 4 * groups)
        return leave_out(chosen, name, lambda what: bar.advance(task))


def _print_held(calibration: Calibration, held: list[HeldOut], name: str, as_json: bool) -> None:
    overall = summary([e for h in held for e in h.errors])
    meanings = Calibration.meanings()
    if as_json:
        numbers = {n: {"value": getattr(calibration, n), "meaning": meanings[n], "fitted": n in FREE} for n in meanings}
        groups = {
            h.group: {"summary": h.summary.as_json(), "numbers": {n: getattr(h.calibration, n) for n in FREE}}
            for h in held
        }
        rows = [
            {"id": row.id, "step_time_s": row.step_time_s, "predicted_step_time_s": predicted, "left_out": h.group}
            for h in held
            for row, predicted in zip(h.rows, h.predicted_s, strict=True)
        ]
        found = {
            "left_out": name,
            "summary": {"time": overall.as_json()},
            "groups": groups,
            "numbers": numbers,
            "rows": rows,
        }
        print_json("validate", found)
        return
    console = Console()
    table = Table("left out", "rows", "mean", "median", "90th percentile", "bias", box=None, header_style="bold")
    for h in held:
        bias = sum(h.errors) / len(h.errors)
        table.add_row(h.group, *_cells(h.summary), f"{bias:+.1%}")
    table.add_row("all", *_cells(overall), "", style="bold")
    console.print(f"Each {name} predicted from numbers fitted without it; absolute error of step time", highlight=False)
    console.print(table)
    numbers_table = Table("fitted to all", "left out: least", "most", "", box=None, header_style="bold")
    for n in FREE:
        values = [getattr(h.calibration, n) for h in held]
        shown = [f"{v:.3g}" for v in (getattr(calibration, n), min(values), max(values))]
        numbers_table.add_row(*shown, f"{n}: {meanings[n]}")
    console.print(numbers_table)


def _cells(s: Summary) -> list[str]:
    return [str(s.n), *(f"{value:.1%}" for value in (s.mape, s.median_abs_error, s.p90_abs_error))]


def _print(compared: Sequence[PredictedRow]) -> None:
    console = Console()
    table = Table("source", "rows", "mean", "median", "90th percentile", "", box=None, header_style="bold")
    for (source, remark), some in _by_source(compared).items():
        note = remark or ("the numbers are fitted to these" if source == FITTED_SOURCE else "")
        table.add_row(source, *_cells(summary(c.time_error for c in some)), note)
    console.print("Absolute error of predicted step time", highlight=False)
    console.print(table)
    known = [c for c in compared if c.memory_error is not None]
    if known:
        memory = Table("id", "source", "measured GiB", "predicted GiB", "error", "", box=None, header_style="bold")
        for c in known:
            measured = c.row.peak_memory_bytes or 0.0
            figures = [
                f"{measured / 2**30:.1f}",
                f"{c.predicted_peak_memory_bytes / 2**30:.1f}",
                f"{c.memory_error:+.1%}",
            ]
            memory.add_row(c.row.id, c.row.source, *figures, c.row.remark)
        console.print("Peak memory", highlight=False)
        console.print(memory)
    wrong = [c.row.id for c in compared if not c.fits and not c.row.remark]
    if wrong:
        console.print(f"Ran, but predicted not to fit: {', '.join(wrong)}", style="red")
