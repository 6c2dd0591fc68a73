"""What a sharded checkpoint has: for each tensor its dtype, its shape, and where its pieces are.

DCP keeps the same in a pickle, which runs code when it is read; this is JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from labs.checkpoint.manifest import FileName

INDEX = "tensors.json"


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a tensor: the file (by number) that has it, from which byte on; where in the tensor; its shape."""

    file: int
    begin_bytes: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `INDEX` holds."""

    files: list[FileName]
    tensors: dict[str, SavedTensor]


def read_index(checkpoint: Path) -> Index:
    """Which tensors a sharded checkpoint has.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged.
    """
    try:
        return msgspec.json.decode((checkpoint / INDEX).read_bytes(), type=Index)
    except msgspec.DecodeError as error:
        raise ValueError(f"{checkpoint / INDEX} is damaged: {error}") from error


def check_files(checkpoint: Path, sizes_bytes: Mapping[str, int]) -> None:
    """That the pieces in a sharded checkpoint are its tensors, whole, and lie in its files.

    Raises:
        OSError, ValueError: as `read_index`; or names what lies outside.
    """
    index = read_index(checkpoint)
    for name, saved in index.tensors.items():
        if wrong := _wrong(saved, len(index.files)):
            raise ValueError(f"{checkpoint / INDEX} is damaged: {name}: {wrong}")
        for piece in saved.pieces:
            file, n_bytes = index.files[piece.file], math.prod(piece.shape) * torch_dtype(saved.dtype).itemsize
            if piece.begin_bytes + n_bytes > sizes_bytes.get(file, 0):
                raise ValueError(
                    f"{checkpoint / INDEX} is damaged: {name}: {file} ends before byte {piece.begin_bytes + n_bytes}"
                )


def _wrong(saved: SavedTensor, n_files: int) -> str:
    """What keeps the pieces from being the tensor, each of its numbers once."""
    whole = math.prod(saved.shape)
    for piece in saved.pieces:
        if not 0 <= piece.file < n_files or piece.begin_bytes < 0:
            return f"a piece from byte {piece.begin_bytes} of file {piece.file}, of {n_files} files"
        if not len(piece.offsets) == len(piece.shape) == len(saved.shape) or any(
            offset < 0 or n < 0 or offset + n > size
            for offset, n, size in zip(piece.offsets, piece.shape, saved.shape, strict=True)
        ):
            return f"a piece of shape {piece.shape} at {piece.offsets} lies outside of shape {saved.shape}"
    in_order = sorted((piece for piece in saved.pieces if math.prod(piece.shape)), key=lambda piece: piece.offsets)
    for n, piece in enumerate(in_order):
        for other in in_order[n + 1 :]:
            if piece.shape and other.offsets[0] >= piece.offsets[0] + piece.shape[0]:
                break
            if all(map(_meet, piece.offsets, piece.shape, other.offsets, other.shape)):
                return f"two pieces overlap at {other.offsets}"
    there = sum(math.prod(piece.shape) for piece in saved.pieces)
    if there != whole:
        return f"its pieces have {there} numbers, and shape {saved.shape} has {whole}"
    return ""


def _meet(offset: int, n: int, other_offset: int, other_n: int) -> bool:
    return offset < other_offset + other_n and other_offset < offset + n


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` is `torch.bfloat16`.

    Raises:
        ValueError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}; use the one it was saved with")
    return dtype


def check_fits(index: Index, state: dict[str, torch.Tensor], *, strict: bool = True) -> None:
    """That a checkpoint has what a state wants, in its shapes and dtypes, and with ``strict`` nothing else.

    Raises:
        ValueError: names the first tensor that does not fit, and says how many more there are.
    """
    found = list(_misfits(index, state, strict))
    if found:
        raise ValueError(found[0] + f" (and {len(found) - 1} more like it)" * (len(found) > 1))


def _misfits(index: Index, state: dict[str, torch.Tensor], strict: bool) -> Iterator[str]:
    for name, tensor in state.items():
        saved, dtype = index.tensors.get(name), str(tensor.dtype).removeprefix("torch.")
        if saved is None:
            yield f"{name} is not in the checkpoint; use the model that was saved"
        elif saved.shape != tuple(tensor.shape):
            yield f"{name} has shape {saved.shape} in the checkpoint and {tuple(tensor.shape)} here"
        elif saved.dtype != dtype:
            yield f"{name} is {saved.dtype} in the checkpoint and {dtype} here"
        elif tensor.is_meta:
            yield f"{name} is on the meta device; give it memory before loading"
    for name in index.tensors if strict else ():
        if name not in state:
            yield f"{name} is in the checkpoint and not here; use the model that was saved"
