"""What the GPT is trained on: real text as bytes, in a memory-mapped cache that all ranks share.

The embedded corpus is the Python source of `torch.distributed` in the installed torch: about 5 MB of real text
that every machine that can run the course already has, so nothing is downloaded. Tokens are bytes (vocabulary
256), so there is no tokenizer to train or to ship. A file or a folder of your own works the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import platformdirs
import torch
import torch.distributed

VOCAB_SIZE = 256
CACHE_VARIABLE = "FSDP_SIM_CACHE"
_FORMAT = 1
_HEADER_BYTES = 256  # a JSON line, padded: what follows it in a cache file are the tokens
Split = Literal["train", "val"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens to validate on. Pickled by path, so a rank that is sent one maps the same file.

    Attributes:
        name: where the text came from, for people.
        sha256: of all tokens, train then val.
        train, val: uint8 of shape (tokens,), views of one memory-mapped file, ``path``.
        files: how many files the text was read from; ``skipped``: how many in the folder were not text.
    """

    name: str
    sha256: str
    train: np.ndarray
    val: np.ndarray
    path: Path
    files: int
    skipped: int
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

    def batch(
        self, step: int, batch_size: int, seq_len: int, *, split: Split = "train", seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch of one step, the same on every rank and for every number of ranks.

        It depends on the arguments alone, so a run with other ranks, or one resumed in the middle, sees the same
        data. Take a rank's rows with `local_batch`.

        Returns:
            x and y, int64 of shape (batch_size, seq_len); y is x one token later.

        Raises:
            ValueError: batch_size < 1, an unknown split, or a corpus too short for seq_len.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has at least 1 row")
        if step < 0 or seed < 0:
            raise ValueError(f"step={step}, seed={seed}: both count from 0")
        self.check(seq_len, split=split)
        tokens = self._split(split)
        # The raw output of a bit generator is the part of numpy.random that is promised to stay the same.
        random = np.random.PCG64((seed, step, ("train", "val").index(split))).random_raw(batch_size)
        starts = (random % np.uint64(len(tokens) - seq_len)).astype(np.int64)  # (batch,)
        rows = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)  # (batch, seq + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _split(self, split: Split) -> np.ndarray:
        if split not in ("train", "val"):
            raise ValueError(f"split={split!r}: a corpus has the splits 'train' and 'val'")
        return self.train if split == "train" else self.val


def check_batch(batch_size: int, world_size: int) -> None:
    """Raise ValueError, naming the nearest right values, unless every rank gets equally many rows, at least 1."""
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: there is at least 1 rank")
    if batch_size < 1 or batch_size % world_size:
        below, above = batch_size // world_size * world_size, (batch_size // world_size + 1) * world_size
        batches = " or ".join(str(n) for n in (below, above) if n >= world_size)
        ranks = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        near = sorted(sorted(ranks, key=lambda n: abs(n - world_size))[:2])
        also = f", or {' or '.join(map(str, near))} ranks" if near else ""
        raise ValueError(
            f"a batch of {batch_size} rows does not divide into {world_size} ranks; use a batch of {batches}{also}"
        )


def local_batch(x: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows of one rank: (batch, ...) to (batch / world_size, ...); the ranks' rows in rank order are the batch.

    Raises:
        ValueError: the batch does not divide, or there is no such rank.
    """
    check_batch(len(x), world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: with world_size={world_size} ranks are 0 to {world_size - 1}")
    rows = len(x) // world_size
    return x[rank * rows : (rank + 1) * rows]


def load_corpus(
    source: str | Path | None = None, *, cache_dir: str | Path | None = None, val_fraction: float = 0.1
) -> Corpus:
    """Read text into memory-mapped tokens, the last ``val_fraction`` of them kept for validation.

    Args:
        source: None for the embedded corpus, a text file (UTF-8), or a folder: all its text files, sorted by
            path, hidden ones left out, those that are not text skipped and counted.
        cache_dir: where tokens are kept; by default the environment variable FSDP_SIM_CACHE, else the user's
            cache folder. Ranks may build the same cache at the same moment.

    Raises:
        FileNotFoundError: there is nothing at ``source``.
        ValueError: no text in it, a file that is not text (with the byte offset), or a bad val_fraction.
        OSError: the source cannot be read, or the cache folder cannot be written.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}: the share kept for validation is at least 0 and below 1")
    if source is None:
        root = Path(torch.distributed.__file__).parent
        name = f"torch.distributed {torch.__version__.partition('+')[0]}"
        paths = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    else:
        root = Path(source).expanduser().resolve()
        name = root.name
        if not root.exists():
            raise FileNotFoundError(f"no corpus at {source}: give a text file or a folder of text files")
        paths = [root] if root.is_file() else _visible_files(root)
    folder = Path(cache_dir or os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("fsdp_sim")).expanduser()
    cached = folder / f"{name.replace(' ', '-')}-{_fingerprint(root, paths)}.tokens"
    found = _read(cached)
    if found is None:
        _build(cached, root, paths)
    return _open(cached, name, val_fraction, found)


def _open(
    cached: Path, name: str, val_fraction: float, found: tuple[dict[str, Any], np.ndarray] | None = None
) -> Corpus:
    found = found or _read(cached)
    if found is None:
        raise OSError(f"the corpus cache {cached} is missing or damaged; call load_corpus again to make it anew")
    header, tokens = found
    n_val = round(len(tokens) * val_fraction)
    n_train = len(tokens) - n_val
    train, val = tokens[:n_train], tokens[n_train:]
    return Corpus(name, header["sha256"], train, val, cached, header["files"], header["skipped"])


def _visible_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((p for p in found if p.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _fingerprint(root: Path, paths: list[Path]) -> str:
    """Changes when a file is added, removed or edited, without reading any of them."""
    stats = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([_FORMAT, str(root), stats]).encode()).hexdigest()[:16]


def _not_text_at(data: bytes) -> int | None:
    """The offset of the first byte that does not belong in a UTF-8 text file; None when all do."""
    nul = data.find(0)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if nul < 0 else min(nul, error.start)
    return nul if nul >= 0 else None


def _titled(path: str, data: bytes) -> bytes:
    """A file's text under a line with its path, on lines of its own; an empty file leaves no trace."""
    end = b"" if data.endswith(b"\n") else b"\n"
    return f"# {path}\n".encode() + data + end if data else b""


def _texts(root: Path, paths: list[Path]) -> Iterator[bytes | None]:
    """The bytes of each file, in a folder under a line with its path; None for a file that is skipped."""
    for path in paths:
        try:
            data = path.read_bytes()
        except PermissionError:
            if path == root:
                raise PermissionError(f"no permission to read the corpus {path}") from None
            yield None
            continue
        offset = _not_text_at(data)
        if offset is None:
            yield data if path == root else _titled(path.relative_to(root).as_posix(), data)
        elif path == root:
            raise ValueError(
                f"{path} is not text: byte {offset} is 0x{data[offset]:02x}, which is not UTF-8 text; "
                "give a text file, or a folder (files that are not text are skipped in it)"
            )
        else:
            yield None


def _build(cached: Path, root: Path, paths: list[Path]) -> None:
    """Write the cache file under another name, then move it into place: readers see a whole file or none."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cached.parent, prefix=cached.name, suffix=".tmp")
    except OSError as error:
        raise type(error)(
            f"cannot write the corpus cache in {cached.parent} ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that you can read and write"
        ) from error
    try:
        digest, files, skipped, n_bytes = hashlib.sha256(), 0, 0, 0
        with os.fdopen(handle, "wb") as out:
            out.seek(_HEADER_BYTES)
            for text in _texts(root, paths):
                if text is None:
                    skipped += 1
                    continue
                files += bool(text)
                n_bytes += len(text)
                digest.update(text)
                out.write(text)
            if not n_bytes:
                aside = f" ({skipped} that are not text were skipped)" if skipped else ""
                raise ValueError(f"the corpus {root} is empty: there is no text in it{aside}")
            out.seek(0)
            header = {"sha256": digest.hexdigest(), "files": files, "skipped": skipped}
            out.write(json.dumps(header).encode().ljust(_HEADER_BYTES - 1) + b"\n")
        os.replace(temporary, cached)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(cached: Path) -> tuple[dict[str, Any], np.ndarray] | None:
    """Header and tokens of a cache file; None when there is none, or when its tokens are not those it was made of."""
    try:
        with cached.open("rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
        tokens = np.memmap(cached, dtype=np.uint8, mode="r", offset=_HEADER_BYTES)
        if hashlib.sha256(tokens.data).hexdigest() == header["sha256"]:
            return header, tokens
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise PermissionError(
            f"cannot read the corpus cache in {cached.parent} ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that you can read and write"
        ) from error
    except (ValueError, KeyError, TypeError):
        pass
    warnings.warn(f"{cached} is damaged; it is made anew from the text", stacklevel=4)
    return None
