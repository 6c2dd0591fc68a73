"""The commands of `fsdp-sim`. A command's file is imported only when the command is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple, NoReturn

import click

from fsdp_sim.cli.course_files import bring_labs
from fsdp_sim.packages import missing

INTERRUPTED = 130
EPILOG = (
    "Exit status of every command: 0 done; 1 the answer is no (a plan does not fit, programs differ, something is "
    "broken); 2 what was asked wrongly; 130 after Ctrl-C."
)


GOALS = (LEARN, PREDICT, CHOOSE, LOOK, MACHINE, TEACH, MORE) = (
    "Learn", "Predict a run", "Choose a plan", "Look at a run", "Set up this machine", "Teach", "More"
)  # fmt: skip
"""What one wants to do: the headings of the help, in order."""


class CommandEntry(NamedTuple):
    """Where a command lives, and the line `fsdp-sim --help` shows for it, under which heading."""

    target: str  # "module:attribute"
    help: str
    goal: str = MORE


COMMANDS = {
    "demo": CommandEntry("fsdp_sim.cli.demo:demo", "Train on 4 ranks, predict the same step, write demo.html.", LEARN),
    "ladder": CommandEntry(
        "fsdp_sim.cli.ladder:ladder", "Train in every way, from one process to HSDP, and compare.", LEARN
    ),
    "simulate": CommandEntry(
        "fsdp_sim.cli.simulate:simulate", "Predict a training step: time, memory, and why.", PREDICT
    ),
    "program": CommandEntry(
        "fsdp_sim.cli.program:program", "Print what torch issues for a small model, or diff it.", PREDICT
    ),
    "sweep": CommandEntry("fsdp_sim.cli.sweep:sweep", "Simulate every combination: table, Pareto picture.", CHOOSE),
    "fit": CommandEntry("fsdp_sim.cli.fit:fit", "Find the largest model, batch or sequence that fits.", CHOOSE),
    "tune": CommandEntry("fsdp_sim.cli.tune:tune", "Find the fastest plan that fits, and price each change.", CHOOSE),
    "migrate": CommandEntry(
        "fsdp_sim.cli.migrate:migrate", "Rewrite a script or configuration for FSDP2: a diff.", CHOOSE
    ),
    "explain": CommandEntry("fsdp_sim.cli.explain:explain", "Say what a run does unlike its configuration.", LOOK),
    "lint": CommandEntry(
        "fsdp_sim.cli.lint:command", "Find traps of FSDP in a script, a configuration, a model.", CHOOSE
    ),
    "diagnose": CommandEntry(
        "fsdp_sim.cli.diagnose:command", "Say why communication is not overlapped in a trace.", LOOK
    ),
    "validate": CommandEntry(
        "fsdp_sim.cli.validate:validate", "Compare predictions with published measurements.", PREDICT
    ),
    "doctor": CommandEntry(
        "fsdp_sim.cli.doctor:doctor", "Say what works here, and what to do about the rest.", MACHINE
    ),
    "completion": CommandEntry(
        "fsdp_sim.cli.completion:completion", "Print what makes your shell complete these words.", MACHINE
    ),
    "calibrate": CommandEntry(
        "fsdp_sim.cli.calibrate:command", "Measure this machine, and write a cluster file.", MACHINE
    ),
    "exercises": CommandEntry(
        "fsdp_sim.cli.exercises:exercises", "List the exercises of the course, and count them.", LEARN
    ),
    "course": CommandEntry(
        "fsdp_sim.cli.course:course", "Write the notebooks and labs into a folder, or update it.", LEARN
    ),
    "lab": CommandEntry("fsdp_sim.cli.lab:lab", "Open JupyterLab at the first notebook.", LEARN),
    "mine": CommandEntry("fsdp_sim.cli.mine:mine", "Say where your own FSDP, my_fsdp.py, stands.", LEARN),
    "teach": CommandEntry("fsdp_sim.cli.teach:teach", "Plan a class, and know what to expect of it.", TEACH),
    "puzzle": CommandEntry(
        "fsdp_sim.cli.puzzle:puzzle", "Move the collectives of a step; the engine replays it.", LEARN
    ),
    "drill": CommandEntry("fsdp_sim.cli.drill:drill", "Answer interview questions; hold a mock interview.", LEARN),
    "coverage": CommandEntry(
        "fsdp_sim.cli.coverage:coverage", "Say where the course teaches what it is to teach.", LEARN
    ),
}
AS_JSON = "fsdp_sim.as_json"
"""The key of `click.Context.meta` for whether the call asks for JSON, errors included."""


class LazyGroup(click.Group):
    """A group whose help and completion come from `COMMANDS`, so that neither imports torch or plotly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        bring_labs()
        module, attribute = entry.target.split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            fail_for_package(error, ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            fail_for_package(error, ctx)
        except KeyboardInterrupt:  # click would say 1, which is an answer
            click.echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        wide = max(map(len, COMMANDS))  # so that every heading's lines begin in one column
        for goal in GOALS:
            if some := [(name.ljust(wide), entry.help) for name, entry in COMMANDS.items() if entry.goal == goal]:
                with formatter.section(goal):
                    formatter.write_dl(some)


def fail_for_package(error: ModuleNotFoundError, ctx: click.Context, command: str | None = None) -> NoReturn:
    """Say which package a command lacks and exit with status 2."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "fsdp_sim", "labs"):
        raise error
    from fsdp_sim.cli.options import fail

    fail(missing(package, f"fsdp-sim {command or ctx.invoked_subcommand}"), ctx.meta.get(AS_JSON, False))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="fsdp-sim")
def main() -> None:
    """Learn Fully Sharded Data Parallel: run it, predict it, see why a step takes as long as it does."""


if __name__ == "__main__":
    main()
