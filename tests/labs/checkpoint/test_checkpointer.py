"""Checkpoints on real ranks: what is killed, full, damaged or slow costs the save under way and never another one."""

import errno
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from fsdp_sim.ranks import RanksError, run
from labs.checkpoint import Checkpointer, CheckpointError, hashing
from labs.checkpoint.folder import LATEST

RANKS = 2


def state_of(step):
    """On a rank of several, its shards; else whole tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(step)
    whole = {"model.weight": torch.randn(7, 1000), "optim.weight.step": torch.tensor(float(step))}
    if not dist.is_initialized():
        return whole
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return whole | {"model.weight": distribute_tensor(whole["model.weight"], mesh, [Shard(0)], src_data_rank=None)}


def make(folder, timeout_s=30.0, **options):
    """On a rank."""
    from datetime import timedelta

    import torch.distributed as dist

    from labs.checkpoint import Checkpointer

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Checkpointer(folder, group=group, **options)


def save(checkpointer, step, **options):
    import torch.distributed as dist

    own = {"rng": torch.tensor([dist.get_rank() if dist.is_initialized() else 0, step])}
    checkpointer.save(step, state_of(step), {"step": step}, own, **options)


def save_and_wait(checkpointer, step, asynchronous):
    save(checkpointer, step, asynchronous=asynchronous)
    checkpointer.wait()


def save_steps(folder, *steps):
    checkpointer = make(folder)
    for step in steps:
        save(checkpointer, step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def newest_in(folder):
    """The step that one process finds and loads, bit for bit, and what it is told."""
    checkpointer = Checkpointer(folder)
    found = checkpointer.newest()
    if found is None:
        return None, checkpointer.messages()
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    checkpointer.load(found, state)
    assert all(torch.equal(tensor, state_of(found.step)[name]) for name, tensor in state.items())
    assert found.progress == {"step": found.step}
    return found.step, checkpointer.messages()


class TestSaveAndLoad:
    def test_the_same_ranks_get_everything_back(self, tmp_path):
        def fn():
            import torch.distributed as dist

            checkpointer = make(tmp_path / "new")
            assert checkpointer.newest() is None
            save(checkpointer, 1)
            save(checkpointer, 2, asynchronous=True)
            found = checkpointer.newest()  # waits for it
            state = state_of(0)
            checkpointer.load(found, state)
            local, expected = state["model.weight"].to_local(), state_of(2)["model.weight"].to_local()
            assert torch.equal(local, expected)
            assert checkpointer.rank_tensors(found)["rng"].tolist() == [dist.get_rank(), 2]
            return found.step, found.progress, found.format, found.world_size, checkpointer.messages()

        assert list(run(fn, RANKS, progress=False)) == [(2, {"step": 2}, "sharded", RANKS, [])] * RANKS
        assert names(tmp_path / "new") == [LATEST, "step-1", "step-2"]
        assert (tmp_path / "new" / LATEST).read_text() == "step-2\n"
        other = Checkpointer(tmp_path / "new")
        assert other.rank_tensors(other.newest()) is None  # another number of ranks: whose would they be?

    def test_full_is_the_same_to_the_caller(self, tmp_path):
        def fn():
            checkpointer = make(tmp_path, format="full")
            save(checkpointer, 3)
            with pytest.raises(ValueError, match="save it synchronously"):
                save(checkpointer, 4, asynchronous=True)
            found = checkpointer.newest()
            state = state_of(0)
            checkpointer.load(found, state)
            return torch.equal(state["model.weight"].to_local(), state_of(3)["model.weight"].to_local()), found.format

        assert list(run(fn, RANKS, progress=False)) == [(True, "full")] * RANKS
        assert newest_in(tmp_path) == (3, [])

    def test_what_does_not_fit_changes_nothing(self, tmp_path):
        checkpointer = Checkpointer(tmp_path)
        save(checkpointer, 1)
        state = {"model.weight": torch.zeros(7, 999), "optim.weight.step": torch.tensor(-1.0)}
        with pytest.raises(CheckpointError, match=r"step-1 was not loaded: .*model.weight has shape \(7, 1000\)"):
            checkpointer.load(checkpointer.newest(), state)
        assert state["optim.weight.step"] == -1

    def test_keep_below_two_and_an_unknown_format_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"keep=1.*keep at least 2"):
            Checkpointer(tmp_path, keep=1)
        with pytest.raises(ValueError, match="it is sharded or full"):
            Checkpointer(tmp_path, format="pickle")


class TestNothingIsOverwritten:
    def test_a_good_checkpoint_of_the_same_step_is_refused(self, tmp_path):
        checkpointer = Checkpointer(tmp_path)
        save(checkpointer, 1)
        before = (tmp_path / "step-1" / "manifest.json").stat()
        with pytest.raises(CheckpointError, match="step-1 is there already and is good; a checkpoint is never overwri"):
            save(checkpointer, 1)
        after = (tmp_path / "step-1" / "manifest.json").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert names(tmp_path) == [LATEST, "step-1"]

    def test_a_damaged_one_is_put_aside_and_kept(self, tmp_path):
        checkpointer = Checkpointer(tmp_path)
        for step in (1, 2):
            save(checkpointer, step)
        (tmp_path / "step-2" / "shard-0.bin").unlink()
        assert checkpointer.newest().step == 1
        save(checkpointer, 2)
        assert newest_in(tmp_path) == (2, [])
        assert len([name for name in names(tmp_path) if name.startswith("step-2.damaged-")]) == 1

    def test_the_one_gone_on_from_stays_until_two_newer_good_ones_are_there(self, tmp_path):
        checkpointer = Checkpointer(tmp_path, keep=2)
        for step in (1, 9):
            save(checkpointer, step)
        (tmp_path / "step-9" / "shard-0.bin").write_bytes(b"")
        assert checkpointer.newest().step == 1
        save(checkpointer, 2)
        assert names(tmp_path) == [LATEST, "step-1", "step-2", "step-9"]
        save(checkpointer, 3)
        assert names(tmp_path) == [LATEST, "step-2", "step-3", "step-9"]


# Which rank dies where, and which checkpoint is the newest then. Only rank 0 commits.
DEATHS = [
    ("before-shard-write", 0, True, 1),
    ("before-shard-write", 1, False, 1),
    ("shard-write", 0, False, 1),
    ("after-shard-write", 0, False, 1),
    ("after-shard-write", 1, True, 1),
    ("before-manifest", 0, False, 1),
    ("before-rename", 0, True, 1),
    ("after-rename", 0, False, 2),
    ("before-latest", 0, True, 2),
    ("before-prune", 0, True, 2),
]


@pytest.mark.parametrize(("where", "rank", "asynchronous", "newest"), DEATHS)
def test_a_rank_that_is_killed_costs_no_more_than_the_save_under_way(tmp_path, where, rank, asynchronous, newest):
    def fn():
        checkpointer = make(tmp_path)
        save(checkpointer, 1)
        os.environ["FSDP_SIM_FAULTS"] = f"kill:{where}@2@{rank}"
        save_and_wait(checkpointer, 2, asynchronous)

    start_s = time.monotonic()
    with pytest.raises(RanksError, match=f"rank {rank}.*(SIGKILL|signal {signal.SIGKILL})"):
        run(fn, RANKS, progress=False)
    assert time.monotonic() - start_s < 25  # the other rank did not wait for its timeout
    step, told = newest_in(tmp_path)
    assert step == newest
    assert not [line for line in told if "damaged" in line]  # half a checkpoint has no checkpoint's name
    assert not [name for name in names(tmp_path) if ".tmp-" in name]


def test_a_rank_that_hangs_in_a_save_ends_it_after_the_groups_time(tmp_path):
    def fn():
        import torch.distributed as dist

        checkpointer = make(tmp_path, timeout_s=1.5)
        if dist.get_rank() == 1:
            os.environ["FSDP_SIM_FAULTS"] = "slow:before-shard-write@1@1"  # for 3 s
        save(checkpointer, 1)

    with pytest.raises(RanksError, match=r"(?i)time"):
        run(fn, RANKS, progress=False)
    step, told = newest_in(tmp_path)
    assert step is None
    assert ["left unfinished by a run that ended" in line for line in told] == [True]


class TestDamage:
    def test_a_flipped_bit_in_any_file_is_found_and_the_one_before_is_taken(self, tmp_path):
        run(save_steps, RANKS, tmp_path, 1, 2, progress=False)
        files = sorted((tmp_path / "step-2").iterdir())
        assert len(files) == 7  # two shards, two ranks' own, index, progress, manifest
        for path in files:
            whole = path.read_bytes()
            flipped = bytearray(whole)
            flipped[len(whole) // 2] ^= 4
            path.write_bytes(flipped)
            step, (told,) = newest_in(tmp_path)
            assert step == 1
            assert "step-2 is damaged and was passed over: " in told
            assert path.name in told
            path.write_bytes(whole)
        assert newest_in(tmp_path) == (2, [])

    def test_progress_of_another_trainer_is_passed_over_with_the_reason(self, tmp_path):
        run(save_steps, RANKS, tmp_path, 1, progress=False)
        checkpointer = Checkpointer(tmp_path, schema=dict[str, str])
        assert checkpointer.newest() is None
        (told,) = checkpointer.messages()
        assert "step-1 is damaged and was passed over: progress.json is not what a run writes: Expected `str`" in told

    def test_ranks_find_it_together_whoever_reads_the_file(self, tmp_path):
        def fn():
            checkpointer = make(tmp_path)
            return checkpointer.newest().step, list(checkpointer.damaged.values())

        run(save_steps, RANKS, tmp_path, 1, 2, progress=False)
        for shard in ("shard-0.bin", "shard-1.bin"):
            path = tmp_path / "step-2" / shard
            data = bytearray(path.read_bytes())
            data[0] ^= 1
            path.write_bytes(data)
        first, second = run(fn, RANKS, progress=False)
        assert first == second
        assert first[0] == 1
        (told,) = first[1]
        assert "shard-0.bin" in told
        assert "shard-1.bin" in told

    def test_when_none_is_good_there_is_none_and_all_are_told(self, tmp_path):
        checkpointer = Checkpointer(tmp_path)
        for step in (1, 2):
            save(checkpointer, step)
            (tmp_path / f"step-{step}" / "evil.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        step, told = newest_in(tmp_path)
        assert step is None
        assert ["evil.pkl is not in manifest.json" in line for line in told] == [True, True]


class TestDiskTrouble:
    def test_one_rank_with_a_full_disk_fails_the_save_on_all_and_nothing_else(self, tmp_path):
        def fn():
            import resource
            import sys

            import torch.distributed as dist

            checkpointer = make(tmp_path)
            save(checkpointer, 1)
            sys.dont_write_bytecode = True  # a compiled module that the limit cuts short would stay
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            told = []
            for asynchronous in (False, True):
                if dist.get_rank() == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # bytes per file
                with pytest.raises(CheckpointError) as failed:
                    save_and_wait(checkpointer, 2, asynchronous)
                told.append(str(failed.value))
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            after = names(tmp_path)
            save(checkpointer, 3)  # and then it goes on
            return told, after

        results = run(fn, RANKS, progress=False)
        for told, after in results:
            for line in told:
                assert line.startswith("the checkpoint of step 2 was not written: rank 1: OSError: [Errno 27]")
                assert "rank 0" not in line
                assert "\n" not in line
            assert after == [LATEST, "step-1"]
        assert newest_in(tmp_path) == (3, [])

    def test_a_read_only_folder_fails_the_save_on_all_and_nothing_else(self, shared_folder):
        def fn():
            checkpointer = make(shared_folder)
            save(checkpointer, 1)
            if os.geteuid() == 0:  # root may write everywhere
                os.seteuid(65534)
            else:
                shared_folder.chmod(0o555)
            with pytest.raises(CheckpointError) as failed:
                save(checkpointer, 2)
            return str(failed.value), checkpointer.newest().step

        for told, step in run(fn, RANKS, progress=False):
            assert told.startswith("the checkpoint of step 2 was not written: rank 0: PermissionError: ")
            assert step == 1

    @pytest.fixture
    def shared_folder(self):
        """One that every user may read; pytest's own are for one user only."""
        folder = Path(tempfile.mkdtemp())
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)
        shutil.rmtree(folder)


class TestInTheBackground:
    def test_training_goes_on_and_changes_nothing_in_what_is_saved(self, tmp_path):
        def fn():
            import torch.distributed as dist

            checkpointer = make(tmp_path)
            os.environ["FSDP_SIM_FAULTS"] = "slow:before-shard-write@1@1"  # rank 1's disk is slow
            state = state_of(1)
            checkpointer.save(1, state, {"step": 1}, {}, asynchronous=True)
            for _ in range(20):
                state["model.weight"].to_local().add_(1.0)  # trains, with collectives of its own
                dist.all_reduce(torch.ones(10))
            under_way = names(tmp_path)
            before = list(checkpointer._buffers.tensors.values())
            save(checkpointer, 2, asynchronous=True)  # waits for the first
            between = names(tmp_path)
            checkpointer.wait()
            again = list(checkpointer._buffers.tensors.values())
            same = before and all(a.data_ptr() == b.data_ptr() for a, b in zip(before, again, strict=True))
            return under_way, between, same

        for under_way, between, same_buffers in run(fn, RANKS, progress=False):
            assert not [name for name in under_way if name.startswith("step-1") and ".tmp-" not in name]
            assert "step-1" in between
            assert same_buffers
        assert names(tmp_path) == [LATEST, "step-1", "step-2"]
        assert newest_in(tmp_path) == (2, [])
        shutil.rmtree(tmp_path / "step-2")
        assert newest_in(tmp_path) == (1, [])  # as it was when it was saved, not as training made it meanwhile

    def test_a_failure_is_raised_once_and_the_next_save_is_done_all_the_same(self, tmp_path):
        checkpointer = Checkpointer(tmp_path)
        save(checkpointer, 1)

        def fail(step):
            (tmp_path / f"step-{step}").mkdir(exist_ok=True)
            save(checkpointer, 1, asynchronous=True)  # it is there already

        fail(1)
        while not checkpointer._saving.done():
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
            checkpointer.poll()
        checkpointer.poll()
        fail(1)
        with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
            save(checkpointer, 2)
        assert (tmp_path / LATEST).read_text() == "step-2\n"
        fail(1)
        with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
            checkpointer.wait()
        checkpointer.wait()
        assert newest_in(tmp_path) == (2, [])


def test_a_disk_with_room_for_two_takes_a_third_when_the_oldest_has_gone(tmp_path, monkeypatch):
    def write(file, block):
        if sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) + len(block) > room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        to_disk(file, block)

    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    room_bytes = 2.5 * sum(path.stat().st_size for path in tmp_path.rglob("*"))
    to_disk = hashing._write
    monkeypatch.setattr(hashing, "_write", write)
    for step in (2, 3, 4):
        save_and_wait(checkpointer, step, asynchronous=step == 3)
        assert checkpointer.messages() == [
            f"the disk is full: step-{step - 2} was deleted for the next one, and step-{step - 1} is kept"
        ] * (step > 2)
    assert names(tmp_path) == [LATEST, "step-3", "step-4"]
    assert newest_in(tmp_path)[0] == 4
    shard = tmp_path / "step-4" / "shard-0.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match="No space left"):  # step-3 is the only good one
        save(checkpointer, 5)
    assert names(tmp_path) == [LATEST, "step-3", "step-4"]
