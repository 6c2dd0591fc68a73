"""Results as data that cannot execute: what `run(..., plain=True)` sends back instead of pickles.

A pickle runs code of its sender where it is opened. Numbers, texts, lists, dicts and tensors need none of that: they
travel as msgpack, and what comes out at the other end is one of them or an error.

A byte of msgpack can become an object of 70, so there are few of them: the numbers of tensors, which stay as many bytes
as they are, travel behind it. And its maps may have lists as keys, of which any number have the same hash, so that to
make a dict of them takes hours: dicts travel as their keys, then their values.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np
import torch

MAX_BYTES = 64 * 2**20  # of tensors
MAX_PLAIN_BYTES = 4 * 2**20  # of everything else
MAX_DIGITS = 4096  # of a whole number, in base 16
MAX_DEPTH = 32
MAX_DIMENSIONS = 64  # torch's own limit
LENGTH = struct.Struct("!Q")
TENSOR, INTEGER, ELLIPSIS, DICT, BYTES = 1, 2, 3, 4, 5  # msgpack's extensions
DTYPES = {str(d): d for d in (getattr(torch, name) for name in dir(torch)) if isinstance(d, torch.dtype)}


class _List(msgspec.Struct, array_like=True):
    items: list[Plain]


class _Dict(msgspec.Struct, array_like=True):
    keys: list[bool | int | float | str]
    values: _List


Plain = None | bool | int | float | str | msgspec.msgpack.Ext | _List  # what msgpack has, but for maps
PLAIN, OF_DICT = msgspec.msgpack.Decoder(Plain), msgspec.msgpack.Decoder(_Dict)
OF_TENSOR = msgspec.msgpack.Decoder(tuple[str, list[int]])


def encode(value: Any) -> bytes:
    """``value`` as bytes.

    Args:
        value: None, ``...``, bool, int, float, text, bytes, a torch or numpy number, array or dtype, and lists, tuples,
            sets and dicts of these. Tuples and sets become lists.

    Raises:
        TypeError: it holds something else. ValueError: it is too large, or nested too deeply.
    """
    tensors: list[bytes] = []
    data = msgspec.msgpack.encode(_plain(value, 0, tensors))
    tensors_bytes = sum(map(len, tensors))
    if len(data) > MAX_PLAIN_BYTES or tensors_bytes > MAX_BYTES:
        raise ValueError(
            f"the function returned {tensors_bytes:,} bytes of tensors and {len(data):,} of numbers and texts; at most "
            f"{MAX_BYTES:,} and {MAX_PLAIN_BYTES:,} can be sent back"
        )
    return b"".join([LENGTH.pack(len(data)), data, *tensors])


def decode(data: bytes) -> Any:
    """What `encode` was given; tuples and sets are lists.

    Raises:
        ValueError: the bytes are not `encode`'s.
    """
    try:
        (length,) = LENGTH.unpack_from(data)
        if length > MAX_PLAIN_BYTES:
            raise ValueError(f"{length:,} bytes of numbers and texts; at most {MAX_PLAIN_BYTES:,}")
        plain = PLAIN.decode(memoryview(data)[LENGTH.size : LENGTH.size + length])
        return _Reader(memoryview(data)[LENGTH.size + length :]).value(plain, 0)
    except (msgspec.MsgspecError, struct.error, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"what a rank sent back is no result ({error}); return numbers, texts, lists or tensors"
        ) from None


def _plain(value: Any, depth: int, tensors: list[bytes]) -> Plain:
    """What travels in place of a value; the numbers of tensors are put behind those that are there."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the function returned lists nested more than {MAX_DEPTH} deep; return them flat")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return msgspec.msgpack.Ext(BYTES, bytes(value))
    if value is Ellipsis:
        return msgspec.msgpack.Ext(ELLIPSIS, b"")
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**64
        if not fits and value.bit_length() > 4 * MAX_DIGITS:
            raise ValueError(
                f"the function returned a number of {value.bit_length():,} bits; at most {4 * MAX_DIGITS:,}"
            )
        return int(value) if fits else msgspec.msgpack.Ext(INTEGER, f"{int(value):x}".encode())
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode()
    if isinstance(value, torch.Tensor):
        return _tensor(value, tensors)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), depth, tensors)
    if isinstance(value, np.ndarray):
        return _tensor(torch.from_numpy(np.ascontiguousarray(value)), tensors)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _List([_plain(item, depth + 1, tensors) for item in value])
    if isinstance(value, dict):
        keys: list[Any] = [_plain(key, depth, tensors) for key in value]
        if all(isinstance(key, (str, int, float)) for key in keys):
            values = _List([_plain(item, depth + 1, tensors) for item in value.values()])
            return msgspec.msgpack.Ext(DICT, msgspec.msgpack.encode(_Dict(keys, values)))
    raise TypeError(
        f"the function returned a {type(value).__name__}, which cannot be sent back as plain data; "
        "return numbers, texts, lists, dicts or tensors"
    )


def _tensor(tensor: torch.Tensor, tensors: list[bytes]) -> msgspec.msgpack.Ext:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensors.append(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode([str(local.dtype), list(local.shape)]))


class _Reader:
    """Makes of what has travelled the value that it stands for; each tensor takes its numbers in turn."""

    def __init__(self, numbers: memoryview) -> None:
        self._left = numbers

    def value(self, plain: Plain, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:
            raise ValueError(f"lists nested more than {MAX_DEPTH} deep")
        if isinstance(plain, _List):
            return [self.value(item, depth + 1) for item in plain.items]
        return (
            self._extension(plain.code, bytes(plain.data), depth) if isinstance(plain, msgspec.msgpack.Ext) else plain
        )

    def _extension(self, code: int, data: bytes, depth: int) -> Any:
        if code == ELLIPSIS:
            return ...
        if code == INTEGER and len(data) <= MAX_DIGITS + 1:
            return int(data, 16)
        if code == BYTES:
            return data
        if code == DICT:
            found = OF_DICT.decode(data)
            return dict(zip(found.keys, self.value(found.values, depth), strict=True))
        if code != TENSOR:
            raise ValueError(f"extension {code} of {len(data):,} bytes is unknown")
        name, shape = OF_TENSOR.decode(data)
        if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise ValueError("a tensor of no shape")
        dtype, size = DTYPES[name], math.prod(shape) * DTYPES[name].itemsize
        if size > len(self._left):
            raise ValueError(f"a tensor {shape} of {name} where {len(self._left):,} bytes are left")
        own, self._left = bytearray(self._left[:size]), self._left[size:]
        raw = torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)
