"""Kineto's JSON that is none: bare NaN and Infinity, raw control characters, stray bytes and backslashes."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"'  # a string; what it holds is not gone through again, which would take 130 bytes each
    rb"|-?(?:[Nn]a[Nn]|NAN|[Ii]nfinity|[Ii]nf)\b",
    re.DOTALL,
)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_BACKSLASH = re.compile(rb"\\(u[0-9a-fA-F]{4}|[^u]|u)", re.DOTALL)


def repaired(text: bytes) -> bytes:
    """The same text as valid JSON, as far as these go: numbers that are none become null, and in strings control
    characters become spaces, bytes that are not UTF-8 the replacement character, and stray backslashes two.
    """
    utf8 = text.decode("utf-8", "replace").encode()
    return _TOKEN.sub(lambda token: _string(token.group()) if token.group().startswith(b'"') else b"null", utf8)


def _string(text: bytes) -> bytes:
    if b"\\" in text:
        text = _BACKSLASH.sub(_escape, text)
    return _CONTROL.sub(b" ", text)


def _escape(found: re.Match[bytes]) -> bytes:
    after = found.group(1)
    return found.group() if after[:1] in b'"\\/bfnrt' or len(after) == 5 else b"\\\\" + after
