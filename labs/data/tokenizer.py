"""Text to tokens and back: bytes, which need nothing, or GPT-2's byte-pair encoding (BPE) where its vocabulary is.

Nothing is ever downloaded. GPT-2's vocabulary is two files that are published together, ``encoder.json`` and
``vocab.bpe`` (``vocab.json`` and ``merges.txt`` in Hugging Face's naming); any vocabulary in their format will do.

Sources: Radford et al. 2019 (GPT-2), its ``encoder.py``; `tiktoken.load.data_gym_to_mergeable_bpe_ranks`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import platformdirs

from fsdp_sim.packages import missing

CACHE_VARIABLE = "FSDP_SIM_CACHE"
GPT2_VARIABLE = "FSDP_SIM_GPT2"
END_OF_TEXT = "<|endoftext|>"
# GPT-2's rule for words, as tiktoken writes it.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
# tiktoken names the files of its cache by the SHA-1 of where they were published.
_TIKTOKEN_FILES = ("6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")


class Tokenizer(Protocol):
    """What the corpus and the sampling need.

    Attributes:
        vocab_size: tokens are 0 to vocab_size - 1.
        vocabulary: a hash of it; tokenizers of one name and vocabulary give the same tokens.
        end_of_text: the token that goes between documents; None when there is none.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def vocabulary(self) -> str: ...
    @property
    def end_of_text(self) -> int | None: ...

    def encode(self, text: str) -> np.ndarray:
        """Tokens of shape (tokens,), of an unsigned type that holds vocab_size - 1."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    name, vocab_size, vocabulary, end_of_text = "bytes", 256, "bytes", None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BPETokenizer:
    """GPT-2's byte-pair encoding with the vocabulary of two files, computed by tiktoken.

    Raises:
        ImportError: tiktoken is not installed. OSError: a file cannot be read.
        ValueError: a file is damaged, or the two do not belong together.
    """

    name = "gpt2"

    def __init__(self, encoder: Path, merges: Path) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ImportError(f"{missing('tiktoken', 'tokenizer=gpt2')}; or use tokenizer=bytes") from error
        ranks, self.end_of_text = _read_vocabulary(encoder, merges)
        self._bpe = tiktoken.Encoding(
            "gpt2", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.end_of_text}
        )
        self.vocab_size = self._bpe.n_vocab
        content = b"".join(b"%d %d " % (rank, len(token)) + token for token, rank in sorted(ranks.items()))
        self.vocabulary = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        # What looks like a special token in a text is text: a document cannot end itself.
        tokens = self._bpe.encode_to_numpy(text, disallowed_special=())
        return tokens.astype(np.min_scalar_type(self.vocab_size - 1))

    def decode(self, tokens: Iterable[int]) -> str:
        return self._bpe.decode(list(tokens))


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name: ``bytes``, or ``gpt2`` when its vocabulary is at hand.

    The vocabulary is looked for in the folder that the environment variable FSDP_SIM_GPT2 names, in the folder gpt2
    of the data cache, and in tiktoken's own cache (TIKTOKEN_CACHE_DIR).

    Raises:
        ValueError: no such tokenizer, or a vocabulary that is damaged.
        FileNotFoundError: no vocabulary; it says which files to put where.
        ImportError: ``gpt2`` without tiktoken.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return BPETokenizer(*_find_vocabulary())
    raise ValueError(f"tokenizer={name!r}: there are bytes and gpt2")


def cache_folder() -> Path:
    """Where prepared data are kept: the environment variable FSDP_SIM_CACHE, else the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("fsdp_sim")).expanduser()


def _find_vocabulary() -> tuple[Path, Path]:
    named = os.environ.get(GPT2_VARIABLE)
    folders = [Path(named).expanduser()] if named else [cache_folder() / "gpt2"]
    found = [(folder / encoder, folder / merges) for folder in folders for encoder, merges in _FILES]
    if not named:
        tiktokens = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        folder = Path(tiktokens or Path(tempfile.gettempdir(), "data-gym-cache")).expanduser()
        found.append((folder / _TIKTOKEN_FILES[0], folder / _TIKTOKEN_FILES[1]))
    for encoder, merges in found:
        if encoder.is_file() and merges.is_file():
            return encoder, merges
    raise FileNotFoundError(
        f"tokenizer=gpt2: GPT-2's vocabulary is not at hand; put its encoder.json and vocab.bpe (or vocab.json and "
        f"merges.txt) in {folders[0]}, or in a folder that {GPT2_VARIABLE} names; nothing is downloaded"
    )


def _read_vocabulary(encoder: Path, merges: Path) -> tuple[dict[bytes, int], int]:
    """The rank of each token by its bytes, and the end of text, from two files that must agree."""
    try:
        ids: dict[str, int] = json.loads(encoder.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").splitlines()
        pairs = [line.split(" ") for line in lines[1:] if line]  # the first line is a version
        end_of_text = ids.pop(END_OF_TEXT)
        letters = _letters()
        ranks = {bytes(letters[letter] for letter in token): rank for token, rank in ids.items()}
        # tiktoken merges in the order of ids: they have to be 256 bytes and then the merges in their order.
        merged = [ids[left + right] for left, right in pairs]
        bytes_first = sorted(ranks[bytes([byte])] for byte in range(256))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{encoder} and {merges} are not GPT-2's vocabulary: {type(error).__name__} {error}"
        ) from error
    if [*bytes_first, *merged, end_of_text] != list(range(len(ids) + 1)):
        raise ValueError(
            f"{encoder} has {len(ids)} tokens that are not 256 bytes and the {len(pairs)} merges of {merges} in their "
            "order, with the end of text after them; take both files from one place"
        )
    return ranks, end_of_text


def _letters() -> dict[str, int]:
    """The byte that each letter in the files stands for: GPT-2 writes all 256 with letters that can be printed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
