"""The folder of checkpoints: a checkpoint is there whole or not at all, and damage of any kind is found."""

import os

import pytest

from labs.checkpoint import folder as folders
from labs.checkpoint.hashing import hash_file
from labs.checkpoint.manifest import MANIFEST, Manifest


def make(folder, step, **contents):
    """A committed checkpoint with these files."""
    partial = folders.begin(folder, step)
    contents = {"shard-0.bin": b"tensors", folders.PROGRESS: b'{"step": %d}' % step} | contents
    for name, data in contents.items():
        (partial / name).write_bytes(data)
    files = {name: hash_file(partial / name) for name in contents}
    manifest = Manifest(step=step, format="sharded", world_size=1, files=files)
    (partial / MANIFEST).write_bytes(manifest.encode())
    return folders.commit(partial, step)


def wrong(checkpoint):
    manifest, found = folders.survey(checkpoint)
    if manifest and not found:
        found = folders.damaged_files(checkpoint, manifest, manifest.files)
    return found


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class TestCommit:
    def test_before_it_there_is_no_checkpoint_and_after_it_a_good_one(self, tmp_path):
        partial = folders.begin(tmp_path, 20)
        assert folders.candidates(tmp_path) == []
        partial.rmdir()
        made = make(tmp_path, 20)
        assert made.name == "step-20"
        assert folders.candidates(tmp_path) == [made]
        assert wrong(made) == []

    def test_two_of_one_step_do_not_meet_while_they_are_written(self, tmp_path):
        assert folders.begin(tmp_path, 20) != folders.begin(tmp_path, 20)

    def test_latest_names_it(self, tmp_path):
        for step in (9, 10):
            folders.set_latest(make(tmp_path, step))
        assert (tmp_path / folders.LATEST).read_text() == "step-10\n"
        assert names(tmp_path) == ["latest", "step-10", "step-9"]


class TestPrune:
    def test_the_newest_stay_by_number_and_not_by_name(self, tmp_path):
        for step in (8, 9, 10, 100):
            make(tmp_path, step)
        assert folders.prune(tmp_path, 2) == []
        assert names(tmp_path) == ["step-10", "step-100"]

    def test_a_damaged_one_does_not_count(self, tmp_path):
        made = {step: make(tmp_path, step) for step in (1, 2, 3, 4)}
        folders.prune(tmp_path, 2, damaged=[made[3]])
        assert names(tmp_path) == ["step-2", "step-3", "step-4"]

    def test_one_that_cannot_be_deleted_is_told_and_deleted_next_time(self, tmp_path, monkeypatch):
        for step in (1, 2, 3):
            make(tmp_path, step)
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.os.rename", lambda *_: (_ for _ in ()).throw(PermissionError("not yours")))
            (told,) = folders.prune(tmp_path, 2)
        assert "step-1 is old and could not be deleted: not yours" in told
        assert folders.prune(tmp_path, 2) == []
        assert names(tmp_path) == ["step-2", "step-3"]


class TestPrepare:
    def test_the_folder_is_made_in_one_that_is_there(self, tmp_path):
        assert folders.prepare(tmp_path / "new") == []
        assert (tmp_path / "new").is_dir()
        with pytest.raises(FileNotFoundError):
            folders.prepare(tmp_path / "not" / "there")

    def test_only_what_was_not_finished_goes_and_each_is_told(self, tmp_path):
        made = make(tmp_path, 20)
        (folders.begin(tmp_path, 30) / "shard-0.bin").write_bytes(b"half")
        (tmp_path / "latest.tmp-0011aabb").write_text("step-3")
        mine = ["notes.tmp-mine", "step-20.damaged-0011aabb", "step-7.tmp", "latest"]
        for name in mine:
            (tmp_path / name).mkdir()
        told = folders.prepare(tmp_path)
        assert names(tmp_path) == sorted(["step-20", *mine])
        assert [("step-30.tmp-" in line, "latest.tmp-" in line) for line in told] == [(False, True), (True, False)]
        assert wrong(made) == []


class TestDamage:
    @pytest.mark.parametrize("name", ["shard-0.bin", folders.PROGRESS, MANIFEST])
    @pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 3)], ids=["missing", "cut off"])
    def test_of_a_file_is_told(self, tmp_path, damage, name):
        made = make(tmp_path, 1)
        damage(made / name)
        (told,) = wrong(made)
        assert name in told

    def test_a_foreign_file_is_told_and_not_opened(self, tmp_path):
        made = make(tmp_path, 1)
        os.mkfifo(made / "evil.pkl")  # who opens it to read waits forever
        (told,) = wrong(made)
        assert told == f"evil.pkl is not in {MANIFEST}: it does not belong to the checkpoint, and was not opened"

    def test_a_checkpoint_under_another_steps_name(self, tmp_path):
        made = make(tmp_path, 1).rename(tmp_path / "step-5")
        assert wrong(made) == [f"{MANIFEST} says step 1"]

    def test_a_file_in_the_place_of_a_checkpoint(self, tmp_path):
        (tmp_path / "step-5").write_text("not a folder")
        assert len(wrong(tmp_path / "step-5")) == 1


def test_every_file_is_read_by_one_rank_and_the_ranks_read_about_equally_much(tmp_path):
    made = make(tmp_path, 1, **{f"shard-{i}.bin": bytes(1000 + i) for i in range(7)})
    manifest, _ = folders.survey(made)
    shares = folders.shares(manifest, 3)
    assert sorted(name for share in shares for name in share) == sorted(manifest.files)
    loads = [sum(manifest.files[name].size_bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= 1006


class TestNewestProgress:
    def test_it_is_that_of_the_newest_that_looks_whole(self, tmp_path):
        make(tmp_path, 1)
        make(tmp_path, 2)
        make(tmp_path, 3)
        os.truncate(tmp_path / "step-3" / "shard-0.bin", 1)
        (tmp_path / "step-2" / folders.PROGRESS).write_bytes(b'{"step": 7}')
        assert folders.newest_progress(tmp_path) == {"step": 1}

    def test_there_may_be_none(self, tmp_path):
        assert folders.newest_progress(tmp_path) is None
        assert folders.newest_progress(tmp_path / "not-there") is None
