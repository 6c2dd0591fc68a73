"""The folder of checkpoints: how one comes into being all at once, how it is found again, and how it goes.

    step-20/                 a checkpoint: complete, because its name was given last, by one rename
    step-30.tmp-1f0c9a2e/    being written, or being deleted, or left by a run that was killed meanwhile
    step-30.damaged-77b1e0/  a damaged checkpoint, put aside when its step was saved again; for people to look at
    latest                   the name of the newest checkpoint; for people: `candidates` does not rely on it

Everything here is local work of one rank.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from labs.checkpoint.hashing import FILES_AT_ONCE, fsync_folder, hash_file
from labs.checkpoint.index import INDEX, check_files
from labs.checkpoint.manifest import MANIFEST, Manifest, read_manifest

LATEST, PROGRESS = "latest", "progress.json"
CHECKPOINT = re.compile(r"step-(0|[1-9]\d*)")
PARTIAL = re.compile(rf"(step-\d+|{LATEST})\.tmp-[0-9a-f]+")


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step}"


def _beside(path: Path, why: str) -> Path:
    return path.with_name(f"{path.name}.{why}-{uuid.uuid4().hex[:8]}")


# ---- Before the first one --------------------------------------------------------------------------------------------


def prepare(folder: Path) -> list[str]:
    """Make the folder if it is not there, and delete what runs that ended meanwhile left unfinished in it.

    Only for who holds the run's lock: to anybody else a checkpoint that is being written looks the same.

    Returns:
        A sentence for each thing deleted, or left because it could not be.

    Raises:
        OSError: the folder cannot be made or read.
    """
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)
    sentences = []
    for path in sorted(folder.iterdir()):
        if PARTIAL.fullmatch(path.name):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                sentences.append(f"removed {path}, left unfinished by a run that ended meanwhile")
            except OSError as error:
                sentences.append(f"{path} was left unfinished by a run that ended, and could not be removed: {error}")
    return sentences


# ---- Making one ------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """A new empty folder to write a checkpoint into."""
    partial = _beside(folder / name_of(step), "tmp")
    partial.mkdir()
    return partial


def commit(partial: Path, step: int) -> Path:
    """Give a complete and fsynced checkpoint its name: from here on it exists. What had the name is put aside.

    `set_latest` fsyncs the folder that holds the name.

    Raises:
        OSError: the disk failed.
    """
    final = partial.with_name(name_of(step))
    fsync_folder(partial)
    if final.exists():
        final.rename(_beside(final, "damaged"))
    partial.rename(final)
    return final


def set_latest(checkpoint: Path) -> None:
    """Write the checkpoint's name into the file `LATEST`."""
    latest = checkpoint.with_name(LATEST)
    new = _beside(latest, "tmp")
    with open(new, "x") as file:
        file.write(checkpoint.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(latest)
    fsync_folder(checkpoint.parent)


def prune(folder: Path, keep: int, damaged: Collection[Path] = ()) -> list[str]:
    """Delete what is older than the newest ``keep`` checkpoints; those known to be damaged do not count as kept.

    Returns:
        A sentence for each that could not be deleted; the next call tries again.
    """
    good = [path for path in candidates(folder) if path not in damaged]
    oldest_kept = _step(good[:keep][-1]) if good else 0
    complaints = []
    for path in candidates(folder):
        if _step(path) < oldest_kept:
            gone = _beside(path, "tmp")
            try:
                path.rename(gone)  # first: half a checkpoint must not have a checkpoint's name
                shutil.rmtree(gone)
            except OSError as error:
                complaints.append(f"{path} is old and could not be deleted: {error}")
    return complaints


# ---- Finding one -----------------------------------------------------------------------------------------------------


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def candidates(folder: Path) -> list[Path]:
    """All committed checkpoints, good or damaged, newest first."""
    found = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def older_than(checkpoint: Path) -> list[Path]:
    """The committed checkpoints of earlier steps, good or damaged, newest first."""
    return [path for path in candidates(checkpoint.parent) if _step(path) < _step(checkpoint)]


def survey(checkpoint: Path) -> tuple[Manifest | None, list[str]]:
    """What can be seen without reading the data: the manifest, and what is wrong with it or with names and sizes."""
    try:
        manifest = read_manifest(checkpoint)
        there = {path.name: path.lstat().st_size for path in checkpoint.iterdir() if path.name != MANIFEST}
    except (OSError, ValueError) as error:
        return None, [str(error)]
    wrong = []
    if manifest.step != _step(checkpoint):
        wrong.append(f"{MANIFEST} says step {manifest.step}")
    for name in sorted(there.keys() - manifest.files.keys()):
        wrong.append(f"{name} is not in {MANIFEST}: it does not belong to the checkpoint, and was not opened")
    own = sum(name.startswith("rank-") for name in manifest.files)
    if own and own != manifest.world_size:
        wrong.append(f"{MANIFEST} says {manifest.world_size} ranks, and files of {own} are there")
    for name, info in manifest.files.items():
        if name not in there:
            wrong.append(f"{name} is missing")
        elif there[name] != info.size_bytes:
            wrong.append(f"{name} has {there[name]} bytes, not {info.size_bytes}")
    return manifest, wrong


def wrong_index(checkpoint: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the places of the tensors in a sharded checkpoint, whose files are as they were written."""
    if INDEX not in manifest.files:
        return []
    try:
        check_files(checkpoint, {name: info.size_bytes for name, info in manifest.files.items()})
    except (OSError, ValueError) as error:
        return [str(error)]
    return []


def damaged_files(checkpoint: Path, manifest: Manifest, names: Collection[str]) -> list[str]:
    """What is wrong with the contents of some of the files: they are read whole."""

    def wrong(name: str) -> str:
        try:
            if hash_file(checkpoint / name) != manifest.files[name]:
                return f"{name} has not the SHA-256 that {MANIFEST} says: its bytes have changed"
        except OSError as error:
            return f"{name} cannot be read: {error}"
        return ""

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return [why for why in pool.map(wrong, names) if why]


def shares(manifest: Manifest, n: int) -> list[list[str]]:
    """The files of a checkpoint, shared out so that ``n`` readers have about equally many bytes each."""
    mine: list[list[str]] = [[] for _ in range(n)]
    load_bytes = [0] * n
    for name, info in sorted(manifest.files.items(), key=lambda file: (-file[1].size_bytes, file[0])):
        least = load_bytes.index(min(load_bytes))
        mine[least].append(name)
        load_bytes[least] += info.size_bytes
    return mine


def read_progress(checkpoint: Path, schema: Any = dict[str, Any]) -> dict[str, Any]:
    """What the trainer noted beside the tensors.

    Args:
        schema: the type that it has to have, as msgspec knows types. If it has a ``step``, that is the checkpoint's.

    Raises:
        OSError: it cannot be read. ValueError: it is something else.
    """
    try:
        progress = msgspec.json.decode((checkpoint / PROGRESS).read_bytes(), type=schema)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{PROGRESS} is not what a run writes: {error}") from error
    if progress.get("step", _step(checkpoint)) != _step(checkpoint):
        raise ValueError(f"{PROGRESS} is not what a run writes: it says step {progress['step']}")
    return progress


def newest_progress(folder: Path, schema: Any = dict[str, Any]) -> dict[str, Any] | None:
    """The progress of the newest checkpoint that looks whole, without reading its tensors; None if there is none.

    For a look before any rank is started; `labs.checkpoint.Checkpointer.newest` reads everything.
    """
    for path in candidates(folder):
        manifest, wrong = survey(path)
        if manifest and not wrong and not damaged_files(path, manifest, [PROGRESS]):
            with suppress(ValueError):
                return read_progress(path, schema)
    return None
