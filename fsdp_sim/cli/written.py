"""What commands share that write a file: its folder has to be there, and a page takes packages that draw."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from fsdp_sim.packages import missing


def check_folder(option_name: str, path: str | None) -> None:
    """Before any work is started.

    Raises:
        ValueError: a file is asked for in a folder that is not there.
    """
    if path and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{option_name} {path}: there is no folder {Path(path).absolute().parent}")


def drawn(option_name: str) -> ModuleType:
    """`fsdp_sim.viz`, imported only where something is drawn.

    Raises:
        ValueError: a package that it needs is not installed.
    """
    try:
        from fsdp_sim import viz
    except ModuleNotFoundError as error:
        raise ValueError(missing(error.name or "", option_name)) from error
    return viz
