"""The cache of a corpus: one file with all its tokens, made once, mapped into memory by every rank.

A header of one JSON line says what the tokens are. Its SHA-256, which ends it, and that of the tokens are compared
whenever the file is opened, so damage is noticed. The file appears whole or not at all, and its name changes with the
text and with the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from labs.data.tokenizer import CACHE_VARIABLE, Tokenizer

_FORMAT = 3
_HEADER_BYTES = 512  # a JSON line, padded, and its SHA-256: what follows it in a cache file are the tokens
_SUM_BYTES = 64


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type, little-endian, that holds vocab_size - 1: uint8 for bytes, uint16 for GPT-2's BPE."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def visible_files(root: Path) -> list[Path]:
    """All files in a folder but hidden ones, sorted by path."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((p for p in found if p.is_file()), key=lambda path: path.relative_to(root).as_posix())


def cache_path(folder: Path, name: str, root: Path, paths: list[Path], tokenizer: Tokenizer) -> Path:
    """The cache file of a text: another one when a file is added, removed or edited, without reading any of them."""
    stats = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    content = json.dumps([_FORMAT, tokenizer.name, tokenizer.vocabulary, str(root), stats])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
    return folder / f"{name.replace(' ', '-')}-{tokenizer.name}-{fingerprint}.tokens"


def _not_text_at(data: bytes) -> int | None:
    """The offset of the first byte that does not belong in a UTF-8 text file; None when all do."""
    nul = data.find(0)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if nul < 0 else min(nul, error.start)
    return nul if nul >= 0 else None


def _titled(path: str, text: str) -> str:
    """A file's text under a line with its path, on lines of its own; an empty file leaves no trace."""
    end = "" if text.endswith("\n") else "\n"
    return f"# {path}\n{text}{end}" if text else ""


def _texts(root: Path, paths: list[Path]) -> Iterator[str | None]:
    """The text of each file, in a folder under a line with its path; None for a file that is skipped."""
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
            yield data.decode() if path == root else _titled(path.relative_to(root).as_posix(), data.decode())
        elif path == root:
            raise ValueError(
                f"{path} is not text: byte {offset} is 0x{data[offset]:02x}, which is not UTF-8 text; "
                "give a text file, or a folder (files that are not text are skipped in it)"
            )
        else:
            yield None


def build_cache(cached: Path, root: Path, paths: list[Path], tokenizer: Tokenizer) -> None:
    """Write the cache file under another name, then move it into place: readers see a whole file or none.

    One file of the text is in memory at a time, with its tokens. Between files goes the end of text, where the
    tokenizer has one.

    Raises:
        ValueError: there is no text, or the one file is not text. OSError: the folder cannot be written.
    """
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cached.parent, prefix=cached.name, suffix=".tmp")
    except OSError as error:
        raise type(error)(
            f"cannot write the corpus cache in {cached.parent} ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a folder that you can read and write"
        ) from error
    try:
        digest, files, skipped = hashlib.sha256(), 0, 0
        dtype = token_dtype(tokenizer.vocab_size)
        with os.fdopen(handle, "wb") as out:
            out.seek(_HEADER_BYTES)
            for text in _texts(root, paths):
                if text is None:
                    skipped += 1
                    continue
                if not text:
                    continue
                between = [] if tokenizer.end_of_text is None or not files else [tokenizer.end_of_text]
                for tokens in (np.array(between, dtype), tokenizer.encode(text).astype(dtype, copy=False)):
                    digest.update(tokens.data)
                    out.write(tokens.data)
                files += 1
            if not files:
                aside = f" ({skipped} that are not text were skipped)" if skipped else ""
                raise ValueError(f"the corpus {root} is empty: there is no text in it{aside}")
            out.seek(0)
            header = {
                "tokenizer": tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "sha256": digest.hexdigest(),
                "files": files,
                "skipped": skipped,
            }
            line = json.dumps(header).encode().ljust(_HEADER_BYTES - _SUM_BYTES - 1) + b"\n"
            out.write(line + hashlib.sha256(line).hexdigest().encode())
        os.replace(temporary, cached)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_cache(cached: Path, tokenizer: Tokenizer | None = None) -> tuple[dict[str, Any], np.ndarray] | None:
    """Header and tokens of a cache file; None when there is none, or when it is not as it was written.

    Args:
        tokenizer: whose tokens it has to hold, where that is known.
    """
    try:
        with cached.open("rb") as file:
            line, written = file.read(_HEADER_BYTES - _SUM_BYTES), file.read(_SUM_BYTES)
        if hashlib.sha256(line).hexdigest().encode() == written:
            header = json.loads(line)
            made_by = (header["tokenizer"], header["vocab_size"])
            tokens = np.memmap(cached, dtype=token_dtype(header["vocab_size"]), mode="r", offset=_HEADER_BYTES)
            is_whole = hashlib.sha256(tokens.data).hexdigest() == header["sha256"]
            if is_whole and (tokenizer is None or made_by == (tokenizer.name, tokenizer.vocab_size)):
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
    warnings.warn(f"{cached} is damaged; it is made anew from the text", stacklevel=3)
    return None
