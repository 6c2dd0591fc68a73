"""``fsdp-sim demo``: the main job in under a minute and without a browser."""

from __future__ import annotations

import click

from fsdp_sim.cli.options import Command
from fsdp_sim.cli.written import check_folder


@click.command(cls=Command)
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(min=2), help="Ranks to train on.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(min=3), help="Training steps of the GPT.")
@click.option("--batch", default=32, show_default=True, help="Rows per step over all ranks.")
@click.option("--data", help="A text file or a folder of text files.  [default: the source of torch.distributed]")
@click.option("--out", default="demo.html", show_default=True, type=click.Path(dir_okay=False), help="Page to write.")
def demo(ranks: int, steps: int, batch: int, data: str | None, out: str) -> None:
    """See what prefetch hides, train a GPT on 4 ranks, predict the same step, and draw it all.

    \b
    Examples:
      fsdp-sim demo
      fsdp-sim demo --ranks 2 --data my_texts/ --out two.html
    """
    check_folder("--out", out)
    click.echo("Under a minute on two idle cores. First, torch is loaded...")

    from fsdp_sim.ranks import start_server

    start_server()  # its torch is loaded beside this process's

    from labs.experiments.prefetch import Experiment

    try:
        experiment = Experiment(world_size=ranks, batch=batch, data=data)
        experiment.corpus  # noqa: B018  (read now, so that what is wrong with it is said before anything starts)
    except OSError as error:
        raise click.UsageError(str(error)) from error

    from fsdp_sim.cli.demo_run import show

    show(experiment, steps, out)
