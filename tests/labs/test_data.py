"""The corpus: what is in it, that ranks agree on it, and what is said when it cannot be had."""

import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from labs.data import check_batch, load_corpus, local_batch

TORCH_2_13_SHA256 = "b2369b4fb767b9a4cb3d13fd75c4d9344d56f75d6288011f35458f4b16194edb"
TORCH_2_13_TOKENS = 5_427_879


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_SIM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"To be, or not to be, that is the question.\n" * 20)
    return path


def load_behind_barrier(cache_dir, barrier, found):
    barrier.wait()
    corpus = load_corpus(cache_dir=cache_dir)
    found.put((corpus.sha256, len(corpus.train)))


class TestEmbeddedCorpus:
    def test_is_the_source_of_torch_distributed(self):
        corpus = load_corpus()
        root = Path(torch.distributed.__file__).parent
        source = (root / "fsdp/_fully_shard/_fsdp_param_group.py").read_bytes()
        text = corpus.train.tobytes() + corpus.val.tobytes()
        assert b"# fsdp/_fully_shard/_fsdp_param_group.py\n" + source in text
        assert corpus.vocab_size == 256

    @pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="the hash is that of torch 2.13.0")
    def test_is_the_same_on_every_machine(self):
        corpus = load_corpus()
        assert len(corpus.train) + len(corpus.val) == TORCH_2_13_TOKENS
        assert corpus.sha256 == TORCH_2_13_SHA256

    def test_four_processes_build_it_at_the_same_moment(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        barrier, found = context.Barrier(4), context.Queue()
        ranks = [context.Process(target=load_behind_barrier, args=(tmp_path / "c", barrier, found)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        seen = {found.get(timeout=60) for _ in ranks}
        for rank in ranks:
            rank.join()
        assert seen == {(load_corpus().sha256, len(load_corpus().train))}
        assert len(list((tmp_path / "c").iterdir())) == 1  # no temporary file is left


class TestCache:
    def test_tokens_are_memory_mapped_and_split_at_the_end(self, text):
        corpus = load_corpus(text, val_fraction=0.25)
        assert isinstance(corpus.train, np.memmap)
        assert corpus.train.tobytes() + corpus.val.tobytes() == text.read_bytes()
        assert len(corpus.val) == len(text.read_bytes()) // 4

    def test_is_read_again_rather_than_built(self, text):
        path = load_corpus(text).path
        before = path.stat().st_mtime_ns
        assert load_corpus(text).path == path
        assert path.stat().st_mtime_ns == before

    def test_follows_an_edit_of_the_source(self, text):
        before = load_corpus(text).sha256
        text.write_bytes(text.read_bytes() + b"More.\n")
        assert load_corpus(text).sha256 != before

    def test_is_built_again_when_a_byte_of_it_changed(self, text):
        corpus = load_corpus(text)
        with corpus.path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"X")
        with pytest.warns(UserWarning, match="damaged"):
            again = load_corpus(text)
        assert again.train.tobytes() + again.val.tobytes() == text.read_bytes()

    def test_pickles_by_path(self, text):
        corpus = load_corpus(text)
        sent = pickle.dumps(corpus)
        assert len(sent) < 500
        there = pickle.loads(sent)
        assert isinstance(there.train, np.memmap)
        assert (there.sha256, len(there.train)) == (corpus.sha256, len(corpus.train))


class TestFolder:
    def test_reads_all_text_files_in_order_of_path_and_counts_the_others(self, tmp_path):
        folder = tmp_path / "texts"
        (folder / "a").mkdir(parents=True)
        (folder / ".git").mkdir()
        (folder / "b.txt").write_text("second\n")
        (folder / "a" / "z.txt").write_text("first, naïve")
        (folder / "picture.png").write_bytes(b"\x89PNG\x00")
        (folder / ".git" / "config").write_text("hidden")
        corpus = load_corpus(folder, val_fraction=0)
        assert corpus.train.tobytes().decode() == "# a/z.txt\nfirst, naïve\n# b.txt\nsecond\n"
        assert (corpus.files, corpus.skipped) == (2, 1)

    def test_without_text_is_an_error(self, tmp_path):
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "picture.png").write_bytes(b"\x89PNG\x00")
        with pytest.raises(ValueError, match=r"/d is empty.*\(1 that are not text were skipped\)"):
            load_corpus(tmp_path / "d")


class TestBatch:
    def test_targets_are_the_inputs_one_token_later(self, text):
        x, y = load_corpus(text).batch(0, 4, 16)
        assert (x.shape, y.shape, x.dtype, y.dtype) == ((4, 16), (4, 16), torch.int64, torch.int64)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert bytes(x[0].tolist()) in text.read_bytes()

    def test_depends_on_step_seed_and_split_alone(self, text):
        corpus = load_corpus(text)
        x, _ = corpus.batch(3, 4, 16, seed=1)
        assert torch.equal(x, load_corpus(text).batch(3, 4, 16, seed=1)[0])
        for other in (corpus.batch(4, 4, 16, seed=1), corpus.batch(3, 4, 16, seed=2)):
            assert not torch.equal(x, other[0])
        assert bytes(corpus.batch(3, 1, 16, split="val")[0][0].tolist()) in corpus.val.tobytes()

    def test_is_the_same_on_every_machine(self, text):
        x, _ = load_corpus(text).batch(0, 3, 4)
        assert [bytes(row.tolist()) for row in x] == [b"ques", b"r no", b"ques"]

    @pytest.mark.parametrize("world_size", [1, 2, 3, 6])
    def test_rows_of_the_ranks_are_the_batch(self, text, world_size):
        x, _ = load_corpus(text).batch(0, 6, 8)
        rows = [local_batch(x, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(rows), x)

    def test_the_last_possible_sequence_is_reached_and_none_beyond(self, tmp_path):
        (tmp_path / "short").write_bytes(b"abcde")
        corpus = load_corpus(tmp_path / "short", val_fraction=0)
        x, y = corpus.batch(0, 64, 3)
        assert {bytes(row.tolist()) for row in x} == {b"abc", b"bcd"}
        assert {bytes(row.tolist()) for row in y} == {b"bcd", b"cde"}


class TestErrors:
    @pytest.mark.parametrize(
        ("batch", "world_size", "says"),
        [
            (8, 3, "a batch of 8 rows does not divide into 3 ranks; use a batch of 6 or 9, or 2 or 4 ranks"),
            (2, 4, "a batch of 2 rows does not divide into 4 ranks; use a batch of 4, or 1 or 2 ranks"),
            (0, 2, "a batch of 0 rows does not divide into 2 ranks; use a batch of 2"),
            (8, 0, "world_size=0"),
        ],
    )
    def test_batch_that_does_not_divide(self, batch, world_size, says):
        with pytest.raises(ValueError, match=says):
            check_batch(batch, world_size)

    def test_no_such_rank(self):
        with pytest.raises(ValueError, match="rank=2: with world_size=2 ranks are 0 to 1"):
            local_batch(torch.zeros(4, 1), 2, 2)

    def test_missing_path(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no corpus at .*nowhere\.txt"):
            load_corpus(tmp_path / "nowhere.txt")

    def test_empty_file(self, tmp_path):
        (tmp_path / "empty.txt").touch()
        with pytest.raises(ValueError, match=r"empty\.txt is empty"):
            load_corpus(tmp_path / "empty.txt")

    @pytest.mark.parametrize(
        ("data", "says"),
        [(b"abc\xffdef", "byte 3 is 0xff"), (b"abcd\0", "byte 4 is 0x00"), (b"a\0\xff", "byte 1 is 0x00")],
    )
    def test_file_that_is_not_text_names_the_byte(self, tmp_path, data, says):
        (tmp_path / "data.bin").write_bytes(data)
        with pytest.raises(ValueError, match=rf"data\.bin is not text: {says}"):
            load_corpus(tmp_path / "data.bin")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_too_short_for_the_sequence(self, text):
        corpus = load_corpus(text)
        with pytest.raises(
            ValueError, match=r"'text.txt' is too short for seq_len=2000: its train split has 774 tokens"
        ):
            corpus.batch(0, 1, 2000)

    @pytest.mark.parametrize("fraction", [-0.1, 1.0])
    def test_validation_fraction_out_of_range(self, text, fraction):
        with pytest.raises(ValueError, match=f"val_fraction={fraction}"):
            load_corpus(text, val_fraction=fraction)

    def test_no_permission_for_the_cache_folder(self, tmp_path, text):
        folder = tmp_path / "mine"
        folder.mkdir(mode=0o555)
        text.chmod(0o644)
        is_root = os.geteuid() == 0
        parents = [p for p in text.parents if p.owner() == "root" and is_root and p.stat().st_mode & 0o005 != 0o005]
        modes = {p: p.stat().st_mode for p in parents}
        try:
            if is_root:  # root may write anywhere, so be someone else for a moment
                for p in parents:
                    p.chmod(p.stat().st_mode | 0o055)
                os.seteuid(65534)
            with pytest.raises(PermissionError, match=r"cannot write the corpus cache in .*mine.*set FSDP_SIM_CACHE"):
                load_corpus(text, cache_dir=folder)
        finally:
            if is_root:
                os.seteuid(0)
            for p, mode in modes.items():
                p.chmod(mode)

    def test_cache_folder_is_a_file(self, text):
        with pytest.raises(OSError, match=r"cannot write the corpus cache in .*text\.txt"):
            load_corpus(text, cache_dir=text)
