"""``fsdp-sim ladder``: one training in every way, from one process to HSDP, and where two ways part."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from fsdp_sim.cli.options import print_json, schema_option
from fsdp_sim.ranks import RanksError
from labs.experiments.ladder import Ladder, climb
from labs.experiments.ladder import table as text
from labs.experiments.ladder.divergence import TOLERANCE
from labs.experiments.ladder.faults import FAULTS
from labs.experiments.ladder.on_ranks import MAX_RANKS, LadderConfig
from labs.experiments.ladder.rungs import RUNGS


def _broken(value: str | None) -> dict[str, str]:
    """``FAULT`` or ``FAULT@RUNG`` to what `climb` takes."""
    if not value:
        return {}
    fault, _, rung = value.partition("@")
    return {rung or "mini-fsdp": fault}


@click.command(epilog="Exit status: 0 if all rungs agree, 1 if one diverges or fails, 2 for what was asked wrongly.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1, MAX_RANKS), help="Ranks to train on.")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Steps that are compared.")
@click.option("--rungs", help=f"Some of: {', '.join(RUNGS)}.  [default: all]")
@click.option("--model", default="tiny", show_default=True, help="tiny, teaching, gpt2, ...: a size of GPT.")
@click.option("--batch", default=12, show_default=True, help="Rows per step over all ranks.")
@click.option("--seq-len", default=32, show_default=True, help="Tokens in a row.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the weights and the data.")
@click.option("--data", help="A text file or a folder of text files.  [default: the source of torch.distributed]")
@click.option(
    "--tolerance",
    default=TOLERANCE,
    show_default=True,
    help="Relative, where the order of sums is the same.",
)
@click.option(
    "--break", "broken", metavar="FAULT[@RUNG]", help=f"Seed a mistake into mini-fsdp, or RUNG: {', '.join(FAULTS)}."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@schema_option("ladder")
def ladder(
    ranks: int, steps: int, rungs: str | None, model: str, batch: int, seq_len: int, seed: int, data: str | None,
    tolerance: float, broken: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Train one GPT in every way, with the same weights and text, and say where two ways part.

    \b
    Examples:
      fsdp-sim ladder
      fsdp-sim ladder --ranks 4 --steps 5
      fsdp-sim ladder --rungs torch-fsdp2,mini-fsdp --break stale-shard
      fsdp-sim ladder --rungs mini-ddp --break wrong-seed@mini-ddp --json
    """
    try:
        setting = LadderConfig(ranks, steps, batch, seq_len, model, data, seed, tolerance)
        setting.corpus.check(seq_len)
        console = Console(stderr=True)
        found = climb(
            setting, rungs.split(",") if rungs else None, broken=_broken(broken),
            progress=lambda names: track(names, "Climbing", console=console, transient=True),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    except RanksError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print_json("ladder", text.as_json(found))
    else:
        _print(found)
    sys.exit(bool(found.divergences))


def _print(found: Ladder) -> None:
    console = Console()
    console.print(f"{found.setting.model} GPT, {found.setting.batch} rows of {found.setting.seq_len} bytes a step, "
                  f"text: {found.setting.corpus.name}, seed {found.setting.seed}")  # fmt: skip
    for table in (text.numbers(found), text.costs(found)):
        shown = Table(*table.header, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for column in shown.columns[1:]:
            column.justify = "right"
        for row in table.rows:
            shown.add_row(*map(_coloured, row))
        console.print(shown, "")
    console.print(text.verdict(found), style="red" if found.divergences else "green")
    for line in found.divergences:
        console.print(f"  {line}", highlight=False)
    console.print(text.legend(found), style="dim")
    for line in (text.programs(found), text.not_by_value(found)):
        if line:
            console.print(line, highlight=False, markup=False)
    if bits := text.first_bits(found):
        console.print(
            "First bit that differs:", *(f"  {line}" for line in bits), sep="\n", highlight=False, markup=False
        )


def _coloured(cell: str) -> Text:
    return Text(cell, style="bold red" if cell.startswith(text.OFF) else "green" if cell == text.EQUAL else "")
