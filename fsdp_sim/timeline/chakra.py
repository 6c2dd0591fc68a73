"""A timeline as Chakra execution traces, the form in which MLCommons' tools and ASTRA-sim take a training step.

A file per rank, ``PREFIX.RANK.et``: protobuf messages one after the other, each after its length; first the
`GlobalMetadata`, then a `Node` for each operation that takes time. What an operation waited for, and the one before it
on its lane, are its ``data_deps``: a stream of CUDA works in order, and nothing else in the form says so. That the CPU
issued an operation late is not in it: whoever replays the nodes may begin earlier than the timeline did.

Source: mlc-chakra 1.0.0, ``schema/protobuf/et_def.proto``; for the attributes that its readers ask for,
``src/converter/pytorch_converter.py``. The few rules of protobuf that it takes are written here, so that nobody needs
protobuf to write a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import COLLECTIVES, Lane, Op
from fsdp_sim.timeline.timeline import Timeline
from fsdp_sim.timeline.written import written

SCHEMA = "1.0.0"
MEM_LOAD, MEM_STORE, COMP, SEND, RECV, COLLECTIVE = 2, 3, 4, 5, 6, 7  # NodeType
NODE_TYPES = {
    Op.H2D: MEM_LOAD, Op.ACT_H2D: MEM_LOAD, Op.D2H: MEM_STORE, Op.ACT_D2H: MEM_STORE, Op.SEND: SEND, Op.RECV: RECV,
}  # fmt: skip
COMM_TYPES = {  # CollectiveCommType
    Op.ALL_REDUCE: 0, Op.ALL_GATHER: 2, Op.BROADCAST: 5, Op.ALL_TO_ALL: 6, Op.REDUCE_SCATTER: 7, Op.BARRIER: 9,
}  # fmt: skip


def write_chakra(timeline: Timeline, prefix: str | Path) -> list[Path]:
    """Write a timeline as Chakra execution traces, one file for each of its ranks.

    Returns:
        the paths, ``PREFIX.RANK.et``.

    Example:
        >>> import tempfile
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> fwd = Event(seq=0, rank=3, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)
        >>> timeline = Timeline(Header(producer="doc", clock="simulated", world_size=4), [fwd])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write_chakra(timeline, f"{folder}/step")]
        ['step.3.et']
    """
    by_rank: dict[int, list[Event]] = {rank: [] for rank in timeline.ranks}
    for event in timeline.events:
        if not event.is_memory:
            by_rank[event.rank].append(event)
    origin_s = min((event.start_s for events in by_rank.values() for event in events), default=0.0)
    paths = []
    for rank, events in by_rank.items():
        path = Path(f"{prefix}.{rank}.et")
        with written(path) as new, new.open("wb") as file:
            _write(file, _metadata(timeline, rank))
            for node in _nodes(events, origin_s):
                _write(file, node)
        paths.append(path)
    return paths


def _write(file: IO[bytes], message: bytes) -> None:
    file.write(_varint(len(message)) + message)


def _metadata(timeline: Timeline, rank: int) -> bytes:
    header = timeline.header
    said = {"producer": header.producer, "clock": header.clock, "api": timeline.api}
    attributes = [_attribute(name, text) for name, text in said.items()]
    attributes += [_attribute("rank", rank), _attribute("world_size", header.world_size)]
    return _text(1, SCHEMA) + b"".join(_bytes(2, one) for one in attributes)


def _nodes(events: list[Event], origin_s: float) -> Iterator[bytes]:
    """The nodes of a rank, in the order in which its CPU issued them: what a node depends on stands before it."""
    there: set[int] = set()
    last: dict[Lane, int] = {}  # lane -> the event before on it
    for event in events:
        before = [last[event.lane]] if event.lane in last else []
        yield _node(event, [seq for seq in dict.fromkeys((*before, *event.waits_on)) if seq in there], origin_s)
        there.add(event.seq)
        last[event.lane] = event.seq


def _node(event: Event, deps: list[int], origin_s: float) -> bytes:
    kind = NODE_TYPES.get(event.op, COLLECTIVE if event.op in COLLECTIVES else COMP)
    # both ends are rounded, so that what ends before another starts still does
    start, end = (round((time_s - origin_s) * 1e6) for time_s in (event.start_s, event.end_s))
    attributes = [_attribute("is_cpu_op", event.lane is Lane.CPU), _attribute("stream", list(Lane).index(event.lane))]
    if kind == COLLECTIVE:
        attributes += [_attribute("comm_type", COMM_TYPES[event.op])]
    if kind in (COLLECTIVE, SEND, RECV):
        attributes += [_attribute("comm_size", input_bytes(event)), _attribute("group_size", event.group_size)]
        attributes += [_attribute("pg_name", event.group)] if event.group else []
    elif kind in (MEM_LOAD, MEM_STORE):
        attributes += [_attribute("tensor_size", event.bytes, unsigned=True)]
    named = {"unit": event.unit, "phase": str(event.phase), "dtype": event.dtype}
    attributes += [_attribute(name, text) for name, text in named.items() if text]
    return b"".join(
        (
            _number(1, event.seq + 1),  # a 0 is not written, and a node without an id is none
            _text(2, event.label),
            _number(3, kind),
            _bytes(5, b"".join(_varint(seq + 1) for seq in deps)) if deps else b"",
            _number(6, start),
            _number(7, end - start),
            *(_bytes(10, one) for one in attributes),
        )
    )


def input_bytes(event: Event) -> int:
    """What a rank puts into a collective, which is what Chakra's ``comm_size`` says: of an all-gather its shard.

    Example:
        >>> input_bytes(Event(seq=0, rank=0, op=Op.ALL_GATHER, lane=Lane.ALL_GATHER, bytes=800, group_size=8))
        100
    """
    return event.bytes // event.group_size if event.op is Op.ALL_GATHER else event.bytes


def _attribute(name: str, value: str | bool | int, *, unsigned: bool = False) -> bytes:
    """An `AttributeProto`: of its ``oneof`` one is there even where it is 0."""
    if isinstance(value, str):
        of = _key(29, 2) + _varint(len(value.encode())) + value.encode()
    elif isinstance(value, bool):
        of = _key(27, 0) + _varint(value)
    else:
        of = _key(13 if unsigned else 9, 0) + _varint(value)
    return _text(1, name) + of


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value) if value else b""


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode()) if value else b""


def _varint(value: int) -> bytes:
    """Seven bits a byte, the low ones first; the eighth says that another follows."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
