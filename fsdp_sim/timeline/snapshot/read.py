"""`load_snapshot`: a snapshot of CUDA's memory from a file, a pickle or JSON, checked field by field.

Source: the structure in torch 2.13's ``torch/cuda/memory.py`` (_snapshot), and how ``torch/cuda/_memory_viz.py`` and
``torch/csrc/cuda/memory_snapshot.cpp`` read and write it.
"""

from __future__ import annotations

import gzip
import reprlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fsdp_sim.timeline.kinds import Memory
from fsdp_sim.timeline.limits import MAX_BYTES, Progress, refuse_beyond, unzipped
from fsdp_sim.timeline.snapshot.blocks import AllocationMoment, Block, Frame
from fsdp_sim.timeline.snapshot.plain_pickle import read_plain_pickle

RECORD = (
    "record with torch.cuda.memory._record_memory_history() before the first step, and write with "
    "torch.cuda.memory._dump_snapshot(file)"
)
_PIECE = 1 << 20


class Action(NamedTuple):
    """One thing that the allocator did.

    Attributes:
        action: torch's name: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map,
            segment_unmap, oom, snapshot; others pass by.
        bytes: asked for, without what rounding adds; of a segment all of it.
        at_s: by the clock of the machine, seconds since 1970; 0 where the snapshot has no times.
        free_bytes: of an oom, what the device had left.
    """

    action: str
    address: int
    bytes: int
    at_s: float
    frames: tuple[Frame, ...]
    free_bytes: int = 0


class _Alive(NamedTuple):
    address: int
    bytes: int
    frames: tuple[Frame, ...]


class Snapshot(NamedTuple):
    """One device's memory at the moment of the snapshot, and how it came to that.

    Attributes:
        device: its number. others: of other devices of which the snapshot has something.
        actions: in their order; of a ring buffer the last ones; empty where no history was recorded.
        alive: what tensors use at the end.
        reserved_bytes: of all segments at the end.
    """

    device: int
    others: tuple[int, ...]
    actions: tuple[Action, ...]
    alive: tuple[_Alive, ...]
    reserved_bytes: int

    @classmethod
    def of(cls, raw: Any, device: int | None = None) -> Snapshot:
        """From what ``torch.cuda.memory._snapshot()`` returns.

        Args:
            raw: the dictionary.
            device: which; None takes the one of which there is most.

        Raises:
            ValueError: it is no snapshot: what is missing or wrong is named.
        """
        return _Reader().snapshot(raw, device)

    def blocks(self, known: Mapping[int, Memory] | None = None) -> list[Block]:
        """Memory from its allocation to its release.

        Bytes are those asked for; the allocator rounds each block up to 512. A block is alive until its free is
        requested, as ``torch.cuda.memory_allocated`` counts: that another stream may still use it, so that it cannot be
        given out again, is not counted, and neither are segments.

        Args:
            known: by address, what is known of blocks from before the recording. Others have no category.
        """
        known = known or {}
        start = AllocationMoment(0, self.actions[0].at_s if self.actions else 0.0)
        alive: dict[int, tuple[int, AllocationMoment]] = {}
        found: list[Block] = []
        for number, one in enumerate(self.actions, start=1):
            if one.action == "alloc":
                alive[one.address] = (one.bytes, AllocationMoment(number, one.at_s, one.frames))
            elif one.action == "free_requested":
                moment = AllocationMoment(number, one.at_s, one.frames)
                if one.address in alive:
                    n_bytes, born = alive.pop(one.address)
                    found.append(Block(n_bytes, born, moment))
                else:
                    found.append(Block(one.bytes, start, moment, known.get(one.address, Memory.NONE)))
        for at_end in self.alive:
            if at_end.address not in alive:
                if at_end.address not in known and at_end.frames:
                    # Allocated while history was on, and its entry was pushed out of the ring buffer since.
                    found.append(Block(at_end.bytes, start._replace(frames=at_end.frames)))
                else:
                    found.append(Block(at_end.bytes, start, None, known.get(at_end.address, Memory.NONE)))
        return found + [Block(n_bytes, born) for n_bytes, born in alive.values()]


class _Reader:
    """Reads with each stack once: entries share their lists of frames, and so do their tuples."""

    def __init__(self) -> None:
        self.stacks: dict[int, tuple[Frame, ...]] = {}

    def snapshot(self, raw: Any, device: int | None) -> Snapshot:
        if not isinstance(raw, dict) or "segments" not in raw:
            raise ValueError(f"is no snapshot of CUDA's memory: it has no segments; {RECORD}")
        segments = [_dict(one, "segments") for one in _list(raw, "segments")]
        traces = [_list({"device_traces": one}, "device_traces") for one in _list(raw, "device_traces", missing=())]
        amount = {number: len(trace) for number, trace in enumerate(traces) if trace}
        for segment in segments:
            number = _int(segment, "device", 0 if len(amount) != 1 else next(iter(amount)))
            amount[number] = amount.get(number, 0) + 1
        if device is None:
            if not amount:
                raise ValueError(f"is a snapshot of CUDA's memory in which nothing was allocated; {RECORD}")
            device = max(amount, key=lambda number: amount[number])
        mine = [one for one in segments if _int(one, "device", device) == device]
        return Snapshot(
            device, tuple(sorted(set(amount) - {device})),
            tuple(map(self._action, traces[device] if device < len(traces) else ())),
            tuple(self._alive(mine)), sum(_int(one, "total_size") for one in mine),
        )  # fmt: skip

    def _action(self, entry: Any) -> Action:
        one = _dict(entry, "device_traces")
        name = one.get("action")
        if not isinstance(name, str):
            raise ValueError(f"has an entry in device_traces without an action: {_short(one)}")
        return Action(
            name, _int(one, "addr", 0), _int(one, "size", 0), _int(one, "time_us", 0) * 1e-6, self._frames(one),
            _int(one, "device_free", 0),
        )  # fmt: skip

    def _alive(self, segments: list[dict[str, Any]]) -> Iterator[_Alive]:
        for segment in segments:
            at = _int(segment, "address", 0)
            for one in _list(segment, "blocks"):
                block = _dict(one, "blocks")
                size = _int(block, "size", 0)
                if block.get("state") == "active_allocated":
                    address = _int(block, "address", at)
                    yield _Alive(address, _int(block, "requested_size", size), self._frames(block))
                at += size

    def _frames(self, of: dict[str, Any]) -> tuple[Frame, ...]:
        frames = of.get("frames")
        if not frames:
            return ()
        if id(frames) not in self.stacks:
            self.stacks[id(frames)] = tuple(_frame(one) for one in _list(of, "frames"))
        return self.stacks[id(frames)]


def _frame(one: Any) -> Frame:
    frame = _dict(one, "frames")
    filename, name = frame.get("filename"), frame.get("name")
    if not isinstance(filename, str) or not isinstance(name, str):
        raise ValueError(f"has a call without filename or name in frames: {_short(frame)}")
    return Frame(filename, _int(frame, "line", 0), name)


def _short(found: Any) -> str:
    """Of what a file holds; it may hold itself many times over, so that the whole would never end."""
    return reprlib.repr(found)[:80]


def _list(of: dict[str, Any], name: str, missing: Any = None) -> list[Any] | tuple[Any, ...]:
    found = of.get(name, missing)
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"is no snapshot of CUDA's memory: {name} is {_short(found)}, not a list; {RECORD}")
    return found


def _dict(one: Any, name: str) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise ValueError(f"is no snapshot of CUDA's memory: in {name} is {_short(one)}, not a dictionary; {RECORD}")
    return one


def _int(of: dict[str, Any], name: str, missing: int | None = None) -> int:
    found = of.get(name, missing)
    if type(found) is not int:
        raise ValueError(f"is no snapshot of CUDA's memory: {name} is {_short(found)}, not a whole number")
    return found


def load_snapshot(path: str | Path, *, progress: Progress | None = None, max_bytes: int = MAX_BYTES) -> Snapshot:
    """Read a snapshot of CUDA's memory: the pickle that ``torch.cuda.memory._dump_snapshot`` writes, or the same as
    JSON; either may be gzipped. No pickle is run, see `read_plain_pickle`.

    Args:
        progress: called with bytes read and bytes in all, unpacked, now and then; of JSON not at all.
        max_bytes: how much is read at most, unpacked.

    Raises:
        ValueError: the file is none, is damaged or too large, or is a pickle that does more than hold data.
        OSError: it cannot be opened.
    """
    data = _bytes(Path(path), max_bytes)
    try:
        if data[:1] == b"\x80":
            raw = read_plain_pickle(data, progress)
        elif data.lstrip()[:1] == b"{":
            raw = msgspec.json.decode(data)
        else:
            raise ValueError(f"is no snapshot of CUDA's memory: it begins with {data[:8]!r}; {RECORD}")
        return Snapshot.of(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no snapshot of CUDA's memory, which would be JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def _bytes(path: Path, max_bytes: int) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file; give the snapshot that torch.cuda.memory._dump_snapshot wrote")
    found = bytearray()
    try:
        with unzipped(path) as file:
            while piece := file.read(_PIECE):
                found += piece
                refuse_beyond(path, len(found), max_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from error
    return bytes(found)
