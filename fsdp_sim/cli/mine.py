"""``fsdp-sim mine``: where the learner's own FSDP stands."""

from __future__ import annotations

import sys

import click

from fsdp_sim.cli.options import Command


@click.command(cls=Command, epilog="Exit status: 0; 1 if it does not train as torch's; 2 for what was asked wrongly.")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--climb", "climb_it", is_flag=True, help="Train it beside one process, the mini and torch's.")
@click.option("--show", is_flag=True, help="Print the file.")
def mine(file: str | None, climb_it: bool, show: bool) -> None:
    """Say which parts of your my_fsdp.py are yours, and whether it trains as torch's fully_shard.

    \b
    Examples:
      fsdp-sim mine
      fsdp-sim mine --climb
      fsdp-sim mine notebooks/my_fsdp.py --show
    """
    from labs.experiments.mine import mine as look

    try:
        found = look(file, climb_it=climb_it)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    print(found.text if show else found)
    sys.exit(climb_it and not found.as_torch)
