"""Tensors in files: safetensors, of which any slice can be read alone, and which can be written tensor by tensor.

The library `safetensors` reads them. Its writer needs all tensors in memory at once, so the writer is here; the format
is the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor), then the
tensors.

Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from labs.checkpoint.hashing import FileInfo, write_file
from labs.checkpoint.storage import bytes_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""safetensors' names of dtypes."""

Index = tuple[slice, ...]
"""A slice of a tensor: one `slice` with start and stop per dimension."""


class Form(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """The form of the whole tensor, also for a DTensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """Tensors that lie somewhere, by name.

    Attributes:
        forms: what is there.
    """

    forms: dict[str, Form]

    def read(self, name: str, index: Index) -> torch.Tensor:
        """A slice of one tensor, on the CPU."""


class TensorFiles:
    """A folder's tensors in ``<stem>.safetensors``, or in several files with ``<stem>.safetensors.index.json``.

    Attributes:
        forms: dtype and shape by name.

    Raises:
        FileNotFoundError: neither is there. ValueError: a file is not whole, or has a dtype torch does not.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        index = folder / f"{stem}.safetensors.index.json"
        files = [f"{stem}.safetensors"]
        if index.exists():
            files = _named_in(index)
        self.forms: dict[str, Form] = {}
        self._slices: dict[str, Any] = {}
        for file in files:
            path = folder / file
            if not path.is_file():
                raise FileNotFoundError(f"there is no {file} in {folder}")
            try:
                opened = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path} is not a whole safetensors file: {error}; copy or save it again") from error
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_slice(name)
                if tensor.get_dtype() not in DTYPES:
                    raise ValueError(f"{path}: {name} has dtype {tensor.get_dtype()}; save it as F32 or BF16")
                self.forms[name] = Form(DTYPES[tensor.get_dtype()], tuple(tensor.get_shape()))
                self._slices[name] = tensor if tensor.get_shape() else opened.get_tensor(name)  # scalars have no slices

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Only the slice is read from the file."""
        return self._slices[name][index]


def in_order(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The order in which tensors come in a file: larger dtypes first, which keeps all aligned, then by name."""
    return dict(sorted(forms.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def write_tensors(path: Path, forms: Mapping[str, Form], read: Callable[[str], torch.Tensor]) -> FileInfo:
    """Write a safetensors file, hash it meanwhile, and fsync it.

    Args:
        forms: what is to be written.
        read: asked for one tensor at a time, `in_order`.

    Returns:
        its size and SHA-256.

    Raises:
        OSError: it cannot be written, or is there already. ValueError: a tensor has not the form that was said.
    """
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    forms = in_order(forms)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in forms.items():
        begin, end = end, end + form.size_bytes
        header[name] = {"dtype": dtype_names[form.dtype], "shape": form.shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    def tensors() -> Iterator[torch.Tensor]:
        for name, form in forms.items():
            tensor = read(name)
            if Form.of(tensor) != form:
                raise ValueError(f"{name} was to be {form} and is {Form.of(tensor)}")
            yield tensor

    return write_file(path, chain([len(encoded).to_bytes(8, "little") + encoded], bytes_of(tensors())))


def read_whole(source: Source, name: str) -> torch.Tensor:
    """All of one tensor."""
    return source.read(name, tuple(slice(0, n) for n in source.forms[name].shape))


def _named_in(index: Path) -> list[str]:
    """The files that an index names: all of its own folder."""
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file of its folder; it is not followed")
    return files
