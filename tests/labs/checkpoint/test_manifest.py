"""The manifest: no bit of it can change unseen, and no name in it leads out of the checkpoint."""

import os

import msgspec
import pytest

from labs.checkpoint.hashing import FileInfo
from labs.checkpoint.manifest import MANIFEST, Manifest, read_manifest

MADE = Manifest(step=20, format="sharded", world_size=2, files={"shard-0.bin": FileInfo(12, "ab" * 32)})


def test_what_was_written_is_read(tmp_path):
    (tmp_path / MANIFEST).write_bytes(MADE.encode())
    assert msgspec.structs.replace(read_manifest(tmp_path), checksum="") == MADE


def test_a_flipped_bit_in_any_byte_is_seen(tmp_path):
    whole = MADE.encode()
    for number in range(len(whole)):
        flipped = bytearray(whole)
        flipped[number] ^= 1 << number % 8
        (tmp_path / MANIFEST).write_bytes(flipped)
        with pytest.raises(ValueError, match=f"{MANIFEST} (is damaged|has version)"):
            read_manifest(tmp_path)


def test_cut_off_anywhere_is_seen(tmp_path):
    whole = MADE.encode()
    for length in range(len(whole)):
        (tmp_path / MANIFEST).write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../other/shard-0.bin", "/etc/passwd", "..", ".hidden", "a/b", ""])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    forged = msgspec.structs.replace(MADE, files={name: FileInfo(0, "")})
    (tmp_path / MANIFEST).write_bytes(forged.encode())
    with pytest.raises(ValueError, match="damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/full"), os.mkdir])
def test_what_is_no_file_is_not_read(tmp_path, put):  # a pipe would never end
    put(tmp_path / MANIFEST)
    with pytest.raises(ValueError, match="damaged: it is no file"):
        read_manifest(tmp_path)


def test_another_version_is_named(tmp_path):
    (tmp_path / MANIFEST).write_bytes(msgspec.structs.replace(MADE, version=2).encode())
    with pytest.raises(ValueError, match="has version 2; this program reads version 1"):
        read_manifest(tmp_path)
