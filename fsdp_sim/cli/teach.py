"""``fsdp-sim teach``: the instructor's kit: plans with minute marks, and what to expect of each chapter."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import click
import msgspec
from rich.console import Console

from fsdp_sim.cli.options import Command, json_option
from fsdp_sim.learn.find import CHAPTERS
from fsdp_sim.timeline import written

EPILOG = "Exit status: 0; 2 for what was asked wrongly, and where there are no notebooks."


@click.group(epilog=EPILOG)
def teach() -> None:
    """Plan a class, and know what to expect of it. Printed is Markdown, the pages of notebooks/instructor.

    \b
    Examples:
      fsdp-sim teach plan --list
      fsdp-sim teach plan 90-minutes
      fsdp-sim teach expect
      fsdp-sim teach expect overlap
      fsdp-sim teach rollup handed_in
      fsdp-sim teach grade handed_in.ipynb --trusted
      fsdp-sim teach write
    """


@teach.command(cls=Command, epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--list", "as_list", is_flag=True, help="List the plans.")
def plan(name: str | None, as_list: bool) -> None:
    """Print a plan: what happens when, what to run and say, and what to leave out when late.

    \b
    Examples:
      fsdp-sim teach plan --list
      fsdp-sim teach plan one-day
    """
    from fsdp_sim.learn.classroom import plan_pages, plans

    if as_list or name is None:
        click.echo(plan_pages.listing())
    else:
        click.echo(plan_pages.page(plans.plan_named(name)), nl=False)


@teach.command(cls=Command, epilog=EPILOG)
@click.argument("chapter", required=False, type=click.Choice(CHAPTERS))
def expect(chapter: str | None) -> None:
    """Print what to expect of a chapter: questions to ask, wrong answers, what helps. Without one, list the chapters.

    \b
    Examples:
      fsdp-sim teach expect
      fsdp-sim teach expect memory
    """
    from fsdp_sim.learn.classroom import expect_pages

    click.echo(expect_pages.page(chapter) if chapter else expect_pages.listing(), nl=not chapter)


@teach.command(cls=Command, epilog=EPILOG)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--csv", "to_csv", type=click.Path(path_type=Path), help="Write a line for each learner and exercise.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write the figure: a page, PNG or SVG by its ending.")
def rollup(folder: Path, to_csv: Path | None, picture: Path | None) -> None:
    """Sum up what a class has handed in: progress files or notebooks, a file or a folder for each learner.

    \b
    Examples:
      fsdp-sim teach rollup handed_in
      fsdp-sim teach rollup handed_in --csv class.csv --picture class.html
    """
    from fsdp_sim.learn.classroom import rollup_pages
    from fsdp_sim.learn.classroom.rollup import as_csv, gather, summaries

    results, refused = gather(folder)
    for sentence in refused:
        click.echo(f"not read: {sentence}", err=True)
    found = summaries(results)
    rollup_pages.show(found, len({result.learner for result in results}))
    if to_csv:
        with written(to_csv) as new:
            new.write_text(as_csv(results), encoding="utf-8")
    if picture:
        rollup_pages.picture(found).save(picture)


@teach.command(cls=Command, epilog=f"{EPILOG} A submission without points is no error.")
@click.argument("notebook", type=click.File("rb"))
@click.option("--hide", multiple=True, type=click.Path(path_type=Path), help="A folder that the code must not read.")
@click.option("--given-out", type=click.File("rb"), help="The notebook as it was given out: what lacks in it counts.")
@click.option("--trusted", is_flag=True, help="Run the code as yourself: only what you trust; needs no root.")
@json_option
def grade(notebook: BinaryIO, hide: tuple[Path, ...], given_out: BinaryIO | None, trusted: bool, as_json: bool) -> None:
    """Grade the exercises of a notebook that was handed in; - reads it from standard input. Nothing of it is run but
    the exercises' own cells, each in processes with limits, as a user lent for it who can read neither the solutions
    nor what is hidden. That takes root.

    Points are out of the exercises that have a cell in it. With --given-out they are out of those of that notebook: an
    exercise whose cell was removed gets none, and one that nobody asked for does not count.

    \b
    Examples:
      sudo .venv/bin/fsdp-sim teach grade handed_in/01.ipynb --hide handed_in --given-out source/01.ipynb
      fsdp-sim teach grade my_own.ipynb --trusted
    """
    from rich.progress import track

    from fsdp_sim.learn.classroom.grading import answers, grade, of_assignment
    from fsdp_sim.learn.classroom.rollup import MAX_BYTES

    def read(of: BinaryIO) -> dict[str, str]:
        data = of.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{of.name} is larger than {MAX_BYTES / 1e6:.0f} MB; clear its outputs")
        return answers(data)

    answered = read(notebook)
    if given_out:
        answered = of_assignment(answered, read(given_out))
    graded = grade(answered, hide, as_other_user=not trusted)
    if as_json:
        click.echo(msgspec.json.encode(list(graded)))
        return
    every = list(track(graded, "grading", len(answered), console=Console(stderr=True), transient=True))
    for one in every:
        click.echo(f"{one.points} of {one.out_of}  {one.exercise}: {one.feedback}\n")
    if not given_out:
        click.echo(
            "Counted are the exercises that have a cell in this notebook; --given-out counts what is missing, too."
        )
    click.echo(f"{sum(one.points for one in every)} of {sum(one.out_of for one in every)} points")


@teach.command(cls=Command, epilog=EPILOG)
def write() -> None:
    """Write the pages of notebooks/instructor anew, from the plans, the notes and the exercises.

    \b
    Examples:
      fsdp-sim teach write
    """
    from fsdp_sim.learn.classroom import pages

    changed = pages.write()
    click.echo("\n".join(changed) if changed else "All pages were as they should be.")
