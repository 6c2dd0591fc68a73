"""Files of a checkpoint that have changed: found before anything is loaded, and said; the one before is used."""

import os
import pickle
import shutil

import pytest

from tests.faults.runs import STEPS, checkpoints, losses

pytestmark = pytest.mark.tail  # see make test-all


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def remove(path):
    path.unlink()


@pytest.fixture(scope="module")
def written(server, tmp_path_factory):
    """A folder with the checkpoints of steps 4 and 6; tests damage copies of it."""
    from tests.faults.runs import SHORT

    job = server.start(tmp_path_factory.mktemp("written"), *SHORT)
    assert job.wait() == 0, job.printed
    assert len(checkpoints(job)) == 2
    return job


def kinds_of_file(job):
    """One of each kind: parameters and optimizer, their index, progress, random state, manifest."""
    return sorted({path.name for path in checkpoints(job)[-1].rglob("*") if path.is_file()})


def go_on(start, written, folder, damage):
    shutil.copytree(written.out, folder / "run")
    damage(checkpoints(written)[-1].name, folder / "run" / "checkpoints")
    job = start(f"--steps={STEPS + 1}")
    return job, job.wait()


@pytest.mark.parametrize("how", [flip_a_bit, truncate, remove])
def test_every_kind_of_file(start, written, tmp_path, how):
    # one after the other in one folder per kind of damage: a run each would only take longer
    for name in kinds_of_file(written):
        folder = tmp_path / name
        shutil.copytree(written.out / "checkpoints", folder / "run" / "checkpoints")
        how(folder / "run" / "checkpoints" / checkpoints(written)[-1].name / name)
        job = start(f"--steps={STEPS + 1}", into=name)
        assert job.wait() == 0, (name, job.printed)
        said = next(line for line in job.printed.splitlines() if "step-6" in line)
        assert name in said, (name, job.printed)
        assert "goes on from step 4 " in job.printed, name


def test_a_pickle_dropped_into_it_is_never_opened(start, written, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    def drop(newest, folder):
        (folder / newest / ".metadata").write_bytes(pickle.dumps(Bomb()))

    job, status = go_on(start, written, tmp_path, drop)
    assert status == 0, job.printed
    assert ".metadata" in job.printed
    assert not (tmp_path / "exploded").exists()


def test_when_none_is_good_it_says_so_and_does_not_begin_again(start, written, tmp_path):
    def damage(newest, folder):
        for step in folder.glob("step-*"):
            flip_a_bit(max(step.iterdir(), key=lambda path: path.stat().st_size))

    job, status = go_on(start, written, tmp_path, damage)
    assert status == 1
    assert "There is no good checkpoint" in job.printed
    assert len(losses(written)) == STEPS
