"""Results as data that cannot execute: what `run(..., plain=True)` sends back instead of pickles.

A pickle runs code of its sender where it is opened. Numbers, texts, lists, dicts and tensors need none of that: they
travel as msgpack, and what comes out at the other end is one of them or an error.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

MAX_BYTES = 64 * 2**20
MAX_DEPTH = 32
TENSOR, INTEGER, ELLIPSIS = 1, 2, 3  # msgpack's extensions
DTYPES = {str(d): d for d in (getattr(torch, name) for name in dir(torch)) if isinstance(d, torch.dtype)}


def encode(value: Any) -> bytes:
    """``value`` as bytes.

    Args:
        value: None, ``...``, bool, int, float, text, bytes, a torch or numpy number, array or dtype, and lists, tuples,
            sets and dicts of these. Tuples and sets become lists.

    Raises:
        TypeError: it holds something else. ValueError: it is too large, or nested too deeply.
    """
    data = msgspec.msgpack.encode(_plain(value, 0))
    if len(data) > MAX_BYTES:
        raise ValueError(f"the function returned {len(data):,} bytes; at most {MAX_BYTES:,} can be sent back")
    return data


def decode(data: bytes) -> Any:
    """What `encode` was given; tuples and sets are lists.

    Raises:
        ValueError: the bytes are not `encode`'s.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_extension)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"what a rank sent back is no result ({error}); return numbers, texts, lists or tensors"
        ) from None


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"the function returned lists nested more than {MAX_DEPTH} deep; return them flat")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return bytes(value)
    if value is Ellipsis:
        return msgspec.msgpack.Ext(ELLIPSIS, b"")
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**64
        return int(value) if fits else msgspec.msgpack.Ext(INTEGER, f"{int(value):x}".encode())
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode()
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), depth)
    if isinstance(value, np.ndarray):
        return _tensor(torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, (str, int, float)) for key in value):
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
    raise TypeError(
        f"the function returned a {type(value).__name__}, which cannot be sent back as plain data; "
        "return numbers, texts, lists, dicts or tensors"
    )


def _tensor(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = [str(local.dtype), list(local.shape), flat.numpy().tobytes()]
    return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(content))


def _extension(code: int, data: memoryview) -> Any:
    if code == ELLIPSIS:
        return ...
    if code == INTEGER:
        return int(bytes(data), 16)
    if code != TENSOR:
        raise ValueError(f"extension {code} is unknown")
    name, shape, content = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return raw.view(DTYPES[name]).reshape(shape)
