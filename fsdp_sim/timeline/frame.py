"""A timeline as a pandas DataFrame, a row per event, and as a Parquet file; and back.

pandas and pyarrow are imported when they are needed: the base install has neither.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fsdp_sim.packages import missing
from fsdp_sim.timeline.event import Event, checked
from fsdp_sim.timeline.header import VERSION, Header
from fsdp_sim.timeline.kinds import Lane, Memory, Op, Phase
from fsdp_sim.timeline.limits import EVENT_BYTES, MAX_BYTES, TooLargeError, refuse_beyond
from fsdp_sim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

HEADER = "fsdp_sim_header"  # the key of the header in DataFrame.attrs, and so in a Parquet file
_WORDS: dict[str, type[Op] | type[Lane] | type[Phase] | type[Memory]] = {
    "op": Op, "lane": Lane, "phase": Phase, "category": Memory,
}  # fmt: skip
_NUMBERS = {
    "seq": "int64", "rank": "int32", "step": "int32", "micro_batch": "int32", "bytes": "int64", "group_size": "int32",
    "issue_s": "float64", "start_s": "float64", "end_s": "float64", "unlaunched_s": "float64",
    "matmul_s": "float64", "attention_s": "float64", "turn": "int64",
}  # fmt: skip
_TUPLES: dict[str, type] = {"waits_on": int, "stack": str}
COLUMNS = Event.__struct_fields__


def to_pandas(timeline: Timeline) -> pd.DataFrame:
    """A row per event, in the order of the timeline; the header is in ``.attrs``.

    Words (``op``, ``lane``, ``phase``, ``category``) are categories of the whole vocabulary, in its order; the texts
    that repeat (``unit``, ``dtype``, ``source``) are categories of what occurs; ``waits_on`` and ``stack`` hold tuples.

    Raises:
        ValueError: pandas is not installed.

    Example:
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> fwd = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)
        >>> frame = to_pandas(Timeline(Header(producer="doc", clock="simulated", world_size=1), [fwd]))
        >>> frame.assign(seconds=frame.end_s - frame.start_s)[["op", "unit", "seconds"]]
            op      unit  seconds
        0  FWD  layers.0      0.5
    """
    pandas = _need("pandas")
    import numpy as np

    columns: dict[str, Any] = {}
    for name in COLUMNS:
        values = timeline.columns[name]
        if name in _WORDS:
            words = [str(word) for word in _WORDS[name]]
            columns[name] = pandas.Categorical([str(value) for value in values], categories=words)
        elif name in _NUMBERS:
            columns[name] = pandas.Series(timeline.columns.array(name), dtype=_NUMBERS[name])
        elif name in _TUPLES:
            columns[name] = np.fromiter(values, dtype=object, count=len(timeline))
        else:
            texts = pandas.Index(sorted(set(values)), dtype="object")
            columns[name] = pandas.Categorical(values, categories=texts)
    frame = pandas.DataFrame(columns)
    frame.attrs[HEADER] = msgspec.to_builtins(timeline.header)
    return frame


def from_pandas(frame: pd.DataFrame, header: Header | None = None) -> Timeline:
    """The timeline of a frame such as `to_pandas` makes; rows and columns may have been added, dropped or moved.

    Args:
        frame: columns named as the fields of `Event`; those with a default may be missing, others are ignored.
        header: in place of the one in ``frame.attrs``, which some operations of pandas lose.

    Raises:
        ValueError: there is no header, a column is missing, or a value is none of its field (named).
    """
    try:
        if header is None:
            if HEADER not in frame.attrs:
                raise ValueError(
                    f"the frame has lost its header: frame.attrs has no {HEADER!r}; pass header=timeline.header"
                )
            header = msgspec.convert(frame.attrs[HEADER], Header)
        if header.version != VERSION:
            raise ValueError(f"the frame has timeline version {header.version}, this code reads version {VERSION}")
        missing = [f.name for f in msgspec.structs.fields(Event) if f.required and f.name not in frame.columns]
        if missing:
            raise ValueError(f"the frame has no column {missing[0]!r}; an event needs one")
        columns = [name for name in COLUMNS if name in frame.columns]
        values = [_plain(frame[name], name) for name in columns]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        return Timeline(header, map(checked, msgspec.convert(rows, list[Event])))
    except msgspec.ValidationError as error:
        raise ValueError(f"the frame is no timeline: {error}") from error


def _plain(column: Any, name: str) -> list[Any]:
    """The values of a column as Python's own."""
    if name in _TUPLES:
        return [list(map(_TUPLES[name], value)) for value in column]
    values: list[Any] = column.astype(object).tolist()
    return values


def to_parquet(timeline: Timeline, path: str | Path) -> Path:
    """Write the frame of a timeline, with its header, as a Parquet file.

    Raises:
        ValueError: pandas or pyarrow is not installed.
    """
    _need("pyarrow")
    to_pandas(timeline).to_parquet(path, engine="pyarrow", index=False)
    return Path(path)


def from_parquet(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Timeline:
    """Read what `to_parquet` wrote.

    Args:
        max_bytes: how much is read at most, unpacked; see `fsdp_sim.timeline.limits`.

    Raises:
        ValueError: pandas or pyarrow is not installed; the file is no Parquet, too large, or holds something else
            (named).
    """
    pandas, pyarrow = _need("pandas"), _need("pyarrow")
    try:
        stated = importlib.import_module("pyarrow.parquet").ParquetFile(path).metadata
        packed_bytes = sum(stated.row_group(i).total_byte_size for i in range(stated.num_row_groups))
        refuse_beyond(Path(path), max(packed_bytes, stated.num_rows * EVENT_BYTES), max_bytes)
        return from_pandas(pandas.read_parquet(path, engine="pyarrow"))
    except TooLargeError:
        raise
    except (ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: {error}") from error


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(missing(name)) from error
