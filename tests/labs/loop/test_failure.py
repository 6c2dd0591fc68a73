"""A failed rank's word to torchrun is there whole or not at all."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record

from labs.loop.failure import WholeErrorFile


def fails() -> None:
    raise ValueError("the seventh batch is empty")


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def run_it() -> None:
    with pytest.raises(ValueError, match="seventh"):
        record(fails, WholeErrorFile())()


def test_torchrun_reads_it(error_file: Path) -> None:
    run_it()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(error_file))
    assert "the seventh batch is empty" in failure.message["message"]  # type: ignore[index]  # torch types it as str
    assert list(error_file.parent.iterdir()) == [error_file]


def test_a_rank_that_is_killed_while_it_writes_leaves_nothing_for_torchrun_to_read(
    error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def begins_to_write(data: object, file: object) -> None:
        raise KilledError

    monkeypatch.setattr(json, "dump", begins_to_write)
    with pytest.raises(KilledError):
        record(fails, WholeErrorFile())()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-15, error_file=str(error_file))
    assert failure.message == "Signal 15 (SIGTERM) received by PID 1"


def test_without_torchrun_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="seventh"):
        record(fails, WholeErrorFile())()
    assert not list(tmp_path.iterdir())
