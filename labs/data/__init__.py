"""What the models are trained on: real text as tokens, in a memory-mapped cache that all ranks share.

The embedded corpus is the Python source of `torch.distributed` in the installed torch: about 5 MB of real text
that every machine that can run the course already has, so nothing is downloaded. By default tokens are bytes
(vocabulary 256), so there is no tokenizer to train or to ship. A file or a folder of your own works the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed

from labs.data.corpus_cache import build_cache, cache_path, read_cache, visible_files
from labs.data.loader import Loader, check_batch, local_batch
from labs.data.tokenizer import CACHE_VARIABLE, Tokenizer, cache_folder
from labs.data.tokenizer import tokenizer as tokenizer_of

__all__ = ["CACHE_VARIABLE", "VOCAB_SIZE", "Corpus", "Split", "check_batch", "load_corpus", "local_batch"]

VOCAB_SIZE = 256  # of bytes
Split = Literal["train", "val"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens to validate on. Pickled by path, so a rank that is sent one maps the same file.

    Attributes:
        name: where the text came from, for people.
        sha256: of all tokens, train then val.
        train, val: shape (tokens,), views of one memory-mapped file, ``path``: uint8 for bytes, uint16 for GPT-2's BPE.
        files: how many files the text was read from; ``skipped``: how many in the folder were not text.
        tokenizer: the name of what made the tokens; ``vocab_size``: they are 0 to vocab_size - 1.
    """

    name: str
    sha256: str
    train: np.ndarray
    val: np.ndarray
    path: Path
    files: int
    skipped: int
    tokenizer: str = "bytes"
    vocab_size: int = VOCAB_SIZE

    def __repr__(self) -> str:
        sizes = f"{len(self.train):,} + {len(self.val):,} tokens from {self.files} files, {self.skipped} skipped"
        return f"Corpus({self.name}: {sizes}, sha256 {self.sha256[:12]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.path, self.name, len(self.val) / (len(self.train) + len(self.val)))

    def check(self, seq_len: int, *, split: Split = "train") -> None:
        """Raise ValueError unless the split has a sequence of ``seq_len`` tokens and the token after it."""
        have = len(self._split(split))
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len}: a sequence has at least 1 token")
        if have < seq_len + 1:
            raise ValueError(
                f"corpus {self.name!r} is too short for seq_len={seq_len}: its {split} split has {have} tokens, and a "
                f"sequence with its targets takes {seq_len + 1}; give it more text or shorter sequences"
            )

    def loader(self, seq_len: int, global_batch: int, *, split: Split = "train", seed: int = 0) -> Loader:
        """The split cut into sequences, each once per epoch, in an order that belongs to the seed.

        Raises:
            ValueError: global_batch < 1, an unknown split, or a corpus too short for seq_len.
        """
        self.check(seq_len, split=split)
        return Loader(self._split(split), seq_len, global_batch, seed)

    def batch(
        self, step: int, batch_size: int, seq_len: int, *, split: Split = "train", seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch of one step of a loader that began at 0, the same on every rank, for every number of ranks.

        Take a rank's rows with `local_batch`.

        Returns:
            x and y, int64 of shape (batch_size, seq_len); y is x one token later. In the rows that fill up the last
            batch of an epoch y is -1.

        Raises:
            ValueError: as `loader`, or a step below 0.
        """
        loader = self.loader(seq_len, batch_size, split=split, seed=seed)
        batch = loader.batch(loader.position(step))
        return batch.x, batch.y

    def _split(self, split: Split) -> np.ndarray:
        if split not in ("train", "val"):
            raise ValueError(f"split={split!r}: a corpus has the splits 'train' and 'val'")
        return self.train if split == "train" else self.val


def load_corpus(
    source: str | Path | None = None,
    *,
    tokenizer: str | Tokenizer = "bytes",
    cache_dir: str | Path | None = None,
    val_fraction: float = 0.1,
) -> Corpus:
    """Read text into memory-mapped tokens, the last ``val_fraction`` of them kept for validation.

    Args:
        source: None for the embedded corpus, a text file (UTF-8), or a folder: all its text files, sorted by
            path, hidden ones left out, those that are not text skipped and counted.
        tokenizer: ``bytes``, ``gpt2``, or what `labs.data.tokenizer.tokenizer` returned; each has a cache of its own.
        cache_dir: where tokens are kept; by default the environment variable FSDP_SIM_CACHE, else the user's
            cache folder. Ranks may build the same cache at the same moment.

    Raises:
        FileNotFoundError: there is nothing at ``source``, or no vocabulary for ``tokenizer``.
        ValueError: no text in it, a file that is not text (with the byte offset), or a bad val_fraction.
        OSError: the source cannot be read, or the cache folder cannot be written.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}: the share kept for validation is at least 0 and below 1")
    words = tokenizer_of(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if source is None:
        root = Path(torch.distributed.__file__).parent
        name = f"torch.distributed {torch.__version__.partition('+')[0]}"
        paths = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    else:
        try:
            root = Path(source).expanduser().resolve()
        except RuntimeError as error:
            raise OSError(f"the corpus {source} cannot be read: {error}") from None
        name = root.name
        if not root.exists():
            raise FileNotFoundError(f"no corpus at {source}: give a text file or a folder of text files")
        if not (root.is_file() or root.is_dir()):
            raise ValueError(f"the corpus {source} is a pipe or a device: give a text file or a folder of text files")
        paths = [root] if root.is_file() else visible_files(root)
    folder = Path(cache_dir).expanduser() if cache_dir else cache_folder()
    cached = cache_path(folder, name, root, paths, words)
    found = read_cache(cached, words)
    if found is None:
        build_cache(cached, root, paths, words)
    return _open(cached, name, val_fraction, found)


def _open(
    cached: Path, name: str, val_fraction: float, found: tuple[dict[str, Any], np.ndarray] | None = None
) -> Corpus:
    found = found or read_cache(cached)
    if found is None:
        raise OSError(f"the corpus cache {cached} is missing or damaged; call load_corpus again to make it anew")
    header, tokens = found
    n_train = len(tokens) - round(len(tokens) * val_fraction)
    return Corpus(
        name=name,
        sha256=header["sha256"],
        train=tokens[:n_train],
        val=tokens[n_train:],
        path=cached,
        files=header["files"],
        skipped=header["skipped"],
        tokenizer=header["tokenizer"],
        vocab_size=header["vocab_size"],
    )
