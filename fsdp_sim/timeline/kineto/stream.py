"""The events of a trace file, a few megabytes at a time: plain or gzip, whatever its whitespace and order of keys.

A trace is one JSON document of up to gigabytes: an object whose ``traceEvents`` is a list of small objects, or the
bare list. It is cut where it looks as if one event ends and the next begins, and the parser judges the cut: a piece
that begins at an event and parses as a list of whole values ends at an event too. So no cut can be wrong, not even
one inside of a string that looks like JSON. msgspec reads such pieces in a quarter of the time of ijson's C backend.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fsdp_sim.timeline.kineto.repair import repaired
from fsdp_sim.timeline.limits import GZIP_MAGIC, MAX_BYTES, Progress, refuse_beyond

CHUNK_BYTES = 4 << 20
MAX_EVENT_BYTES = 64 << 20  # more without an end of an event is no trace
RECORD = (
    "record with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) and write with "
    "export_chrome_trace"
)


class Raw(msgspec.Struct, gc=False):
    """One event of the file; ``args`` stay text until somebody needs them."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    id: Any = None
    args: msgspec.Raw = msgspec.Raw(b"")


_events = msgspec.json.Decoder(list[Raw])
_envelope = msgspec.json.Decoder(dict[str, Any])


class EventStream:
    """Iterate over it for lists of events; afterwards `metadata` holds the other keys of the document.

    Raises:
        ValueError: the file is no trace, too large, or broken; the message names the file, the place and the remedy.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self.metadata: dict[str, Any] = {}
        self.count = 0
        self._progress = progress
        self._buffer = b""
        self._offset = 0  # of the buffer's first byte in the (uncompressed) document
        self._ended = False

    def __iter__(self) -> Iterator[list[Raw]]:
        if self.path.is_dir():
            raise ValueError(
                f"{self.path} is a folder; give the trace of one rank, or a list of files: "
                f"read_kineto(sorted(Path({str(self.path)!r}).glob('*.json*')))"
            )
        size = self.path.stat().st_size
        with self.path.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            self._file: BinaryIO = gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw  # type: ignore[assignment]
            self._more()
            if not self._buffer.strip(b"\xef\xbb\xbf \t\r\n\0"):
                raise self._broken(f"is empty ({size} bytes); the profiler has not written it, or was killed")
            head = self._head()
            while True:
                events, ends = self._piece()
                self.count += len(events)
                if events:
                    yield events
                if self._progress:
                    self._progress(min(raw.tell(), size), size)
                if ends:
                    break
            self._tail(head)
            if self._progress:
                self._progress(size, size)

    # ---- the document around the events ----

    def _head(self) -> bytes | None:
        """Move to the first event; what came before it, or None where the document is a bare list."""
        self._buffer = self._buffer.removeprefix(b"\xef\xbb\xbf")
        first = self._buffer.lstrip()[:1]
        if first == b"[":
            self._consume(self._buffer.index(b"[") + 1)
            return None
        if first != b"{":
            start = self._buffer.lstrip()[:24].decode("utf-8", "replace")
            raise self._broken(f"is not JSON: it begins with {start!r}")
        seen = 0
        while True:
            for key in re.finditer(rb'"traceEvents"\s*:\s*\[', self._buffer[seen:]):
                head = self._buffer[: seen + key.start()]
                known = self._parsed(head + b'"traceEvents":[]}')
                if known is not None:
                    self.metadata.update(known)
                    self._consume(seen + key.end())
                    return head
            seen = max(0, len(self._buffer) - 4096)
            if self._ended or len(self._buffer) > MAX_EVENT_BYTES:
                raise self._no_events()
            self._more()

    def _tail(self, head: bytes | None) -> None:
        """The keys after the events, and that nothing else follows."""
        while not self._ended and len(self._buffer) <= MAX_EVENT_BYTES:
            self._more()
        rest = self._buffer.strip(b" \t\r\n\0")
        if head is None:
            if rest:
                raise self._broken(f"has something after the list of its {self.count} events: {_shown(rest)}")
            return
        known = self._parsed(b'{"traceEvents":[]' + rest)
        if known is None:
            if not rest.rstrip().endswith(b"}"):
                raise self._truncated()
            raise self._broken(f"has broken JSON after its {self.count} events, at byte {self._offset:,}")
        self.metadata.update(known)

    @staticmethod
    def _parsed(document: bytes) -> dict[str, Any] | None:
        for text in (document, None):
            try:
                found = _envelope.decode(repaired(document) if text is None else text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            return {key: value for key, value in found.items() if key != "traceEvents"}
        return None

    # ---- the events ----

    def _piece(self) -> tuple[list[Raw], bool]:
        """The events up to some cut, and whether the list ends there."""
        mended = False
        while True:
            buffer = self._buffer
            for cut in self._cuts(buffer):
                text = b"[" + buffer[:cut] + (b"" if cut == len(buffer) and self._ended else b"]")
                try:
                    events = _events.decode(text)
                except msgspec.ValidationError as error:
                    raise self._foreign(error) from None
                except RecursionError:
                    raise self._broken(f"nests deeper than any trace, near byte {self._offset:,}") from None
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    message, at = str(error), _byte(error)
                    if "trailing characters" in message:  # the list ended within this piece
                        end = text.rindex(b"]", 0, at - 1)
                        events = _events.decode(text[: end + 1])
                        self._consume(end)  # text has one byte more in front, the list one more at its end
                        return events, True
                    if "truncated" in message:
                        continue  # the cut was inside of an event: try the one before
                    if not mended:
                        break
                    place = self._offset + max(at - 1, 0)
                    whole = self.count + self._whole(text[1:at])
                    raise self._broken(
                        f"is broken JSON at byte {place:,}, after {whole:,} whole events: "
                        f"{_shown(text[max(0, at - 20) : at + 20])}"
                    ) from None
                else:
                    ends = cut == len(buffer) and self._ended
                    self._consume(cut if ends else cut + 1)  # the comma too
                    return events, ends
            else:
                if self._ended:
                    if mended:
                        raise self._truncated()
                    self._mend()
                    mended = True
                    continue
                if len(buffer) > MAX_EVENT_BYTES:
                    raise self._broken(f"has no end of an event within 64 MiB after byte {self._offset:,}")
                self._more()
                continue
            self._mend()
            mended = True

    def _mend(self) -> None:
        """Repair the buffer, but for its last bytes, which may be half of a word."""
        end = len(self._buffer) if self._ended else self._buffer.rfind(b"}") + 1
        self._buffer = repaired(self._buffer[:end]) + self._buffer[end:]

    def _cuts(self, buffer: bytes) -> Iterator[int]:
        """Where the buffer may be cut, from the back: before commas between objects; at its end where the file ends."""
        if self._ended:
            yield len(buffer)
        else:
            yield from self._between_events(buffer)

    @staticmethod
    def _between_events(buffer: bytes) -> Iterator[int]:
        end = len(buffer)
        for _ in range(64):
            end = buffer.rfind(b"{", 0, end)
            if end <= 0:
                return
            before = buffer[max(0, end - 256) : end].rstrip()
            if before.endswith(b",") and before[:-1].rstrip().endswith(b"}"):
                yield max(0, end - 256) + len(before) - 1

    def _whole(self, buffer: bytes) -> int:
        """How many whole events a piece begins with."""
        for cut in self._between_events(buffer):
            try:
                return len(_events.decode(b"[" + buffer[:cut] + b"]"))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
        return 0

    # ---- bytes ----

    def _more(self) -> None:
        try:
            data = self._file.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(
                f"is a broken gzip file after {self._offset + len(self._buffer):,} uncompressed bytes ({error}); "
                "copy it again, or record again"
            ) from None
        self._ended = not data
        self._buffer += data
        refuse_beyond(self.path, self._offset + len(self._buffer), self.max_bytes)

    def _consume(self, n_bytes: int) -> None:
        self._buffer = self._buffer[n_bytes:]
        self._offset += n_bytes
        if len(self._buffer) < CHUNK_BYTES and not self._ended:
            self._more()

    # ---- sentences ----

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{self.path} {what}; {RECORD}" if "again" not in what else f"{self.path} {what}")

    def _truncated(self) -> ValueError:
        whole = self.count + self._whole(self._buffer)
        return ValueError(
            f"{self.path} ends in the middle of its JSON, after {whole:,} whole events "
            f"(byte {self._offset + len(self._buffer):,}): the profiler is still writing it or was killed; wait until "
            "export_chrome_trace has returned, or record again"
        )

    def _no_events(self) -> ValueError:
        known = self._parsed(self._buffer)
        if {"segments", "device_traces"} & set(known or ()):
            return self._broken("is a snapshot of CUDA memory, not a trace")
        if known is None and not self._buffer.rstrip().endswith(b"}"):
            return self._truncated()
        keys = ", ".join(sorted(known or ())[:6])
        has = f" (its other keys: {keys})" if keys else ""
        return self._broken(f"has no list 'traceEvents'{has}, so it is no trace of torch.profiler")

    def _foreign(self, error: msgspec.ValidationError) -> ValueError:
        index = re.search(r"\$\[(\d+)\]", str(error))
        number = self.count + int(index.group(1) if index else 0)
        return self._broken(f"is no trace: entry {number:,} of its list is no object ({str(error).split(' - ')[0]})")


def _byte(error: Exception) -> int:
    found = re.search(r"byte (\d+)", str(error))
    return int(found.group(1)) if found else 0


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("utf-8", "replace"))
