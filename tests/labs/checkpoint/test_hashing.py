"""Files are written and read whole, and their sums are those of what lies on the disk."""

import errno
import hashlib
import os
import random
import resource

import pytest

from labs.checkpoint import hashing
from labs.checkpoint.hashing import CHUNK_BYTES, DEPTH, SECTOR_BYTES, hash_file, write_file

MIB = 2**20


@pytest.fixture(params=["around the page cache", "through it", "refused at the first write"])
def way(request, monkeypatch):
    if request.param == "through it":
        monkeypatch.setattr(hashing, "_DIRECT", 0)
    if request.param == "refused at the first write":  # as a disk does that has larger sectors
        write = os.write
        direct = hashing._DIRECT

        def refusing(file, block):
            if direct & hashing.fcntl.fcntl(file, hashing.fcntl.F_GETFL):
                raise OSError(errno.EINVAL, "Invalid argument")
            return write(file, block)

        monkeypatch.setattr(os, "write", refusing)


SIZES = [0, 1, SECTOR_BYTES, CHUNK_BYTES, CHUNK_BYTES + SECTOR_BYTES, (DEPTH + 1) * CHUNK_BYTES + 17]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_hashed_and_what_is_read_has_the_same_hash(tmp_path, size, way):
    data = random.Random(size).randbytes(size)
    written = write_file(tmp_path / "a", [data])
    assert (tmp_path / "a").read_bytes() == data
    assert written.size_bytes == size
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert hash_file(tmp_path / "a") == written


def test_parts_are_of_any_size_and_may_change_once_the_next_is_asked_for(tmp_path):
    part, expected = bytearray(CHUNK_BYTES), hashlib.sha256()

    def parts():
        for i in range(300):
            size = i * 401 if i % 50 else CHUNK_BYTES
            part[:size] = bytes([i % 256]) * size
            expected.update(part[:size])
            yield memoryview(part)[:size]

    written = write_file(tmp_path / "a", parts())
    assert written.sha256 == expected.hexdigest()
    assert hash_file(tmp_path / "a") == written


def test_a_file_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", [b"other"])
    assert (tmp_path / "a").read_text() == "mine"


def test_a_disk_that_takes_less_than_all_is_an_error(tmp_path, way):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(tmp_path / "a", [bytes(3 * MIB)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_of_who_gives_the_bytes_is_raised(tmp_path):
    def parts():
        yield bytes(CHUNK_BYTES)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_file(tmp_path / "a", parts())
