"""Which checkpoints count, how a save is timed, which runs were killed; going on is asserted by the lab's notebook."""

import pytest

from labs.cluster.torchrun import FailedError, train
from labs.config import read_config
from labs.experiments import resume
from labs.loop.preflight import CHECKPOINTS

pytestmark = pytest.mark.usefixtures("warm_torchrun")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(folder):
    return train(*resume.SETTING, ranks=2, out=folder / "whole", progress=False)


@pytest.fixture(scope="module")
def killed(folder):
    resume.kill(folder / "killed", ranks=2)
    return folder / "killed"


def test_a_checkpoint_that_lost_a_file_does_not_count(killed, tmp_path):
    checkpoint = killed / CHECKPOINTS / "step-2"
    copy = tmp_path / CHECKPOINTS / "step-2"
    copy.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name != "shard-1.bin":
            (copy / file.name).write_bytes(file.read_bytes())
    (one,) = resume.on_disk(tmp_path)
    assert not one.counts
    assert one.why == "shard-1.bin is missing"


def test_a_save_is_timed_beside_the_disk(whole, tmp_path):
    checkpoint = whole.out / CHECKPOINTS / f"step-{resume.STEPS}"
    weight, time = resume.checkpoint_rows(checkpoint, 2, tmp_path)
    assert weight.predicted == weight.measured == resume.predict_bytes(resume.MODEL) / 1e6
    assert time.predicted > 0
    assert time.measured > 0
    assert len(list((tmp_path / "saves").glob("step-*"))) == 2  # real ones; older ones are pruned


def test_a_run_that_fails_for_another_reason_is_no_kill(tmp_path, monkeypatch):
    def out_of_memory(*_, **__):
        raise FailedError("out of memory")

    monkeypatch.setattr(resume, "train", out_of_memory)
    with pytest.raises(FailedError, match="out of memory"):
        resume.kill(tmp_path / "run")


def test_a_run_that_was_not_killed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "train", lambda *_, **__: None)
    with pytest.raises(FailedError, match="rank 0 was to be killed at before-rename of step 4, and was not"):
        resume.kill(tmp_path / "run")


def test_bits_are_compared_on_gpus_only_of_deterministic_runs():
    assert read_config((*resume.setting("cuda"), "--out=run")).deterministic
    assert not read_config((*resume.setting("cpu"), "--out=run")).deterministic


def test_ranks_that_do_not_divide_the_rows_are_refused(capsys):
    assert resume.main(ranks=3) == 2
    assert "ranks=3" in capsys.readouterr().out
