"""The one message that a rank sends when it is done, read without ever waiting for it.

The code that runs in a rank can find the rank's end of the connection and write anything to it. So the parent takes
what has arrived, up to a limit, and reads it as one of two types, never as whatever it may hold.
"""

from __future__ import annotations

import os
import struct
import time
from multiprocessing.connection import Connection, wait

import msgspec

STILL_S = 10.0  # a message that has begun and stands still for so long will not end
LOOK_S = 0.2  # how long one look may take while a long message arrives
CHUNK_BYTES = 1 << 18


class ResultMessage(msgspec.Struct, array_like=True, tag="done", frozen=True):
    """The function has returned: its result and the recorder's events, each encoded."""

    result: bytes
    events: bytes


class ErrorMessage(msgspec.Struct, array_like=True, tag="raised", frozen=True):
    """The function has raised: the exception's type, text and traceback."""

    kind: str
    text: str
    traceback: str


class MessageError(Exception):
    """What a rank sent is no message; says why."""


def send(control: Connection, message: ResultMessage | ErrorMessage) -> None:
    control.send_bytes(msgspec.msgpack.encode(message))


class Inbox:
    """The parent's end of a rank's connection.

    Attributes:
        received_bytes: so far.
    """

    def __init__(self, control: Connection, most_bytes: int | None) -> None:
        self._control, self._most_bytes = control, most_bytes
        self._data = bytearray()
        self._moved_s = 0.0
        os.set_blocking(control.fileno(), False)

    @property
    def received_bytes(self) -> int:
        return len(self._data)

    def take(self) -> ResultMessage | ErrorMessage | None:
        """The message, once all of it is there.

        Raises:
            MessageError: it is none, or too long, or ends in its middle. EOFError: the rank has closed its end.
        """
        until_s = time.monotonic() + LOOK_S
        while missing := self._missing_bytes():
            try:
                chunk = os.read(self._control.fileno(), min(missing, CHUNK_BYTES))
            except BlockingIOError:
                if self._data and time.monotonic() - self._moved_s > STILL_S:
                    raise MessageError(f"it ends after {len(self._data):,} bytes") from None
                if not self._data or not wait([self._control], until_s - time.monotonic()):
                    return None
                continue
            if not chunk:
                raise EOFError
            self._data += chunk
            self._moved_s = time.monotonic()
            if self._moved_s > until_s:
                return None
        start = _frame(self._data)[0]
        try:
            return msgspec.msgpack.decode(memoryview(self._data)[start:], type=ResultMessage | ErrorMessage)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MessageError(str(error)) from None

    def _missing_bytes(self) -> int:
        """How many bytes are known to be on their way still."""
        start, length = _frame(self._data)
        if self._most_bytes is not None and length > self._most_bytes:
            raise MessageError(f"it has {length:,} bytes; at most {self._most_bytes:,} can be sent back")
        return start + length - len(self._data)


def _frame(data: bytearray) -> tuple[int, int]:
    """Where a message begins, and its bytes, as far as the header is there: `Connection.send_bytes` writes the length
    as four bytes, or -1 and then eight.

    Raises:
        MessageError: a length below zero.
    """
    if len(data) < 4:
        return 4, 0
    (length,) = struct.unpack_from("!i", data)
    if length != -1:
        if length < 0:
            raise MessageError(f"its length is given as {length:,}")
        return 4, length
    return (12, struct.unpack_from("!Q", data, 4)[0]) if len(data) >= 12 else (12, 0)
