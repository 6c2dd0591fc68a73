"""The corpus: what is in it, that ranks agree on it, and what is said when it cannot be had."""

import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from labs.data import load_corpus
from labs.data.loader import Loader
from labs.data.tokenizer import BPETokenizer

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

    @pytest.mark.tail
    def test_four_processes_build_it_at_the_same_moment(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        barrier, found = context.Barrier(4), context.Queue()
        ranks = [context.Process(target=load_behind_barrier, args=(tmp_path / "c", barrier, found)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        seen = {found.get(timeout=300) for _ in ranks}
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

    def test_is_built_again_when_a_bit_of_its_header_changed(self, text):
        corpus = load_corpus(text)
        whole = corpus.path.read_bytes()
        header_bytes = len(whole) - len(text.read_bytes())
        of_256 = whole.index(b'"vocab_size": 256') + len('"vocab_size": 25')  # of 257, which would be two bytes a token
        for byte in (of_256, *range(0, header_bytes, 7)):
            corpus.path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
            with pytest.warns(UserWarning, match="damaged"):
                again = load_corpus(text)
            assert (again.vocab_size, again.train.dtype, again.path.read_bytes()) == (256, np.uint8, whole), byte


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


class TestTokens:
    """A corpus of GPT-2's BPE, with the vocabulary of bytes alone: merges are not the point here."""

    @pytest.fixture
    def words(self, tmp_path):
        letters = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
        ids = {letter: n for n, letter in enumerate(letters)} | {"Ġt": 256, "he": 257, "<|endoftext|>": 258}
        (tmp_path / "encoder.json").write_text(json.dumps(ids))
        (tmp_path / "vocab.bpe").write_text("#version: 0.2\nĠ t\nh e\n")
        return BPETokenizer(tmp_path / "encoder.json", tmp_path / "vocab.bpe")

    def test_of_more_than_a_byte_are_kept_as_two(self, text, words):
        corpus = load_corpus(text, tokenizer=words)
        assert isinstance(corpus.train, np.memmap)
        assert (corpus.train.dtype, corpus.tokenizer, corpus.vocab_size) == (np.uint16, "gpt2", 259)
        assert words.decode([*corpus.train.tolist(), *corpus.val.tolist()]) == text.read_text()
        assert 256 in corpus.train

    def test_have_an_end_of_text_between_documents_alone(self, tmp_path, words):
        folder = tmp_path / "texts"
        folder.mkdir()
        for name, content in (("a", "one"), ("b", ""), ("c", "<|endoftext|>"), ("d", "two\n")):
            (folder / f"{name}.txt").write_text(content)
        tokens = load_corpus(folder, tokenizer=words, val_fraction=0).train.tolist()
        ends = [i for i, token in enumerate(tokens) if token == 258]
        documents = [words.decode(tokens[a:b]) for a, b in zip([0, *(i + 1 for i in ends)], [*ends, None], strict=True)]
        assert documents == ["# a.txt\none\n", "# c.txt\n<|endoftext|>\n", "# d.txt\ntwo\n"]

    def test_each_tokenizer_has_a_cache_of_its_own(self, text, words):
        as_bytes = load_corpus(text)
        as_words = load_corpus(text, tokenizer=words)
        assert as_bytes.path != as_words.path
        assert (as_bytes.tokenizer, as_bytes.train.dtype) == ("bytes", np.uint8)
        words.vocabulary = "another"
        assert load_corpus(text, tokenizer=words).path not in (as_bytes.path, as_words.path)

    def test_pickle_by_path(self, text, words):
        corpus = load_corpus(text, tokenizer=words)
        sent = pickle.dumps(corpus)
        assert len(sent) < 500
        there = pickle.loads(sent)
        assert isinstance(there.train, np.memmap)
        assert np.array_equal(there.train, corpus.train)
        assert (there.tokenizer, there.vocab_size, there.sha256) == ("gpt2", 259, corpus.sha256)

    def test_that_another_tokenizer_made_are_not_taken(self, text, words):
        as_words, as_bytes = load_corpus(text, tokenizer=words), load_corpus(text)
        as_words.path.write_bytes(as_bytes.path.read_bytes())
        with pytest.warns(UserWarning, match="damaged"):
            again = load_corpus(text, tokenizer=words)
        assert (again.tokenizer, again.sha256) == ("gpt2", as_words.sha256)


class TestBatch:
    @pytest.mark.parametrize("split", ["train", "val"])
    def test_is_that_of_a_loader_which_began_at_0(self, text, split):
        corpus = load_corpus(text)
        loader = Loader(getattr(corpus, split), 8, 5, seed=3)
        position = 0
        for step in range(3 * len(loader) // 5 + 3):  # into the fourth epoch
            batch = loader.batch(position)
            x, y = corpus.batch(step, 5, 8, split=split, seed=3)
            assert torch.equal(x, batch.x)
            assert torch.equal(y, batch.y)
            position = batch.next


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "says"), [("pipe", "is a pipe or a device"), ("device", "is a pipe or a device"), ("loop", "loop")]
    )
    def test_what_is_neither_file_nor_folder(self, name, says, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "device").symlink_to("/dev/zero")
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises((ValueError, OSError), match=f"{says}") as caught:
            load_corpus(tmp_path / name, cache_dir=tmp_path)
        assert str(tmp_path / name) in str(caught.value)

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

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"batch_size": 0}, "global_batch=0: it is a whole number, at least 1"),
            ({"step": -1}, "step=-1: it counts from 0"),
            ({"seed": -1}, "seed=-1: it is a whole number, at least 0"),
            ({"split": "test"}, "split='test': a corpus has the splits 'train' and 'val'"),
            ({"seq_len": 0}, "seq_len=0: a sequence has at least 1 token"),
        ],
    )
    def test_batches_that_cannot_be(self, text, arguments, says):
        with pytest.raises(ValueError, match=says):
            load_corpus(text).batch(**{"step": 0, "batch_size": 4, "seq_len": 8} | arguments)

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
