"""``fsdp-sim puzzle``: the schedule puzzle in a browser, without a notebook."""

from __future__ import annotations

import webbrowser

import click

from fsdp_sim.cli.options import Command


@click.command(cls=Command, epilog="Exit status: 0; 1 if the port is in use; 2 for what was asked wrongly.")
@click.argument("level", required=False)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Where to listen; by default a port that is free."
)
@click.option("--no-browser", is_flag=True, help="Print the address and open nothing.")
@click.option("--list", "as_list", is_flag=True, help="List the levels and your stars.")
def puzzle(level: str | None, port: int, no_browser: bool, as_list: bool) -> None:
    """Move the collectives of a step; the engine replays it at once. Opens a page on this machine; Ctrl-C ends it.

    Without LEVEL it begins with the first that you have not won.

    \b
    Examples:
      fsdp-sim puzzle
      fsdp-sim puzzle --list
      fsdp-sim puzzle two_whole --no-browser
    """
    from fsdp_sim.learn import progress
    from fsdp_sim.learn.puzzle.level import levels
    from fsdp_sim.learn.puzzle.session import PuzzleSession, first_unwon

    if as_list:
        won = progress.puzzles()
        for name, one in levels().items():
            click.echo(f"{'★' * won.get(name, 0):2}  {name:15} {one.title}: {one.goal}")
        return
    try:
        session = PuzzleSession(level or first_unwon())
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    from fsdp_sim.learn.puzzle.page import Server

    try:
        server = Server(session, port)
    except OSError as error:
        raise click.ClickException(f"port {port} cannot be used ({error.strerror}); leave out --port") from None
    with server:
        try:
            click.echo(f"The puzzle is at {server.url}\nCtrl-C ends it.")
            if not no_browser:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("\nEnded; what you won is kept.")
