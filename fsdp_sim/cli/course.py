"""``fsdp-sim course``: this version's notebooks and labs in a folder of the learner's.

What the learner has changed there stays. Beside the files lies a list of what was written, with hashes; a file that is
no longer as written is the learner's, and its new version comes to lie beside it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import click
import msgspec

import fsdp_sim
from fsdp_sim.cli.course_files import course_files
from fsdp_sim.cli.options import Command, print_json, schema_option

FIRST = "00_start_here.ipynb"
WRITTEN = ".fsdp_sim_course.json"


class Written(msgspec.Struct):
    """What the last call wrote: the version, and each file's SHA-256."""

    version: str = ""
    files: dict[str, str] = {}


@dataclass
class Changes:
    """What a call did, by place in the folder; ``beside``: a changed file, and where its new version lies."""

    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)


def write_course(folder: Path, files: dict[str, Path], version: str) -> Changes:
    """Bring a folder to a version of the course, and keep what was changed there since it was written.

    Args:
        files: the course's files, by their place in the folder.

    Raises:
        ValueError: the folder's list of what was written cannot be read.
        OSError: the folder cannot be written.
    """
    before, changes = _written(folder), Changes()
    hashes = {name: _hash(path) for name, path in files.items()}
    for name, path in files.items():
        here = folder / name
        found = _hash(here) if here.exists() else None
        if found == hashes[name]:
            continue
        if found is None or found == before.files.get(name):
            _write(here, path.read_bytes())
            changes.written.append(name)
        elif before.files.get(name) == hashes[name]:  # the learner's, and there is nothing newer
            changes.kept.append(name)
        else:
            changes.beside[name] = _write_beside(folder, name, path, version)
    for name, as_written in before.files.items():
        if name not in files and (folder / name).is_file() and _hash(folder / name) == as_written:
            (folder / name).unlink()
            changes.removed.append(name)
    _write(folder / WRITTEN, msgspec.json.format(msgspec.json.encode(Written(version, hashes))))
    return changes


def _write_beside(folder: Path, name: str, path: Path, version: str) -> str:
    """Write a file's new version under a name that is free, and has the version in it; return the name."""
    place = PurePosixPath(name)
    names = [f"{place.stem}.{version}{number}{place.suffix}" for number in ("", *(f"-{n}" for n in range(2, 1000)))]
    for other in (place.with_name(name).as_posix() for name in names):
        if not os.path.lexists(folder / other) or _hash(folder / other) == _hash(path):
            _write(folder / other, path.read_bytes())
            return other
    raise ValueError(f"{folder / name} has {len(names)} newer versions beside it: remove those that you do not need")


def _written(folder: Path) -> Written:
    file = folder / WRITTEN
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Written) if file.exists() else Written()
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} cannot be read ({error}): remove it, and files that differ count as yours") from None
    for name in found.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{file} names {name!r}, which is outside of its folder: remove the file")
    return found


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def sentences(folder: Path, changes: Changes, version: str) -> list[str]:
    """What was done, for the learner to read."""
    n = len(changes.written)
    said = [f"{folder}: the course of fsdp_sim {version}, {n} {'file' if n == 1 else 'files'} written."]
    if changes.removed:
        said.append(f"Removed, since the course no longer has them: {', '.join(changes.removed)}.")
    if changes.kept:
        said.append(f"Yours, and kept as you left them: {', '.join(changes.kept)}.")
    said += [f"{name} is yours and stays; its new version is {other}." for name, other in changes.beside.items()]
    return said


@click.command(cls=Command, epilog="Exit status: 0; 2 for what was asked wrongly, and where nothing can be written.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@schema_option("course")
def course(folder: Path, as_json: bool) -> None:
    """Write the notebooks and labs of this version into FOLDER.

    Called again, with this version or a newer one, it brings up to date what you have not changed, and says where the
    new version of the rest lies. What you removed comes back. In the folder, python -m labs.train trains.

    \b
    Examples:
      fsdp-sim course here
    """
    files = course_files()
    if folder.resolve() in {path.resolve().parent for path in files.values()} | {Path(fsdp_sim.__file__).parents[1]}:
        raise ValueError(f"{folder} is where the course is kept: name a folder of your own, as in fsdp-sim course here")
    changes = write_course(folder, files, fsdp_sim.__version__)
    if as_json:
        print_json("course", {"folder": str(folder), "course_version": fsdp_sim.__version__} | vars(changes))
        return
    click.echo("\n".join(sentences(folder, changes, fsdp_sim.__version__)))
    click.echo(f"Open it with fsdp-sim lab {folder}")
