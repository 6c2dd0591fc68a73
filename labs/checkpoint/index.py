"""What a sharded checkpoint has: for each tensor its dtype, its shape, and where its pieces are.

DCP keeps the same in a pickle, which runs code when it is read; this is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `INDEX` holds."""

    files: list[FileName]
    tensors: dict[str, Saved]


def read_index(checkpoint: Path) -> Index:
    """Which tensors a sharded checkpoint has.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged.
    """
    try:
        return msgspec.json.decode((checkpoint / INDEX).read_bytes(), type=Index)
    except msgspec.DecodeError as error:
        raise ValueError(f"{checkpoint / INDEX} is damaged: {error}") from error


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
