"""``fsdp-sim lab``: JupyterLab at the first notebook."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from fsdp_sim.cli.course import FIRST
from fsdp_sim.cli.course_files import PACKAGE, home_of_labs
from fsdp_sim.cli.options import Command
from fsdp_sim.packages import need


def has_course(folder: Path) -> bool:
    return (folder / FIRST).is_file()


def command(folder: Path, port: int | None, browser: bool, as_root: bool) -> list[str]:
    """The call of JupyterLab: it listens on this machine alone, behind its token."""
    css = {"static_custom_path": [str(PACKAGE / "viz" / "jupyterlab")]}
    options = ["--ip=127.0.0.1", "--log-level=WARN", "--LabApp.custom_css=True", f"--ServerApp.tornado_settings={css}"]
    options += [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{FIRST}"]
    options += [] if port is None else [f"--port={port}", "--ServerApp.port_retries=0"]
    options += [] if browser else ["--no-browser"]
    options += ["--allow-root"] if as_root else []  # in most containers; Jupyter wants to be told
    return [sys.executable, "-m", "jupyterlab", *options]


@click.command(cls=Command, epilog="Exit status: JupyterLab's; 2 for what was asked wrongly.")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--port", type=click.IntRange(1, 65535), help="Where to listen.  [default: 8888 or the next free]")
@click.option("--no-browser", is_flag=True, help="Print the address and open nothing.")
def lab(folder: Path | None, port: int | None, no_browser: bool) -> None:
    """Open JupyterLab at the first notebook of FOLDER, which fsdp-sim course has written.

    Without FOLDER it looks in this one, and in its notebooks/, as a checkout has them. It listens on 127.0.0.1 alone,
    behind a token.

    \b
    Examples:
      fsdp-sim lab here
      fsdp-sim lab here --port 8889 --no-browser
    """
    looked = [folder] if folder else [Path(), Path("notebooks")]
    found = next(filter(has_course, looked), None)
    if found is None:
        where = f"{folder} has" if folder else "this folder and its notebooks/ have"
        raise click.UsageError(f"{where} no {FIRST}: fsdp-sim course here writes the course into here/")
    need("fsdp-sim lab", "jupyterlab", "ipykernel")
    found = found.resolve()
    # The learner's labs, for the solutions' notebooks in the folder below too; a checkout has them beside notebooks/.
    home = found if (found / "labs" / "train.py").is_file() else home_of_labs()
    paths = [*([str(home)] if home else []), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # Terminals and `!commands` find this environment's programs, wherever it was called from.
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PATH": programs}
    call = command(found, port, not no_browser, as_root=hasattr(os, "geteuid") and os.geteuid() == 0)
    sys.stdout.flush()
    os.execvpe(call[0], call, env)
