"""The manifest of a checkpoint: which files belong to it, how long they are, and their SHA-256.

A checkpoint is good when its manifest is whole, all its files are as the manifest says, and no other file is there.
The sums are against accidents: bits that flip, files cut off or missing. They are no signature.
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from labs.checkpoint.hashing import FileInfo

MANIFEST = "manifest.json"
VERSION = 1

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name that cannot lead out of the checkpoint's folder."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `MANIFEST` holds.

    Attributes:
        format: ``sharded`` or ``full``.
        world_size: ranks that wrote it.
        files: all files of the checkpoint but the manifest.
        checksum: SHA-256 of this manifest with an empty checksum.
    """

    version: int = VERSION
    step: Annotated[int, msgspec.Meta(ge=0)]
    format: Literal["sharded", "full"]
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    files: dict[FileName, FileInfo]
    checksum: str = ""

    def encode(self) -> bytes:
        """The one way to write this manifest down, checksum included: any other bytes are damage."""
        bare = msgspec.structs.replace(self, checksum="")
        checksum = hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()
        whole = msgspec.structs.replace(self, checksum=checksum)
        return msgspec.json.format(msgspec.json.encode(whole, order="deterministic"), indent=1) + b"\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, or of another version.
    """
    path = checkpoint / MANIFEST
    if not stat.S_ISREG(path.lstat().st_mode):  # whoever reads a pipe waits, and a device may have no end
        raise ValueError(f"{MANIFEST} is damaged: it is no file")
    written = path.read_bytes()
    try:
        manifest = msgspec.json.decode(written, type=Manifest)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    if manifest.version != VERSION:
        raise ValueError(f"{MANIFEST} has version {manifest.version}; this program reads version {VERSION}")
    if manifest.encode() != written:
        raise ValueError(f"{MANIFEST} is damaged: it does not have its own checksum")
    return manifest
