"""The group of commands behind `fsdp-sim`; a command's file is imported when the command is called, not before."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click


class Entry(NamedTuple):
    """Where a command lives, the line `fsdp-sim --help` shows for it, and the extras that it needs."""

    target: str  # "module:attribute"
    help: str
    extras: str


COMMANDS = {
    "demo": Entry(
        "fsdp_sim.cli.demo:demo", "Train on 4 ranks, predict the same step, write demo.html.", "mini,labs,notebooks"
    ),
    "ladder": Entry(
        "fsdp_sim.cli.ladder:ladder",
        "Train in every way, from one process to HSDP, and compare.",
        "mini,labs,notebooks",
    ),
    "simulate": Entry("fsdp_sim.cli.simulate:simulate", "Predict a training step: time, memory, and why.", ""),
    "program": Entry("fsdp_sim.cli.program:program", "Print what torch issues for a small model, or diff it.", ""),
    "sweep": Entry("fsdp_sim.cli.sweep:sweep", "Simulate every combination: table, Pareto picture.", "notebooks"),
    "fit": Entry("fsdp_sim.cli.fit:fit", "Find the largest model, batch or sequence that fits.", ""),
    "diagnose": Entry("fsdp_sim.cli.diagnose:command", "Say why communication is not overlapped in a trace.", ""),
    "validate": Entry("fsdp_sim.cli.validate:validate", "Compare predictions with published measurements.", ""),
    "doctor": Entry("fsdp_sim.cli.doctor:doctor", "Say what works here, and what to do about the rest.", ""),
    "completion": Entry("fsdp_sim.cli.completion:completion", "Print what makes your shell complete these words.", ""),
    "calibrate": Entry("fsdp_sim.cli.calibrate:command", "Measure this machine, and write a cluster file.", "mini"),
    "exercises": Entry("fsdp_sim.cli.exercises:exercises", "List the exercises of the course, and count them.", "labs"),
    "teach": Entry("fsdp_sim.cli.teach:teach", "Plan a class, and know what to expect of it.", "labs"),
    "drill": Entry("fsdp_sim.cli.drill:drill", "Answer interview questions; hold a mock interview.", "labs"),
    "coverage": Entry("fsdp_sim.cli.coverage:coverage", "Say where the course teaches what it is to teach.", "dev"),
}


class LazyGroup(click.Group):
    """A group whose help and completion come from `COMMANDS`, so that neither imports torch or plotly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; raise ClickException that names the extras where one of their packages is missing."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, attribute = entry.target.split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] in ("fsdp_sim", "labs"):
                raise
            raise click.ClickException(
                f"fsdp-sim {cmd_name} needs {error.name}, which is not installed: "
                f"pip install 'fsdp-sim[{entry.extras}]', or run make setup in a checkout."
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fsdp-sim")
def main() -> None:
    """Learn Fully Sharded Data Parallel: run it, predict it, see why a step takes as long as it does."""


if __name__ == "__main__":
    main()
