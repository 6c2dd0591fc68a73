"""Tokens and text: bytes, and GPT-2's byte-pair encoding with a small vocabulary that is made here."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from labs.data.tokenizer import BPETokenizer, tokenizer

N_MERGES = 300
TIKTOKEN_NAMES = {
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
}
TEXTS = [
    "def forward(self, x):\n    return x  # they're 12 naïve 😀 bytes\n",
    "\n\n  \t trailing   \n ",
    "",
    "日本語 and العربية",
    "a<|endoftext|>b",
]


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder with encoder.json and vocab.bpe in GPT-2's format, from a small training on the embedded corpus."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    source = Path(torch.distributed.__file__).parent / "distributed_c10d.py"
    trained.train_from_iterator([source.read_text()], vocab_size=256 + N_MERGES, show_progress=False)
    folder = tmp_path_factory.mktemp("gpt2")
    vocab, merges = trained.save_model(str(folder))
    ids = json.loads(Path(vocab).read_text())
    (folder / "encoder.json").write_text(json.dumps(ids | {"<|endoftext|>": len(ids)}))
    Path(merges).rename(folder / "vocab.bpe")
    Path(vocab).unlink()
    return folder


@pytest.fixture(autouse=True)
def _nothing_at_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("FSDP_SIM_GPT2", raising=False)
    for variable in ("FSDP_SIM_CACHE", "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))


@pytest.fixture
def bpe(vocabulary, monkeypatch):
    monkeypatch.setenv("FSDP_SIM_GPT2", str(vocabulary))
    return tokenizer("gpt2")


class TestBytes:
    @given(st.text())
    def test_every_text_comes_back(self, text):
        tokens = tokenizer("bytes").encode(text)
        assert tokens.dtype == np.uint8
        assert tokens.tolist() == list(text.encode())
        assert tokenizer("bytes").decode(tokens.tolist()) == text

    def test_half_a_character_is_marked(self):
        words = tokenizer("bytes")
        assert words.decode("né".encode()[:2]) == "n\ufffd"
        assert (words.vocab_size, words.end_of_text) == (256, None)


class TestGPT2:
    def test_has_the_vocabulary_of_the_files(self, bpe):
        assert (bpe.name, bpe.vocab_size, bpe.end_of_text) == ("gpt2", 256 + N_MERGES + 1, 256 + N_MERGES)
        assert bpe.encode("def").dtype == np.uint16

    def test_merges_what_it_was_trained_on(self, bpe):
        text = TEXTS[0]
        assert len(bpe.encode(text)) < 0.7 * len(text.encode())

    def test_every_text_comes_back(self, bpe):
        @given(st.text())
        def comes_back(text):
            tokens = bpe.encode(text).tolist()
            assert bpe.decode(tokens) == text
            assert bpe.end_of_text not in tokens

        for text in TEXTS:
            assert bpe.decode(bpe.encode(text)) == text
        comes_back()

    def test_tokens_are_those_of_transformers(self, bpe, vocabulary, tmp_path):
        transformers = pytest.importorskip("transformers")
        (tmp_path / "vocab.json").write_bytes((vocabulary / "encoder.json").read_bytes())
        (tmp_path / "merges.txt").write_bytes((vocabulary / "vocab.bpe").read_bytes())
        theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path, local_files_only=True)
        source = (Path(torch.distributed.__file__).parent / "fsdp" / "api.py").read_text()
        for text in (*TEXTS[:-1], source):  # in the last one transformers sees an end of text
            assert bpe.encode(text).tolist() == theirs(text)["input_ids"]

    def test_hugging_faces_names_and_the_cache_folder_do_as_well(self, bpe, vocabulary, tmp_path, monkeypatch):
        monkeypatch.delenv("FSDP_SIM_GPT2")
        folder = tmp_path / "FSDP_SIM_CACHE" / "gpt2"
        folder.mkdir(parents=True)
        (folder / "vocab.json").write_bytes((vocabulary / "encoder.json").read_bytes())
        (folder / "merges.txt").write_bytes((vocabulary / "vocab.bpe").read_bytes())
        assert tokenizer("gpt2").vocabulary == bpe.vocabulary

    def test_tiktokens_cache_does_as_well(self, bpe, vocabulary, tmp_path, monkeypatch):
        monkeypatch.delenv("FSDP_SIM_GPT2")
        folder = tmp_path / "TIKTOKEN_CACHE_DIR"
        folder.mkdir()
        for file, name in TIKTOKEN_NAMES.items():
            (folder / name).write_bytes((vocabulary / file).read_bytes())
        assert tokenizer("gpt2").vocabulary == bpe.vocabulary

    def test_another_vocabulary_has_another_hash(self, bpe, vocabulary, tmp_path):
        ids = json.loads((vocabulary / "encoder.json").read_text())
        lines = (vocabulary / "vocab.bpe").read_text().splitlines()
        left, right = lines[-1].split(" ")
        del ids[left + right]
        ids["<|endoftext|>"] -= 1
        (tmp_path / "encoder.json").write_text(json.dumps(ids))
        (tmp_path / "vocab.bpe").write_text("\n".join(lines[:-1]) + "\n")
        shorter = BPETokenizer(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
        assert shorter.vocab_size == bpe.vocab_size - 1
        assert shorter.vocabulary != bpe.vocabulary


class TestErrors:
    def test_unknown_name(self):
        with pytest.raises(ValueError, match="tokenizer='gpt3': there are bytes and gpt2"):
            tokenizer("gpt3")

    def test_without_a_vocabulary_it_says_which_files_to_put_where(self, tmp_path):
        with pytest.raises(
            FileNotFoundError,
            match=r"put its encoder\.json and vocab\.bpe .*FSDP_SIM_CACHE/gpt2, or in a folder that FSDP_SIM_GPT2",
        ):
            tokenizer("gpt2")
        assert list(tmp_path.iterdir()) == []  # nothing was fetched

    def test_a_named_folder_without_it_is_not_replaced_by_another(self, vocabulary, tmp_path, monkeypatch):
        elsewhere = [tmp_path / "FSDP_SIM_CACHE" / "gpt2", tmp_path / "TIKTOKEN_CACHE_DIR"]
        for folder in elsewhere:
            shutil.copytree(vocabulary, folder)
        for file, name in TIKTOKEN_NAMES.items():
            (elsewhere[1] / file).rename(elsewhere[1] / name)
        monkeypatch.setenv("FSDP_SIM_GPT2", str(tmp_path / "wrong"))
        with pytest.raises(FileNotFoundError, match="wrong"):
            tokenizer("gpt2")

    @pytest.mark.parametrize(
        ("name", "damage", "says"),
        [
            ("encoder.json", lambda data: data[: len(data) // 2], "are not GPT-2's vocabulary: JSONDecodeError"),
            ("encoder.json", lambda data: b"[]", "are not GPT-2's vocabulary"),
            (
                "encoder.json",
                lambda data: data.replace(b"endoftext", b"endoftexx"),
                "are not GPT-2's vocabulary: KeyError",
            ),
            ("vocab.bpe", lambda data: data[: len(data) // 2], "GPT-2's vocabulary|take both files from one place"),
            ("vocab.bpe", lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "299 merges .* take both files from one"),
            (
                "vocab.bpe",
                lambda data: b"\n".join([b"#v", *data.splitlines()[:0:-1]]),
                "take both files from one place",
            ),
        ],
        ids=["cut", "list", "no end", "cut merges", "a merge less", "merges in another order"],
    )
    def test_damaged_files(self, vocabulary, tmp_path, monkeypatch, name, damage, says):
        monkeypatch.setenv("FSDP_SIM_GPT2", str(tmp_path))
        for file in ("encoder.json", "vocab.bpe"):
            data = (vocabulary / file).read_bytes()
            (tmp_path / file).write_bytes(damage(data) if file == name else data)
        with pytest.raises(ValueError, match=says):
            tokenizer("gpt2")
