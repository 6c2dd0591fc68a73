"""``fsdp-sim completion``: what a shell needs to complete commands, options, and names of models, GPUs and plans."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog="Exit status: 0; 2 for a shell that it does not know.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes fsdp-sim in SHELL.

    \b
    Examples:
      eval "$(fsdp-sim completion bash)"         in ~/.bashrc; zsh alike, in ~/.zshrc
      fsdp-sim completion fish > ~/.config/fish/completions/fsdp-sim.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "fsdp-sim", "_FSDP_SIM_COMPLETE").source())
