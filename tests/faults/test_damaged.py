"""Files of a checkpoint that have changed: found before anything is loaded, and said; the one before is used."""

import os
import pickle
import shutil

import pytest

from tests.faults.runs import SHORT, STEPS, checkpoints

pytestmark = pytest.mark.tail  # see make test-all


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def drop_a_pickle_beside(path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {path.parent / 'exploded'}",)

    path.with_name(".metadata").write_bytes(pickle.dumps(Bomb()))


@pytest.fixture(scope="module")
def written(server, tmp_path_factory):
    """A folder with the checkpoints of steps 4 and 6; tests damage copies of it."""
    job = server.start(tmp_path_factory.mktemp("written"), *SHORT)
    assert job.wait() == 0, job.printed
    assert len(checkpoints(job)) == 2
    return job


@pytest.mark.parametrize(
    ("how", "name", "told"),
    [
        (flip_a_bit, "shard-0.bin", "shard-0.bin"),
        (truncate, "progress.json", "progress.json"),
        (os.unlink, "rank-1.safetensors", "rank-1.safetensors"),
        (drop_a_pickle_beside, "manifest.json", ".metadata"),
    ],
)
def test_the_one_before_is_used_and_that_is_said(start, written, tmp_path, how, name, told):
    shutil.copytree(written.out, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / checkpoints(written)[-1].name
    how(newest / name)
    job = start(f"--steps={STEPS + 1}")
    assert job.wait() == 0, job.printed
    said = next(line for line in job.printed.splitlines() if "step-6" in line)
    assert told in said, job.printed
    assert "goes on from step 4 " in job.printed
    assert not list(tmp_path.rglob("exploded"))
